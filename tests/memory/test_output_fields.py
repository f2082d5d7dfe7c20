# SPDX-License-Identifier: MIT
"""Fields of `out=`: of the right tuple, shape, dtype and strides, and only for what there is."""

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, NormForward, NormGrads
from tests.support.calls import WIDTH, given, raises
from tests.support.operands import assert_same_bits

ROWS = 5
SHAPE = (ROWS, WIDTH)


def backward(out, **more):
    arrays = given()
    operands = (arrays.dy, arrays.x, arrays.weight, arrays.bias)
    statistics = {"rstd": arrays.rstd, "mean": arrays.mean}
    return cunorm.layer_norm_backward(*operands, **statistics, out=out, **more)


# --- the tuple ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "out",
    [np.empty(SHAPE), (None, None), AddNorm(), NormGrads(), {"y": None}],
    ids=lambda out: type(out).__name__,
)
def test_out_of_a_forward_must_be_its_result_tuple(out):
    text = f"out is of type {type(out).__qualname__}, expected a NormForward of arrays and Nones"
    with raises(TypeError, f"layer_norm_forward: {text}"):
        cunorm.layer_norm_forward(given().x, out=out)


def test_out_of_the_others_must_be_their_result_tuple():
    text = "out is of type NormForward, expected a {} of arrays and Nones"
    with raises(TypeError, f"add_rms_norm: {text.format('AddNorm')}"):
        cunorm.add_rms_norm(given().x, given().residual, out=NormForward())
    with raises(TypeError, f"layer_norm_backward: {text.format('NormGrads')}"):
        backward(NormForward())
    with pytest.raises(TypeError, match=r"^rms_norm: out is of type AddNorm, expected a NumPy"):
        cunorm.rms_norm(given().x, out=AddNorm())


# --- shapes and strides ---------------------------------------------------------------------------


@pytest.mark.parametrize("field", NormForward._fields)
@pytest.mark.parametrize("shape", [(ROWS, WIDTH + 1), (WIDTH,), (1,), (ROWS, 1)], ids=str)
def test_a_result_of_forward_must_have_its_shape(field, shape):
    expected = SHAPE if field in ("y", "residual") else (ROWS,)
    arrays, out = given(), NormForward(**{field: np.empty(shape, np.float32)})
    text = f"out.{field} has shape {shape}, expected {expected}"
    with raises(ValueError, f"layer_norm_forward: {text}"):
        cunorm.layer_norm_forward(arrays.x, residual=arrays.residual, out=out)


@pytest.mark.parametrize("field", NormGrads._fields)
def test_a_gradient_must_have_its_shape(field):
    expected = (WIDTH,) if field in ("dweight", "dbias") else SHAPE
    text = f"out.{field} has shape (3,), expected {expected}"
    with raises(ValueError, f"layer_norm_backward: {text}"):
        backward(NormGrads(**{field: np.empty(3, np.float32)}), gate=given().gate)


@pytest.mark.parametrize("field", ["mean", "rstd"])
@pytest.mark.parametrize(
    "shape", [(ROWS,), (ROWS * 2,), (2, ROWS), (ROWS, 1), (ROWS, WIDTH)], ids=str
)
def test_with_groups_statistics_have_a_last_axis_of_them(field, shape):
    arrays, wrong = given(), np.ones(shape, np.float32)
    text = f"has shape {shape}, expected (5, 2)"
    with raises(ValueError, f"layer_norm_forward: out.{field} {text}"):
        cunorm.layer_norm_forward(arrays.x, groups=2, out=NormForward(**{field: wrong}))
    statistics = dict.fromkeys(("mean", "rstd"), np.ones((ROWS, 2), np.float32)) | {field: wrong}
    with raises(ValueError, f"layer_norm_backward: {field} {text}, one element for each row of x"):
        cunorm.layer_norm_backward(arrays.dy, arrays.x, **statistics, groups=2)


