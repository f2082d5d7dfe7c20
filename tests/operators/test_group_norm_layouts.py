# SPDX-License-Identifier: MIT
"""Group norms read x as its memory lies, channels last or first, and give y and dx its layout."""

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cunorm
from cunorm import GroupNormGrads
from tests.support.group_norm_cases import (
    Results,
    Sizes,
    check,
    copies,
    drawn,
    laid_out,
    launched,
    run,
    strides,
)
from tests.support.kinds import Foreign, numbers, pointer, to
from tests.support.operands import assert_same_bits, assert_same_fields, at, draw

GROUPS = 5
KINDS = ["numpy", "torch", "jax", "dlpack"]


# --- strides that kernels follow ------------------------------------------------------------------

# Of ten channels: the axis that they are, where they lie, the shape that is drawn, the view of it.
FITTING = {
    "channels padded": (-1, "last", (4, 7, 16), lambda a: a[..., 3:13]),
    "every other sample": (-1, "last", (8, 7, 10), lambda a: a[::2]),
    "every other position": (-1, "last", (4, 14, 10), lambda a: a[:, ::2]),
    "rows of an image": (-1, "last", (4, 9, 5, 10), lambda a: a[:, 2:5]),
    "samples inside": (-1, "last", (7, 4, 10), lambda a: a.transpose(1, 0, 2)),
    "samples reversed": (-1, "last", (4, 7, 10), lambda a: a[::-1]),
    "positions reversed": (-1, "last", (4, 7, 10), lambda a: a[:, ::-1]),
    "one sample for all": (-1, "last", (1, 7, 10), lambda a: np.broadcast_to(a, (4, 7, 10))),
    "one position for all": (-1, "last", (4, 1, 10), lambda a: np.broadcast_to(a, (4, 7, 10))),
    "PyTorch's channels_last": (1, "last", (4, 5, 3, 10), lambda a: a.transpose(0, 3, 1, 2)),
    "the same, padded": (1, "last", (4, 5, 3, 16), lambda a: a[..., :10].transpose(0, 3, 1, 2)),
    "one position for all, axis 1": (
        1,
        "last",
        (4, 10, 1),
        lambda a: np.broadcast_to(a, (4, 10, 7)),
    ),
    "no positions": (1, "last", (4, 16), lambda a: a[:, 2:12]),
    "channels first": (1, "first", (4, 10, 5, 3), lambda a: a),
    "channels first, named last": (-1, "first", (4, 10, 5, 3), lambda a: a.transpose(0, 2, 3, 1)),
    "some channels": (1, "first", (4, 16, 7), lambda a: a[:, 3:13]),
    "every other channel": (1, "first", (4, 20, 7), lambda a: a[:, ::2]),
    "channels reversed": (1, "first", (4, 10, 7), lambda a: a[:, ::-1]),
    "positions padded": (1, "first", (4, 10, 12), lambda a: a[..., 2:9]),
    "one channel for all": (1, "first", (4, 1, 7), lambda a: np.broadcast_to(a, (4, 10, 7))),
    "samples between": (1, "first", (10, 4, 7), lambda a: a.transpose(1, 0, 2)),
}
TENSORS = [name for name in FITTING if "reversed" not in name and "for all" not in name]


@pytest.mark.parametrize(
    ("kind", "view"),  # PyTorch has no negative strides, and takes no read-only arrays
    [("numpy", view) for view in FITTING] + [("torch", view) for view in TENSORS],
)
def test_strides_that_fit_are_read_as_they_are_and_results_are_dense_alike(kind, view, monkeypatch):
    channel_axis, memory, shape, of = FITTING[view]
    given = {name: draw(name, shape, "float32") for name in ("x", "dy")}
    x, dy = map(of, given.values())
    dense = [laid_out(array, channel_axis, memory) for array in (x, dy)]
    expected = run(*dense, GROUPS, channel_axis)
    check(expected, *dense, GROUPS, channel_axis)

    seen, copied = launched(monkeypatch), copies(monkeypatch)
    x, dy = to(kind, x), to(kind, dy)
    results = Results(*map(numbers, run(x, dy, GROUPS, channel_axis)))
    there, back = seen
    assert not copied
    assert there.x.pointer == back.x.pointer == pointer(x)
    assert back.dy.pointer == pointer(dy)
    assert_same_fields(results, expected)
    assert strides(results.y) == strides(results.dx) == strides(dense[0])
    for name, array in given.items():
        assert_same_bits(array, draw(name, shape, "float32"), name)


