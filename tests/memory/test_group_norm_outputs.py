# SPDX-License-Identifier: MIT
"""Arrays in `out=` of group norms: written in place, or refused before anything is."""

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cunorm
from cunorm import GroupNormForward, GroupNormGrads
from tests.support.calls import raises
from tests.support.group_norm_cases import laid_out, strides
from tests.support.operands import assert_same_bits, assert_same_fields, at, bits, draw, optional

GROUPS, CHANNELS = 5, 10
MEMORIES = [(-1, "last"), (1, "last"), (1, "first"), (-1, "first")]
# Positions of which all passes are one launch on a CPU, and several.
SIZES = {"one pass": (3, (4, 6)), "several passes": (2, (70, 70))}
TOLD = {"activation": "silu"}

layouts = pytest.mark.parametrize(("channel_axis", "memory"), MEMORIES)
sizes = pytest.mark.parametrize(("samples", "positions"), SIZES.values(), ids=SIZES)


def given(samples=3, positions=(4, 6), channel_axis=-1, memory="last", dtype="float32"):
    """Return x, dy and what the parameters are, the channels where they are said to be."""
    shape = (samples, *positions, CHANNELS)
    arrays = [np.moveaxis(draw(name, shape, dtype), -1, channel_axis) for name in ("x", "dy")]
    parameters = {name: optional(name, CHANNELS, "float32") for name in ("weight", "bias")}
    return [laid_out(array, channel_axis, memory) for array in arrays], parameters


def forward(x, parameters, channel_axis=-1, **more):
    told = {"channel_axis": channel_axis, **TOLD, **more}
    return cunorm.group_norm_forward(x, GROUPS, **parameters, **told)


def backward(dy, x, parameters, channel_axis=-1, **more):
    f = forward(np.array(x), parameters, channel_axis)
    told = {"channel_axis": channel_axis, "mean": f.mean, "rstd": f.rstd, **TOLD, **more}
    return cunorm.group_norm_backward(dy, x, GROUPS, **parameters, **told)


def nans(array, dtype=None):
    return np.full_like(array, np.nan, dtype)


# --- what is written ------------------------------------------------------------------------------


@layouts
@sizes
def test_forward_and_backward_write_to_the_arrays_given(samples, positions, channel_axis, memory):
    (x, dy), parameters = given(samples, positions, channel_axis, memory)
    expected = forward(x, parameters, channel_axis)
    out = GroupNormForward(*map(nans, expected))
    result = forward(x, parameters, channel_axis, out=out)
    assert all(array is place for array, place in zip(result, out, strict=True))
    assert_same_fields(result, expected)
    y = nans(x)
    told = {"channel_axis": channel_axis, **TOLD}
    assert cunorm.group_norm(x, GROUPS, **parameters, **told, out=y) is y
    assert_same_bits(y, expected.y)

    expected = backward(dy, x, parameters, channel_axis)
    out = GroupNormGrads(*map(nans, expected))
    result = backward(dy, x, parameters, channel_axis, out=out)
    assert all(array is place for array, place in zip(result, out, strict=True))
    assert_same_fields(result, expected)


def test_fields_that_are_none_are_allocated():
    (x, dy), parameters = given()
    expected, y = forward(x, parameters), nans(x)
    result = forward(x, parameters, out=GroupNormForward(y=y))
    assert result.y is y
    assert_same_fields(result, expected)
    out = GroupNormGrads(dbias=nans(parameters["bias"]))
    grads = backward(dy, x, parameters, out=out)
    assert grads.dbias is out.dbias
    assert_same_fields(grads, backward(dy, x, parameters))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_an_array_in_out_sets_the_dtype(dtype):
    (x, dy), parameters = given()
    y = nans(x, dtype)
    assert forward(x, parameters, out=GroupNormForward(y=y)).y is y
    assert_same_bits(y, forward(x, parameters, dtype=dtype).y)
    exact = backward(dy, x, parameters, out=GroupNormGrads(dx=nans(x, np.float64)))
    grads = backward(dy, x, parameters, out=GroupNormGrads(dx=nans(x, dtype)))
    assert_same_bits(grads.dx, exact.dx.astype(dtype))
    other = "float16 float64".replace(dtype, "").strip()
    text = f"out.y has dtype {dtype}, expected {other}, that of dtype"
    with raises(ValueError, f"group_norm_forward: {text}"):
        forward(x, parameters, out=GroupNormForward(y=y), dtype=other)


VIEWS = {
    "last": {
        "padded": ((3, 24, 16), lambda a: a[..., 3:13]),
        "every other": ((6, 48, 10), lambda a: a[::2, ::2]),
        "reversed": ((3, 24, 12), lambda a: a[::-1, ::-1, 1:11]),
        "samples inside": ((24, 3, 10), lambda a: a.transpose(1, 0, 2)),
    },
    "first": {
        "padded": ((3, 10, 30), lambda a: a[..., 3:27]),
        "every other": ((6, 20, 24), lambda a: a[::2, ::2]),
        "reversed": ((3, 10, 26), lambda a: a[::-1, ::-1, 1:25]),
        "samples between": ((10, 3, 24), lambda a: a.transpose(1, 0, 2)),
    },
}