def test_statistics_of_groups_are_written_to_arrays_of_that_shape():
    arrays, out = given(), NormForward(mean=np.empty((ROWS, 2), np.float32))
    result = cunorm.layer_norm_forward(arrays.x, groups=2, out=out)
    assert result.mean is out.mean
    assert result.rstd.shape == (ROWS, 2)
    assert_same_bits(result.mean, cunorm.layer_norm_forward(arrays.x, groups=2).mean)


STRIDES = "expected contiguous rows and at most three leading axes that no single stride walks"
CONTIGUOUS = "expected a contiguous array"


def test_rows_of_an_output_must_be_contiguous():
    y = np.empty((WIDTH, ROWS), np.float32).T
    with raises(ValueError, f"rms_norm: out has strides (1, 5), {STRIDES}"):
        cunorm.rms_norm(given().x, out=y)
    with raises(ValueError, f"layer_norm_backward: out.dgate has strides (1, 5), {STRIDES}"):
        backward(NormGrads(dgate=y), gate=given().gate)
    with raises(ValueError, f"layer_norm_backward: out.dweight has strides (2,), {CONTIGUOUS}"):
        backward(NormGrads(dweight=np.empty(2 * WIDTH, np.float32)[::2]))


def test_statistics_of_groups_must_be_contiguous():
    statistics = np.empty((ROWS, WIDTH), np.float32)[:, :2]
    with raises(ValueError, f"rms_norm_forward: out.rstd has strides (8, 1), {CONTIGUOUS}"):
        cunorm.rms_norm_forward(given().x, groups=2, out=NormForward(rstd=statistics))