@pytest.mark.parametrize("memory_format", ["channels_last", "channels_last_3d"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors_of_channels_last_give_such(memory_format, dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    shape = (2, 10, 5, 3) if memory_format == "channels_last" else (2, 10, 3, 5, 2)
    memory_format = getattr(torch, memory_format)
    x, dy = (draw(name, shape, dtype) for name in ("x", "dy"))
    given = [to("torch", array).to(memory_format=memory_format) for array in (x, dy)]
    results = run(*given, GROUPS, channel_axis=1)
    for result in (results.y, results.dx):
        assert result.is_contiguous(memory_format=memory_format)
        assert result.dtype is given[0].dtype
    check(Results(*map(numbers, results)), x, dy, GROUPS, 1)


def test_strides_of_axes_of_one_element_do_not_matter(monkeypatch):
    x, dy = (draw(name, (2, 7, 10), "float32") for name in ("x", "dy"))
    expected, copied = run(x, dy, GROUPS), copies(monkeypatch)
    for array in (x, dy):
        assert array.flags.c_contiguous
    odd = [as_strided(a[:1], (1, 1, 7, 1, 10), (12, 4444, 40, -8, 4)) for a in (x, dy)]
    results = run(*odd, GROUPS)
    assert not copied
    assert_same_bits(results.y.reshape(7, 10), expected.y[0])
    assert_same_bits(results.dx.reshape(7, 10), expected.dx[0])


# --- strides that they do not follow --------------------------------------------------------------

COPIED = {
    "every other channel": (-1, (4, 7, 20), lambda a: a[..., ::2]),
    "channels reversed": (-1, (4, 7, 10), lambda a: a[..., ::-1]),
    "columns of an image": (-1, (4, 5, 6, 10), lambda a: a[:, :, 1:4]),
    "transposed image": (-1, (4, 5, 3, 10), lambda a: a.transpose(0, 2, 1, 3)),
    "channels in the midst": (-1, (4, 5, 10, 3), lambda a: a.transpose(0, 1, 3, 2)),
    "channels outermost": (1, (10, 5, 3, 4), lambda a: a.transpose(3, 0, 1, 2)),
    "every other position": (1, (4, 10, 14), lambda a: a[..., ::2]),
    "transposed image, channels first": (1, (4, 10, 5, 3), lambda a: a.transpose(0, 1, 3, 2)),
    "unaligned": (1, (4, 10, 5, 3), lambda a: unaligned(a)),
}


# With channel_axis -1, but strides that are nearer to channels first.
FARTHER_CHANNELS = ("channels in the midst",)


def unaligned(array):
    return (
        np.frombuffer(b" " + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)
    )


@pytest.mark.parametrize("view", COPIED)
def test_other_strides_are_copied_once_to_the_layout_that_is_nearer(view, monkeypatch):
    channel_axis, shape, of = COPIED[view]
    given = {name: draw(name, shape, "float32") for name in ("x", "dy")}
    memory = "first" if channel_axis == 1 or view in FARTHER_CHANNELS else "last"
    x, dy = map(of, given.values())
    dense = [laid_out(array, channel_axis, memory) for array in (x, dy)]
    expected = run(*dense, GROUPS, channel_axis)
    check(expected, *dense, GROUPS, channel_axis)
    copied = copies(monkeypatch)
    results = run(x, dy, GROUPS, channel_axis)
    if view != "unaligned":  # of which a copy is taken where it is described
        assert len(copied) == 3  # x, and both in the backward
    assert_same_fields(results, expected)
    assert strides(results.y) == strides(results.dx) == strides(dense[0])
    for name, array in given.items():
        assert_same_bits(array, draw(name, shape, "float32"), name)


@pytest.mark.parametrize("channel_axis", [-1, 1])
@pytest.mark.parametrize("memory", ["last", "first"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_dy_in_another_layout_is_copied_to_that_of_x(kind, memory, channel_axis, monkeypatch):
    sizes = Sizes(2, (5, 3), 10, GROUPS)
    x, dy = (drawn(name, sizes, "float32", channel_axis, memory) for name in ("x", "dy"))
    other = laid_out(dy, channel_axis, {"last": "first", "first": "last"}[memory])
    expected, copied = run(x, dy, GROUPS, channel_axis), copies(monkeypatch)
    results = Results(*map(numbers, run(to(kind, x), to(kind, other), GROUPS, channel_axis)))
    assert len(copied) == 1
    assert_same_fields(results, expected)
    assert strides(results.dx) == strides(x)
    assert_same_bits(other, dy)


@pytest.mark.parametrize(
    "view",
    [lambda a: a[..., ::2], lambda a: a[..., ::-1], lambda a: a[::2], lambda a: a[:, :5]],
    ids=["every other column", "columns reversed", "every other row", "some columns"],
)
def test_parameters_and_statistics_of_any_strides_are_read_by_their_elements(view):
    x, dy = (draw(name, (4, 7, 5), "float32") for name in ("x", "dy"))
    wide = {name: draw(name, (8, 10), "float32") for name in ("weight", "bias", "mean", "rstd")}
    of = {name: view(array)[:4, :5] for name, array in wide.items()}
    of |= {name: of[name][0] for name in ("weight", "bias")}
    dense = {name: array.copy() for name, array in of.items()}
    expected, grads = (
        cunorm.group_norm_backward(dy, x, 5, **arrays, activation="silu") for arrays in (dense, of)
    )
    assert_same_fields(grads, expected)
    expected, y = (
        cunorm.instance_norm(x, arrays["weight"], arrays["bias"], activation="silu")
        for arrays in (dense, of)
    )
    assert_same_bits(y, expected)


# --- layouts that are both ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 10), (3, 1, 10), (3, 1, 1, 1, 10)], ids=str)
def test_with_one_position_the_axis_of_channels_makes_no_difference(shape, monkeypatch):
    """For one without positions: 1 and -1 name the same axis."""
    x, dy = (draw(name, shape, "float32") for name in ("x", "dy"))
    expected, copied = run(x, dy, GROUPS), copies(monkeypatch)
    check(expected, x, dy, GROUPS)
    first = [np.moveaxis(array, -1, 1) for array in (x, dy)]
    results = run(*first, GROUPS, channel_axis=1)
    assert not copied
    assert results.y.shape == results.dx.shape == first[0].shape
    for field in Results._fields:
        result, right = getattr(results, field), getattr(expected, field)
        assert_same_bits(result.reshape(right.shape), right, field)


def test_with_one_channel_the_axis_of_channels_makes_no_difference(monkeypatch):
    x, dy = (draw(name, (3, 5, 7, 1), "float32") for name in ("x", "dy"))
    expected, copied = run(x, dy, 1), copies(monkeypatch)
    check(expected, x, dy, 1)
    results = run(*(array.reshape(3, 1, 5, 7) for array in (x, dy)), 1, channel_axis=1)
    assert not copied
    for field in Results._fields:
        result, right = getattr(results, field), getattr(expected, field)
        assert_same_bits(result.reshape(right.shape), right, field)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_layouts_of_the_same_numbers_are_within_the_bounds(dtype):
    """So are float32's of a far mean; the sums are in another order, and bits may differ."""
    sizes = Sizes(3, (31, 33), 10, GROUPS)
    far = 1e4 if dtype == "float32" else 0.0
    for channel_axis in (-1, 1):
        for memory in ("last", "first"):
            x = drawn("x", sizes, dtype, channel_axis, memory, mean=far)
            dy = drawn("dy", sizes, dtype, channel_axis, memory)
            with at(channel_axis, memory):
                check(run(x, dy, GROUPS, channel_axis), x, dy, GROUPS, channel_axis)


# --- frameworks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("channel_axis", [-1, 1])
def test_results_are_of_the_callers_framework_and_right(kind, dtype, channel_axis, monkeypatch):
    sizes = Sizes(2, (5, 3), 10, GROUPS)
    x, dy = (draw(name, sizes.shape(channel_axis), dtype) for name in ("x", "dy"))
    theirs, copied = [to(kind, array) for array in (x, dy)], copies(monkeypatch)
    results = run(*theirs, GROUPS, channel_axis)
    expected = np.ndarray if kind == "dlpack" else type(theirs[0])
    assert all(isinstance(result, expected) for result in results)
    assert not copied
    check(Results(*map(numbers, results)), x, dy, GROUPS, channel_axis)


def test_a_dlpack_object_of_channels_last_is_read_as_it_is(monkeypatch):
    sizes = Sizes(2, (5, 3), 10, GROUPS)
    x, dy = (drawn(name, sizes, "float32", 1, "last") for name in ("x", "dy"))
    expected, copied = run(x, dy, GROUPS, 1), copies(monkeypatch)
    results = run(Foreign(x), Foreign(dy), GROUPS, 1)
    assert not copied
    assert_same_fields(results, expected)
    assert strides(results.y) == strides(results.dx) == strides(x)


# --- no samples -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
@pytest.mark.parametrize(
    ("shape", "channel_axis"), [((0, 10), -1), ((0, 5, 3, 10), -1), ((0, 10, 7), 1)], ids=str
)
def test_no_samples_give_empty_results_and_zero_parameter_gradients(kind, shape, channel_axis):
    x, weight = np.empty(shape, np.float32), np.ones(10, np.float16)
    told = {"activation": "silu", "channel_axis": channel_axis}
    f = cunorm.group_norm_forward(to(kind, x), GROUPS, to(kind, weight), **told)
    assert f.y.shape == shape
    assert f.mean.shape == f.rstd.shape == (0, GROUPS)
    assert cunorm.instance_norm(to(kind, x), channel_axis=channel_axis).shape == shape

    given, saved = [to(kind, a) for a in (x, x)], {"mean": f.mean, "rstd": f.rstd}
    params = [to(kind, weight), to(kind, weight)]
    grads = cunorm.group_norm_backward(*given, GROUPS, *params, **saved, **told)
    assert grads.dx.shape == shape
    for gradient in (grads.dweight, grads.dbias):
        assert_same_bits(numbers(gradient), np.zeros(10, np.float16))


def test_no_samples_add_nothing():
    x, statistic = np.empty((0, 7, 10), np.float32), np.empty((0, GROUPS), np.float32)
    before = draw("dweight", 10, "float32")
    before[:3] = (np.inf, -np.inf, np.nan)
    weight = np.ones(10, ml_dtypes.bfloat16)
    out = GroupNormGrads(dweight=before.copy())
    saved = {"mean": statistic, "rstd": statistic}
    cunorm.group_norm_backward(x, x, GROUPS, weight, **saved, out=out, accumulate=True)
    assert_same_bits(out.dweight, before)