@pytest.mark.parametrize(
    ("memory", "view"), [(memory, view) for memory in VIEWS for view in VIEWS[memory]]
)
def test_a_view_in_out_is_written_and_nothing_around_it(memory, view):
    shape, of = VIEWS[memory][view]
    channel_axis = {"last": -1, "first": 1}[memory]
    (x, dy), parameters = given(3, (24,), channel_axis, memory)
    buffers = [np.full(shape, np.nan, np.float32) for _ in range(2)]
    forward(x, parameters, channel_axis, out=GroupNormForward(y=of(buffers[0])))
    backward(dy, x, parameters, channel_axis, out=GroupNormGrads(dx=of(buffers[1])))
    expected = [forward(x, parameters, channel_axis).y]
    expected += [backward(dy, x, parameters, channel_axis).dx]
    for buffer, right in zip(buffers, expected, strict=True):
        assert_same_bits(of(buffer), right)
        assert np.count_nonzero(~np.isnan(buffer)) == right.size


# --- in place -------------------------------------------------------------------------------------


@layouts
@sizes
def test_y_may_be_exactly_x_and_dx_exactly_x_or_dy(samples, positions, channel_axis, memory):
    (x, dy), parameters = given(samples, positions, channel_axis, memory)
    expected = forward(x, parameters, channel_axis)
    place = laid_out(x, channel_axis, memory)
    result = forward(place, parameters, channel_axis, out=GroupNormForward(y=place))
    assert result.y is place
    assert_same_fields(result, expected)
    expected = backward(dy, x, parameters, channel_axis)
    for name in ("x", "dy"):
        arrays = {"dy": laid_out(dy, channel_axis, memory), "x": laid_out(x, channel_axis, memory)}
        out = GroupNormGrads(dx=arrays[name])
        with at(name):
            grads = backward(*arrays.values(), parameters, channel_axis, out=out)
            assert grads.dx is arrays[name]
            assert_same_fields(grads, expected)


def test_dx_may_be_exactly_an_array_that_is_x_and_dy():
    (x, _), parameters = given()
    expected, one = backward(x, x, parameters), x.copy()
    assert_same_fields(backward(one, one, parameters, out=GroupNormGrads(dx=one)), expected)


# --- what is refused ------------------------------------------------------------------------------


def refused(text, **out):
    """Expect that results are refused, and nothing is written, whichever of them is wrong."""
    (x, dy), parameters = given()
    before = {name: bits(array).copy() for name, array in out.items()}
    is_forward = bool(out.keys() & set(GroupNormForward._fields))
    name = "group_norm_forward" if is_forward else "group_norm_backward"
    error = TypeError if "has dtype" in text else ValueError
    with raises(error, f"{name}: out.{text}"):
        if is_forward:
            forward(x, parameters, out=GroupNormForward(**out))
        else:
            backward(dy, x, parameters, out=GroupNormGrads(**out))
    for field, array in out.items():
        np.testing.assert_array_equal(bits(array), before[field], field)


def test_results_of_other_shapes_or_dtypes_are_refused():
    (x, _), _ = given()
    wrong, of_x = np.zeros((3, 6, 4, 10), np.float32), "(3, 4, 6, 10), the shape of x"
    for field in ("y", "dx"):
        refused(f"{field} has shape (3, 6, 4, 10), expected {of_x}", **{field: wrong})
        dtypes = "expected float16, bfloat16, float32 or float64"
        refused(f"{field} has dtype int32, {dtypes}", **{field: np.zeros_like(x, np.int32)})
    each = "expected (3, 5), one element for each group of each sample"
    refused(f"mean has shape (3, 10), {each}", mean=np.zeros((3, 10), np.float32))
    rule = "expected float32, the compute type: float64 if x is, else float32"
    refused(f"rstd has dtype float64, {rule}", rstd=np.zeros((3, 5)))
    refused("dbias has shape (5,), expected (10,)", dbias=np.zeros(5, np.float32))


@layouts
def test_a_result_in_another_layout_than_x_is_refused(channel_axis, memory):
    (x, dy), parameters = given(channel_axis=channel_axis, memory=memory)
    other = laid_out(x, channel_axis, {"last": "first", "first": "last"}[memory])
    layout = f"the memory layout of x, channels {memory}, with one stride for all of its lines"
    text = f"has strides {strides(other)}, expected {layout}"
    with raises(ValueError, f"group_norm_forward: out.y {text}"):
        forward(x, parameters, channel_axis, out=GroupNormForward(y=other))
    with raises(ValueError, f"group_norm_backward: out.dx {text}"):
        backward(dy, x, parameters, channel_axis, out=GroupNormGrads(dx=other))