def test_an_output_of_four_leading_axes_that_do_not_join_is_refused():
    x = np.ones((2, 2, 2, 2, 3), np.float32)
    y = np.empty((2, 3, 2, 3, 2, 3, 2, 3), np.float32)[:, 0, :, 0, :, 0, :, :]
    strides = tuple(stride // y.itemsize for stride in y.strides)
    assert_same_bits(cunorm.rms_norm(x[0], out=y[0]), cunorm.rms_norm(x[0]))
    with raises(ValueError, f"rms_norm: out has strides {strides}, {STRIDES}"):
        cunorm.rms_norm(x, out=y)


# --- dtypes ---------------------------------------------------------------------------------------


def test_an_array_in_out_must_have_the_dtype_that_is_asked_for():
    arrays, wrong = given(), np.empty(SHAPE, np.float32)
    text = "has dtype float32, expected float16, that of"
    with raises(ValueError, f"rms_norm: out {text} dtype"):
        cunorm.rms_norm(arrays.x, dtype="float16", out=wrong)
    with raises(ValueError, f"add_rms_norm: out.y {text} dtype"):
        cunorm.add_rms_norm(arrays.x, arrays.residual, dtype="float16", out=AddNorm(y=wrong))
    with raises(ValueError, f"add_rms_norm: out.residual {text} the new residual stream"):
        out = AddNorm(residual=wrong)
        cunorm.add_rms_norm(arrays.x, None, residual_dtype="float16", out=out)
    with raises(ValueError, f"layer_norm_backward: out.dx {text} x_dtype"):
        backward(NormGrads(dx=wrong), x_dtype="float16")


def test_the_streams_array_must_have_its_dtype():
    arrays, wrong = given(), np.empty(SHAPE, np.float16)
    text = "has dtype float16, expected float32, that of"
    with raises(ValueError, f"add_rms_norm: out.residual {text} the new residual stream"):
        cunorm.add_rms_norm(arrays.x, arrays.residual, out=AddNorm(residual=wrong))
    with raises(ValueError, f"layer_norm_backward: out.dresidual {text} x"):
        backward(NormGrads(dresidual=wrong))


@pytest.mark.parametrize("field", ["mean", "rstd"])
def test_arrays_for_statistics_must_be_of_the_compute_type(field):
    out = NormForward(**{field: np.empty(ROWS, np.float64)})
    rule = "the compute type: float64 if x, its residual stream or x_dtype is, else float32"
    text = f"out.{field} has dtype float64, expected float32, {rule}"
    with raises(TypeError, f"layer_norm_forward: {text}"):
        cunorm.layer_norm_forward(given().x, out=out)
    x = given().x.astype(np.float64)
    assert getattr(cunorm.layer_norm_forward(x, out=out), field) is getattr(out, field)


def test_an_integer_array_in_out_is_refused():
    text = "out has dtype int32, expected float16, bfloat16, float32 or float64"
    with raises(TypeError, f"rms_norm: {text}"):
        cunorm.rms_norm(given().x, out=np.empty(SHAPE, np.int32))
    with raises(TypeError, f"layer_norm_backward: {text.replace('out', 'out.dgate', 1)}"):
        backward(NormGrads(dgate=np.empty(SHAPE, np.int32)), gate=given().gate)


@pytest.mark.parametrize("position", ["pre", "post"])
def test_an_array_for_dgate_sets_its_dtype(position):
    told = {"gate": given().gate.astype(np.float16), "gate_position": position}
    dgate = np.empty(SHAPE)
    grads = backward(NormGrads(dgate=dgate), **told)
    assert grads.dgate is dgate
    narrow = backward(None, **told).dgate
    assert narrow.dtype == np.float16
    assert_same_bits(dgate.astype(np.float32).astype(np.float16), narrow)


# --- results that there are not -------------------------------------------------------------------


def test_a_mean_without_center_is_refused():
    out = NormForward(mean=np.empty(ROWS, np.float32))
    text = "out.mean is given, expected None: without center there is no mean"
    with raises(ValueError, f"rms_norm_forward: {text}"):
        cunorm.rms_norm_forward(given().x, out=out)


def test_an_array_for_the_stream_of_an_l2_norm_is_refused():
    out = NormForward(residual=np.empty(SHAPE, np.float64))
    text = "out.residual is given, expected None: there is no residual"
    with raises(ValueError, f"l2_norm_forward: {text}"):
        cunorm.l2_norm_forward(given().x, out=out)


@pytest.mark.parametrize(
    ("field", "shape", "needs"),
    [
        ("dx", SHAPE, ("weight",)),
        ("dresidual", SHAPE, ("weight", "bias")),
        ("dweight", WIDTH, ("x", "bias")),
        ("dbias", WIDTH, ("x",)),
        ("dgate", SHAPE, ("x", "gate")),
    ],
)
def test_an_array_for_a_gradient_that_is_not_computed_is_refused(field, shape, needs):
    out = NormGrads(**{field: np.empty(shape, np.float32)})
    text = f"out.{field} is given, expected None: its operand is absent or not in needs"
    with raises(ValueError, f"layer_norm_backward: {text}"):
        backward(out, needs=needs)


def test_an_array_for_the_gradient_of_an_absent_parameter_is_refused():
    arrays, out = given(), NormGrads(dweight=np.empty(WIDTH, np.float32))
    text = "out.dweight is given, expected None: its operand is absent or not in needs"
    with raises(ValueError, f"rms_norm_backward: {text}"):
        cunorm.rms_norm_backward(arrays.dy, arrays.x, rstd=arrays.rstd, out=out)


@pytest.mark.parametrize("needs", [(), ("x",), ("x", "weight", "bias")], ids=str)
def test_an_array_for_dgate_that_is_not_in_needs_is_refused(needs):
    out = NormGrads(dgate=np.empty(SHAPE, np.float32))
    text = "out.dgate is given, expected None: its operand is absent or not in needs"
    with raises(ValueError, f"layer_norm_backward: {text}"):
        backward(out, gate=given().gate, needs=needs)


@pytest.mark.parametrize("field", ["dweight", "dbias", "dgate"])
def test_a_norm_without_an_operand_has_no_gradient_of_it(field):
    arrays, shape = given(), SHAPE if field == "dgate" else WIDTH
    out = NormGrads(**{field: np.empty(shape, np.float32)})
    text = f"out.{field} is given, expected None: its operand is absent or not in needs"
    with raises(ValueError, f"l2_norm_backward: {text}"):
        cunorm.l2_norm_backward(arrays.dy, arrays.x, rstd=arrays.rstd, out=out)
