# SPDX-License-Identifier: MIT
"""Arrays in `out=`: they are written in place, and what cannot be is refused before anything is."""

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cunorm
from cunorm import AddNorm, NormForward, NormGrads
from cunorm._arrays._numpy import Numpy
from tests.support.calls import WIDTH, given, raises
from tests.support.operands import assert_same_bits, at, bits, draw

ROWS = 5
SHAPE = (ROWS, WIDTH)


def empty(shape=SHAPE, dtype=np.float32):
    return np.full(shape, np.nan, dtype)


def backward(out, **more):
    arrays = given()
    operands = (arrays.dy, arrays.x, arrays.weight, arrays.bias)
    statistics = {"rstd": arrays.rstd, "mean": arrays.mean}
    return cunorm.layer_norm_backward(*operands, **statistics, out=out, **more)


# --- what is written ------------------------------------------------------------------------------


def test_forward_writes_to_the_arrays_given_and_allocates_none(monkeypatch):
    arrays = given()
    operands = {"residual": arrays.residual, "weight": arrays.weight, "bias": arrays.bias}
    expected = cunorm.layer_norm_forward(arrays.x, **operands)
    out = NormForward(empty(), empty(), empty(ROWS), empty(ROWS))
    monkeypatch.setattr(Numpy, "allocate", None)
    result = cunorm.layer_norm_forward(arrays.x, **operands, out=out)
    for name in NormForward._fields:
        assert getattr(result, name) is getattr(out, name)
        assert_same_bits(getattr(result, name), getattr(expected, name), name)


def test_backward_writes_to_the_arrays_given():
    expected = backward(None)
    out = NormGrads(dx=empty(), dweight=empty(WIDTH), dbias=empty(WIDTH), dresidual=empty())
    result = backward(out)
    assert result.dx is not result.dresidual
    for name in ("dx", "dweight", "dbias", "dresidual"):
        assert getattr(result, name) is getattr(out, name)
        assert_same_bits(getattr(result, name), getattr(expected, name), name)


def test_backward_without_parameter_gradients_allocates_nothing(monkeypatch):
    expected, out = backward(None), NormGrads(dx=empty())
    monkeypatch.setattr(Numpy, "allocate", None)
    assert_same_bits(backward(out, needs=("x",)).dx, expected.dx)


@pytest.mark.parametrize("name", ["normalize", "rms_norm", "layer_norm", "l2_norm"])
def test_y_alone_is_given_as_an_array(name):
    x, y = given().x, empty()
    assert getattr(cunorm, name)(x, out=y) is y
    assert_same_bits(y, getattr(cunorm, name)(x))


def test_fields_that_are_none_are_allocated():
    arrays, y = given(), empty()
    result = cunorm.add_rms_norm(arrays.x, arrays.residual, out=AddNorm(y=y))
    assert result.y is y
    np.testing.assert_array_equal(result.residual, arrays.x + arrays.residual)
    gradient = empty()
    result = backward(NormGrads(dresidual=gradient))
    assert result.dx is result.dresidual is gradient
    assert result.dweight is not None


def test_an_array_in_out_sets_the_dtype():
    x, weight = draw("x", SHAPE, "bfloat16"), given().weight
    y, dweight = empty(dtype=np.float16), empty(WIDTH, np.float64)
    forward = cunorm.rms_norm_forward(x, weight, out=NormForward(y=y))
    assert forward.y is y
    assert_same_bits(y, cunorm.rms_norm(x, weight, dtype="float16"))
    out = NormGrads(dx=empty(), dweight=dweight)
    grads = cunorm.rms_norm_backward(x, x, weight, rstd=forward.rstd, out=out)
    assert grads.dx is out.dx
    assert grads.dresidual.dtype == x.dtype
    assert grads.dweight is dweight
    in_float32 = cunorm.rms_norm_backward(x, x, weight, rstd=forward.rstd).dweight
    assert_same_bits(dweight.astype(np.float32), in_float32)