def test_statistics_and_parameter_gradients_are_only_written_to_contiguous_arrays():
    refused(
        "mean has strides (10, 2), expected a contiguous array",
        mean=np.zeros((3, 10), np.float32)[:, ::2],
    )
    refused(
        "dweight has strides (2,), expected a contiguous array",
        dweight=np.zeros(20, np.float32)[::2],
    )


@pytest.mark.parametrize("steps", [(0, 60, 10, 1), (240, 60, 10, 0), (240, 60, 5, 1)], ids=str)
def test_a_result_that_overlaps_itself_is_refused(steps):
    memory = np.zeros(1000, np.float32)
    array = as_strided(memory, (3, 4, 6, 10), [4 * step for step in steps])
    tail = "with which elements may share memory, expected memory of its own for each element"
    for field in ("y", "dx"):
        refused(f"{field} has strides {steps}, {tail}", **{field: array})


def test_what_cannot_be_written_to_is_refused():
    (x, _), _ = given()
    read_only = x.copy()
    read_only.flags.writeable = False
    unaligned = np.zeros(4 * x.size + 1, np.uint8)[1:].view(np.float32).reshape(x.shape)
    text = "cannot be written to in place, expected a writable, aligned array"
    for array in (read_only, unaligned):
        for field in ("y", "dx"):
            refused(f"{field} {text} (JAX arrays are immutable)", **{field: array})


def test_a_jax_array_in_out_is_refused():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    x = jax.numpy.ones((3, 4, 10))
    with pytest.raises(ValueError, match=r"^group_norm: out cannot be written to in place"):
        cunorm.group_norm(x, GROUPS, out=jax.numpy.ones((3, 4, 10)))


OWN = "expected memory of its own"
IN_PLACE = f"{OWN} (or exactly the memory, shape, strides and dtype of an input)"


def test_results_that_overlap_an_input_or_each_other_are_refused():
    (x, dy), parameters = given()
    memory = draw("memory", x.size + 1, "float32")
    first, second = (part.reshape(x.shape) for part in (memory[:-1], memory[1:]))
    before = memory.copy()
    with raises(ValueError, f"group_norm_forward: out.y overlaps x, {IN_PLACE}"):
        forward(first, parameters, out=GroupNormForward(y=second))
    with raises(ValueError, f"group_norm: out overlaps x, {IN_PLACE}"):
        cunorm.group_norm(x, GROUPS, out=x[::-1])
    for name, arrays in (("dy", (first, x)), ("x", (dy, first))):
        with raises(ValueError, f"group_norm_backward: out.dx overlaps {name}, {IN_PLACE}"):
            backward(*arrays, parameters, out=GroupNormGrads(dx=second))
    weight = {"weight": first.reshape(-1)[:CHANNELS]}
    with raises(ValueError, f"group_norm_forward: out.y overlaps weight, {OWN}"):
        forward(x, weight, out=GroupNormForward(y=first))
    statistic = memory[: 3 * GROUPS].reshape(3, GROUPS)
    with raises(ValueError, f"group_norm_forward: out.rstd overlaps out.mean, {OWN}"):
        forward(x, parameters, out=GroupNormForward(mean=statistic, rstd=statistic))
    one = memory[:CHANNELS]
    with raises(ValueError, f"group_norm_backward: out.dbias overlaps out.dweight, {OWN}"):
        backward(dy, x, parameters, out=GroupNormGrads(dweight=one, dbias=one))
    np.testing.assert_array_equal(memory, before)


def test_a_gradient_that_there_is_not_has_no_place():
    (x, dy), parameters = given()
    reason = "its operand is absent or not in needs"
    with raises(ValueError, f"group_norm_backward: out.dweight is given, expected None: {reason}"):
        backward(dy, x, {}, out=GroupNormGrads(dweight=np.zeros(CHANNELS)))
    with raises(ValueError, f"group_norm_backward: out.dx is given, expected None: {reason}"):
        backward(dy, x, parameters, needs=("bias",), out=GroupNormGrads(dx=nans(x)))


@pytest.mark.parametrize("out", [np.zeros((3, 4, 6, 10), np.float32), (None, None, None)])
def test_what_is_not_the_tuple_of_results_is_refused(out):
    (x, dy), parameters = given()
    kind = type(out).__name__
    for name, result in (("forward", "GroupNormForward"), ("backward", "GroupNormGrads")):
        text = f"out is of type {kind}, expected a {result} of arrays and Nones"
        with raises(TypeError, f"group_norm_{name}: {text}"):
            if name == "forward":
                forward(x, parameters, out=out)
            else:
                backward(dy, x, parameters, out=out)
