# SPDX-License-Identifier: MIT
"""Arrays that do not fit are named: function, argument, what it got, what it expected.

Other arguments are in test_error_arguments.py, errors of `out=` in test_outputs.py, arrays that no
kernel can read also in test_arrays*.py.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import cunorm
from cunorm._arrays import Device
from cunorm._arrays._numpy import Numpy
from tests.support.calls import BACKWARDS, FORWARDS, WIDTH, backward, forward, given, raises
from tests.support.operands import bits, draw

# --- dtypes ---------------------------------------------------------------------------------------

BAD_DTYPES = ["int32", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"]
EXPECTED = "expected float16, bfloat16, float32 or float64"


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("dtype", BAD_DTYPES)
def test_integer_complex_and_fp8_x_are_refused_by_every_forward(name, dtype):
    x = np.zeros((5, WIDTH), getattr(ml_dtypes, dtype, dtype))
    with raises(TypeError, f"{name}: x has dtype {dtype}, {EXPECTED}"):
        forward(name, x)


@pytest.mark.parametrize("name", BACKWARDS)
@pytest.mark.parametrize("argument", ["x", "dy"])
def test_integer_operands_are_refused_by_every_backward(name, argument):
    arrays = {"dy": given().dy, "x": given().x} | {argument: np.zeros((5, WIDTH), np.int64)}
    with raises(TypeError, f"{name}: {argument} has dtype int64, {EXPECTED}"):
        backward(name, **arrays)


@pytest.mark.parametrize("argument", ["weight", "bias", "residual"])
def test_integer_operands_of_a_forward_are_refused(argument):
    wrong = getattr(given(), argument).astype(np.int16)
    with raises(TypeError, f"normalize_forward: {argument} has dtype int16, {EXPECTED}"):
        cunorm.normalize_forward(given().x, **{argument: wrong})


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3", float, np.int32, 3], ids=str)
def test_a_dtype_that_is_none_of_the_four_is_refused(dtype):
    x = given().x
    with pytest.raises(TypeError, match=rf"^rms_norm: dtype is .+, {EXPECTED}$"):
        cunorm.rms_norm(x, dtype=dtype)
    with pytest.raises(TypeError, match=rf"^add_rms_norm: residual_dtype is .+, {EXPECTED}$"):
        cunorm.add_rms_norm(x, None, residual_dtype=dtype)
    with pytest.raises(TypeError, match=rf"^rms_norm_backward: x_dtype is .+, {EXPECTED}$"):
        backward("rms_norm_backward", x, x, x_dtype=dtype)


def test_residual_dtype_must_be_residuals_where_there_is_one():
    arrays = given()
    text = "residual has dtype float32, expected float16, that of residual_dtype"
    with raises(ValueError, f"add_rms_norm: {text}"):
        cunorm.add_rms_norm(arrays.x, arrays.residual, residual_dtype="float16")


@pytest.mark.parametrize("name", ["rstd", "mean"])
def test_statistics_must_be_of_the_compute_type(name):
    arrays = given()
    statistics = {"rstd": arrays.rstd, "mean": arrays.mean}
    statistics[name] = statistics[name].astype(np.float64)
    rule = "the compute type: float64 if x, its residual stream or x_dtype is, else float32"
    with raises(
        TypeError, f"layer_norm_backward: {name} has dtype float64, expected float32, {rule}"
    ):
        cunorm.layer_norm_backward(arrays.dy, arrays.x, **statistics)


# --- what is no array -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize(
    ("thing", "what"),
    [([[1.0, 2.0]], "of type list"), (None, "None"), (1.5, "of type float")],
    ids=str,
)
def test_x_that_is_no_array_is_refused_with_its_type(name, thing, what):
    with pytest.raises(TypeError, match=f"^{name}: x is {what}, expected a NumPy, CuPy, PyTorch"):
        forward(name, thing)


@pytest.mark.parametrize("argument", ["dy", "rstd"])
def test_an_array_that_backward_needs_may_not_be_none(argument):
    arrays = vars(given())
    arguments = {name: arrays[name] for name in ("dy", "x", "rstd")} | {argument: None}
    with pytest.raises(TypeError, match=f"^rms_norm_backward: {argument} is None, expected a"):
        cunorm.rms_norm_backward(**arguments)


def test_a_masked_array_is_refused_with_the_fix():
    x = np.ma.masked_array(given().x, mask=False)
    with pytest.raises(TypeError, match=r"^rms_norm: x is a masked array.+pass x\.filled\(value\)"):
        cunorm.rms_norm(x)


def test_a_byte_swapped_array_is_refused_with_the_fix():
    weight = given().weight.astype(given().weight.dtype.newbyteorder())
    with pytest.raises(TypeError, match=r"^rms_norm: weight .+pass weight\.astype\('float32'\)"):
        cunorm.rms_norm(given().x, weight)


# --- shapes and axes ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "add_normalize", "rms_norm_forward"])
@pytest.mark.parametrize("shape", [(512,), (1, WIDTH), (), (5, WIDTH)], ids=str)
def test_weight_must_have_the_rows_shape(name, shape):
    text = f"weight has shape {shape}, expected (8,) to match x.shape[-1]"
    with raises(ValueError, f"{name}: {text}"):
        forward(name, given().x, weight=np.ones(shape, np.float32))


def test_with_several_axes_weight_and_bias_must_have_all_of_them():
    x, flat = draw("x", (2, 3, 4), "float32"), np.ones(12, np.float32)
    text = "bias has shape (12,), expected (3, 4) to match x.shape[-2:]"
    with raises(ValueError, f"layer_norm: {text}"):
        cunorm.layer_norm(x, None, flat, axis=1)
    statistics = {"rstd": np.ones(2, np.float32), "mean": np.ones(2, np.float32)}
    with raises(ValueError, f"layer_norm_backward: {text}"):
        cunorm.layer_norm_backward(x, x, None, flat, **statistics, axis=1)


@pytest.mark.parametrize("shape", [(5, 7), (5, 1), (1, WIDTH), (WIDTH,)], ids=str)
def test_what_has_rows_must_have_xs_shape(shape):
    arrays, wrong = given(), np.ones(shape, np.float32)
    text = f"has shape {shape}, expected (5, 8), the shape of x"
    with raises(ValueError, f"add_layer_norm: residual {text}"):
        cunorm.add_layer_norm(arrays.x, wrong)
    with raises(ValueError, f"rms_norm_backward: dy {text}"):
        cunorm.rms_norm_backward(wrong, arrays.x, rstd=arrays.rstd)
    with raises(ValueError, f"rms_norm_backward: d_residual {text}"):
        cunorm.rms_norm_backward(arrays.dy, arrays.x, rstd=arrays.rstd, d_residual=wrong)


@pytest.mark.parametrize("argument", ["rstd", "mean"])
@pytest.mark.parametrize("shape", [(5, 1), (WIDTH,), (), (1,)], ids=str)
def test_statistics_must_have_one_element_for_each_row(argument, shape):
    arrays = given()
    statistics = {"rstd": arrays.rstd, "mean": arrays.mean}
    statistics[argument] = np.ones(shape, np.float32)
    text = f"{argument} has shape {shape}, expected (5,), one element for each row of x"
    with raises(ValueError, f"layer_norm_backward: {text}"):
        cunorm.layer_norm_backward(arrays.dy, arrays.x, **statistics)


@pytest.mark.parametrize("name", ["normalize_backward", "layer_norm_backward"])
def test_centered_backward_needs_the_mean(name):
    arrays = given()
    center = {"center": True} if name == "normalize_backward" else {}
    text = "mean is None, expected the mean that the forward returned, as center is True"
    with raises(ValueError, f"{name}: {text}"):
        getattr(cunorm, name)(arrays.dy, arrays.x, rstd=arrays.rstd, **center)


@pytest.mark.parametrize("name", FORWARDS)
def test_x_without_axes_is_refused(name):
    with raises(ValueError, f"{name}: x has shape (), expected at least one axis"):
        forward(name, np.array(1.0, np.float32))


@pytest.mark.parametrize("axis", [2, -3, 100])
def test_axis_out_of_range_is_refused(axis):
    with raises(ValueError, f"rms_norm: axis is {axis}, expected -2 to 1 for x of shape (5, 8)"):
        cunorm.rms_norm(given().x, axis=axis)


@pytest.mark.parametrize("axis", [1.0, None, (1,), True, "last"], ids=repr)
def test_axis_that_is_no_int_is_refused(axis):
    with raises(TypeError, f"rms_norm: axis is {axis!r}, expected an int"):
        cunorm.rms_norm(given().x, axis=axis)


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("shape", [(3, 0), (0, 0), (0,)], ids=str)
def test_width_0_is_refused(name, shape):
    with raises(
        ValueError,
        f"{name}: x of shape {shape} has rows of 0 elements (axis -1), expected 1 to 2147483647",
    ):
        forward(name, np.empty(shape, np.float32))


@pytest.mark.parametrize(("shape", "axis"), [((2, 2**31), -1), ((2**16, 2**15), 0)], ids=str)
def test_width_of_2_to_the_31_is_refused(shape, axis):
    x = np.broadcast_to(np.float16(1), shape)
    with raises(
        ValueError,
        f"rms_norm: x of shape {shape} has rows of 2147483648 elements (axis {axis}), "
        "expected 1 to 2147483647",
    ):
        cunorm.rms_norm(x, axis=axis)


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["weight", "bias", "residual", "gate"])
def test_an_operand_on_another_device_than_x_is_refused(monkeypatch, argument):
    describe = Numpy.describe

    def elsewhere(numpy, function, name, array):
        operand = describe(numpy, function, name, array)
        if name == "x":
            return operand
        return replace(operand, form=operand.form._replace(device=Device("cuda", 1)))

    monkeypatch.setattr(Numpy, "describe", elsewhere)
    arrays = given()
    text = f"{argument} is on cuda:1, expected cpu, the device of x"
    with raises(ValueError, f"normalize_forward: {text}"):
        cunorm.normalize_forward(arrays.x, **{argument: getattr(arrays, argument)})


def test_a_torch_tensor_without_data_is_refused_with_its_device():
    torch = pytest.importorskip("torch")
    x = torch.ones(5, WIDTH)
    text = "weight is on device meta, expected cpu or cuda: pass a tensor with data there"
    with raises(ValueError, f"rms_norm: {text}"):
        cunorm.rms_norm(x, torch.ones(WIDTH, device="meta"))


# --- frameworks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["x", "weight"])
def test_a_tensor_that_requires_grad_is_refused_outside_no_grad(argument):
    torch = pytest.importorskip("torch")
    arrays = {"x": torch.ones(5, WIDTH), "weight": torch.ones(WIDTH)}
    arrays[argument].requires_grad_()
    with raises(
        ValueError,
        f"rms_norm: {argument} requires grad, which this function does not record: use "
        f"cunorm.torch, torch.no_grad() or {argument}.detach()",
    ):
        cunorm.rms_norm(**arrays)
    with torch.no_grad():
        torch.testing.assert_close(cunorm.rms_norm(**arrays), torch.ones(5, WIDTH))


def test_a_jax_tracer_is_refused_and_pointed_to_the_jax_front_end():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((5, WIDTH))
    with pytest.raises(TypeError, match=r"^rms_norm: x is a JAX tracer.+use cunorm\.jax there"):
        jax.jit(cunorm.rms_norm)(x)


@pytest.mark.parametrize("make", ["conj", "neg", "sparse", "fp8"])
def test_tensors_that_are_not_their_memory_are_refused(make):
    torch = pytest.importorskip("torch")
    complex_ = torch.ones(5, WIDTH, dtype=torch.complex64)
    x, error, text = {
        "conj": (complex_.conj(), TypeError, "dtype complex64"),
        "neg": (complex_.conj().imag, ValueError, r"negative bit set.+x\.resolve_neg\(\)"),
        "sparse": (torch.ones(5, WIDTH).to_sparse(), ValueError, r"layout.+x\.to_dense\(\)"),
        "fp8": (torch.ones(5, WIDTH).to(torch.float8_e4m3fn), TypeError, "dtype float8_e4m3fn"),
    }[make]
    with pytest.raises(error, match=f"^rms_norm: x has (its )?{text}"):
        cunorm.rms_norm(x)


# --- before anything happens ----------------------------------------------------------------------


def test_an_error_leaves_every_array_as_it_was():
    """The wrong operand is the last to be looked at in each call."""
    arrays = given()
    y, stream, rstd, dx = arrays.x * 0, arrays.x * 0, arrays.rstd * 0, arrays.x * 0
    everything = [*vars(arrays).values(), y, stream, rstd, dx]
    before = [bits(array).copy() for array in everything]
    with pytest.raises(ValueError, match=r"out\.rstd overlaps out\.y"):
        out = cunorm.NormForward(y=y, residual=stream, rstd=y.reshape(-1)[:5])
        cunorm.rms_norm_forward(arrays.x, arrays.weight, residual=arrays.residual, out=out)
    with pytest.raises(TypeError, match="rstd has dtype"):
        cunorm.rms_norm_backward(
            arrays.dy,
            arrays.x,
            arrays.weight,
            rstd=arrays.rstd.astype(np.float16),
            out=cunorm.NormGrads(dx=dx),
        )
    for array, bits_before in zip(everything, before, strict=True):
        np.testing.assert_array_equal(bits(array), bits_before)