@pytest.mark.parametrize(
    "view",
    [
        lambda buffer: buffer[:ROWS, 3 : 3 + WIDTH],
        lambda buffer: buffer[: 2 * ROWS : 2, :WIDTH],
        lambda buffer: buffer[ROWS - 1 :: -1, 1 : 1 + WIDTH],
    ],
    ids=["padded", "every other row", "reversed"],
)
def test_a_view_in_out_is_written_and_nothing_around_it(view):
    arrays, buffer = given(), empty((2 * ROWS, 2 * WIDTH))
    y = cunorm.rms_norm(arrays.x, arrays.weight, out=view(buffer))
    assert_same_bits(y, cunorm.rms_norm(arrays.x, arrays.weight))
    assert np.count_nonzero(~np.isnan(buffer)) == ROWS * WIDTH


# --- in place -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 33, 1000, 20000])
@pytest.mark.parametrize("operand", ["x", "residual"])
@pytest.mark.parametrize("field", ["y", "residual"])
def test_a_result_of_forward_may_be_exactly_an_input(field, operand, width):
    x, residual = draw("x", (ROWS, width), "float32"), draw("residual", (ROWS, width), "float32")
    weight = draw("weight", width, "float32")
    expected = cunorm.layer_norm_forward(x, weight, residual=residual)
    place = {"x": x, "residual": residual}[operand]
    out = NormForward(**{field: place})
    result = cunorm.layer_norm_forward(x, weight, residual=residual, out=out)
    assert getattr(result, field) is place
    for name in NormForward._fields:
        assert_same_bits(getattr(result, name), getattr(expected, name), name)


@pytest.mark.parametrize("width", [1, 33, 1000, 20000])
@pytest.mark.parametrize("operand", ["dy", "x", "d_residual"])
def test_dx_may_be_exactly_an_input(operand, width):
    names = ("dy", "x", "d_residual")
    arrays = {name: draw(name, (ROWS, width), "float32") for name in names}
    weight = draw("weight", width, "float32")
    forward = cunorm.layer_norm_forward(arrays["x"], weight, weight)
    statistics = {"rstd": forward.rstd, "mean": forward.mean}
    more = {"weight": weight, "bias": weight} | statistics
    expected = cunorm.layer_norm_backward(**arrays, **more)
    for field in ("dx", "dresidual"):
        copies = {name: array.copy() for name, array in arrays.items()}
        out = NormGrads(**{field: copies[operand]})
        grads = cunorm.layer_norm_backward(**copies, **more, out=out)
        for name in ("dx", "dweight", "dbias"):
            with at(field):
                assert_same_bits(getattr(grads, name), getattr(expected, name), name)


def test_dweight_may_be_exactly_weight():
    arrays, expected = given(), backward(None)
    statistics = {"rstd": arrays.rstd, "mean": arrays.mean}
    out = NormGrads(dweight=arrays.weight, dbias=arrays.bias)
    operands = (arrays.dy, arrays.x, arrays.weight, arrays.bias)
    grads = cunorm.layer_norm_backward(*operands, **statistics, out=out)
    for name in ("dx", "dweight", "dbias"):
        assert_same_bits(getattr(grads, name), getattr(expected, name), name)


OWN = "expected memory of its own"
IN_PLACE = f"{OWN} (or exactly the memory, shape, strides and dtype of an input)"


def test_statistics_may_not_be_written_over_parameters_that_later_rows_read():
    x, weight = draw("x", (WIDTH, WIDTH), "float32"), given().weight
    with raises(ValueError, f"rms_norm_forward: out.rstd overlaps weight, {OWN}"):
        cunorm.rms_norm_forward(x, weight, out=NormForward(rstd=weight))
    with raises(ValueError, f"layer_norm_forward: out.mean overlaps bias, {OWN}"):
        cunorm.layer_norm_forward(x, None, weight, out=NormForward(mean=weight))


def test_y_may_not_be_written_over_the_x_that_is_returned_as_the_stream():
    x = given().x
    with raises(ValueError, f"add_rms_norm: out.y overlaps x, {OWN}"):
        cunorm.add_rms_norm(x, None, out=AddNorm(y=x))
    with raises(ValueError, f"rms_norm_forward: out.y overlaps x, {OWN}"):
        cunorm.rms_norm_forward(x, residual_dtype="float32", out=NormForward(y=x))


# --- what overlaps --------------------------------------------------------------------------------


def overlapping():
    """Two arrays of SHAPE, the second one element further on than the first."""
    memory = draw("memory", ROWS * WIDTH + 1, "float32")
    return memory[:-1].reshape(SHAPE), memory[1:].reshape(SHAPE)


@pytest.mark.parametrize("turned", [False, True])
def test_an_output_that_overlaps_part_of_an_input_is_refused(turned):
    first, second = overlapping()[:: -1 if turned else 1]
    arrays, before = given(), bits(first).copy()
    with raises(ValueError, f"rms_norm: out overlaps x, {IN_PLACE}"):
        cunorm.rms_norm(first, out=second)
    with raises(ValueError, f"rms_norm_backward: out.dx overlaps d_residual, {IN_PLACE}"):
        cunorm.rms_norm_backward(
            arrays.dy, arrays.x, rstd=arrays.rstd, d_residual=first, out=NormGrads(dx=second)
        )
    np.testing.assert_array_equal(bits(first), before)


@pytest.mark.parametrize(
    "place",
    [lambda x: x[::-1], lambda x: x.view(np.float16)[:, :WIDTH]],
    ids=["other strides", "other dtype"],
)
def test_an_input_in_other_strides_or_dtype_is_not_exactly_it(place):
    x = given().x
    with raises(ValueError, f"rms_norm: out overlaps x, {IN_PLACE}"):
        cunorm.rms_norm(x, out=place(x))


def test_outputs_that_overlap_each_other_are_refused():
    arrays, one = given(), empty()
    first, second = overlapping()
    for y, stream in ((one, one), (first, second), (second, first), (one, one[::-1])):
        with raises(ValueError, f"add_rms_norm: out.residual overlaps out.y, {OWN}"):
            cunorm.add_rms_norm(arrays.x, arrays.residual, out=AddNorm(y, stream))
    with raises(ValueError, f"rms_norm_forward: out.rstd overlaps out.y, {OWN}"):
        cunorm.rms_norm_forward(arrays.x, out=NormForward(y=one, rstd=one[0, :ROWS]))
    with raises(ValueError, f"layer_norm_backward: out.dbias overlaps out.dweight, {OWN}"):
        backward(NormGrads(dweight=one[0], dbias=one[0]))


def test_outputs_that_only_interleave_are_taken():
    arrays, memory = given(), empty((ROWS, 2, WIDTH))
    out = AddNorm(y=memory[:, 0], residual=memory[:, 1])
    expected = cunorm.add_rms_norm(arrays.x, arrays.residual)
    result = cunorm.add_rms_norm(arrays.x, arrays.residual, out=out)
    assert_same_bits(result.y, expected.y)
    assert_same_bits(result.residual, expected.residual)


@pytest.mark.parametrize("strides", [(0, 4), (4, 4), (16, 4), (32, 0)], ids=str)
def test_an_output_that_overlaps_itself_is_refused(strides):
    y = as_strided(empty(100), SHAPE, strides)
    shown = tuple(stride // 4 for stride in strides)
    tail = "with which elements may share memory, expected memory of its own for each element"
    with raises(ValueError, f"rms_norm: out has strides {shown}, {tail}"):
        cunorm.rms_norm(given().x, out=y)


# --- what cannot be written to --------------------------------------------------------------------

UNWRITABLE = (
    "cannot be written to in place, expected a writable, aligned array (JAX arrays are immutable)"
)


def unaligned():
    return np.zeros(ROWS * WIDTH * 4 + 1, np.uint8)[1:].view(np.float32).reshape(SHAPE)


def read_only():
    array = empty()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("make", [unaligned, read_only])
def test_an_array_that_cannot_be_written_to_is_refused(make):
    with raises(ValueError, f"rms_norm: out {UNWRITABLE}"):
        cunorm.rms_norm(given().x, out=make())


def test_a_jax_array_in_out_is_refused():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones(SHAPE)
    with raises(ValueError, f"rms_norm: out {UNWRITABLE}"):
        cunorm.rms_norm(x, out=jax.numpy.ones(SHAPE))
    with raises(ValueError, f"rms_norm_forward: out.rstd {UNWRITABLE}"):
        cunorm.rms_norm_forward(given().x, out=NormForward(rstd=jax.numpy.ones(ROWS)))
