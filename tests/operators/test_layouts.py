# SPDX-License-Identifier: MIT
"""Arrays are read in their memory layout, without a copy, and results have the layout of x.

Rows are part of a fused projection, have any strides, or are one expanded row; the channels of a
group norm are last or first. Layouts that kernels cannot read are copied once.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cunorm
from tests.support.gpu_arrays import OnNumpy, OnTorchCpu, get_all
from tests.support.norm_checks import check, copies, in_memory, run, strides
from tests.support.operands import assert_same_bits, assert_same_fields, at, draw, optional

GROUPS, WIDTH = 5, 96
hosts = pytest.mark.parametrize("on", [OnNumpy, OnTorchCpu], ids=["numpy", "torch"])


def view_of(on, take_view, array):
    """Return a view as a NumPy array or a tensor; None if PyTorch cannot have such strides."""
    view = take_view(array)
    if on is OnNumpy or min(view.strides) < 0:
        return view if on is OnNumpy else None
    offset = (view.ctypes.data - array.ctypes.data) // array.itemsize
    steps = [stride // array.itemsize for stride in view.strides]
    return on().put(array).as_strided(view.shape, steps, offset)


# --- rows -----------------------------------------------------------------------------------------

ROWS = {  # the shape of a drawn array, and a function that returns a view of it
    "tokens, qkv, heads": ((2, 9, 3, 4, WIDTH), lambda a: a[:, :, 1]),
    "tokens, heads, qkv": ((2, 9, 4, 3, WIDTH), lambda a: a[:, :, :, 2]),
    "heads before tokens": ((2, 9, 3, 4, WIDTH), lambda a: a[:, :, 1].swapaxes(1, 2)),
    "columns of a projection": (
        (2, 9, 6 * WIDTH),
        lambda a: as_strided(
            a[..., WIDTH:-WIDTH], (2, 9, 4, WIDTH), (*a.strides[:2], 4 * WIDTH, 4)
        ),
    ),
    "every other row": ((8, 2, WIDTH), lambda a: a[::2]),
    "reversed": ((8, 2, WIDTH), lambda a: a[::-1]),
    "one row for all": ((1, 1, WIDTH), lambda a: np.broadcast_to(a, (4, 5, WIDTH))),
    "one for each sequence": ((4, 1, WIDTH), lambda a: np.broadcast_to(a, (4, 5, WIDTH))),
}
COPIED_ROWS = {
    "columns in steps": ((5, 2 * WIDTH), lambda a: a[:, ::2]),
    "one number for each row": ((7, 1), lambda a: np.broadcast_to(a, (7, WIDTH))),
}


def gated(given, position):
    """Return the results of both directions of a gated layer norm of groups."""
    norm = {"groups": 3, "gate": given["gate"], "gate_position": position}
    parameters = (given["weight"], given["bias"])
    f = cunorm.layer_norm_forward(given["x"], *parameters, **norm)
    saved = {"rstd": f.rstd, "mean": f.mean}
    return f, cunorm.layer_norm_backward(given["dy"], given["x"], *parameters, **saved, **norm)


@hosts
@pytest.mark.parametrize("position", ["pre", "post"])
def test_rows_are_read_where_they_are_or_copied_once(on, position, monkeypatch):
    parameters = {name: optional(name, WIDTH, "float32") for name in ("weight", "bias")}
    copied = copies(monkeypatch)
    for kind, (shape, take_view) in (ROWS | COPIED_ROWS).items():
        drawn = {name: draw(name, shape, "float32") for name in ("x", "gate", "dy")}
        views = {name: view_of(on, take_view, array) for name, array in drawn.items()}
        if views["x"] is None:
            continue
        dense = {name: np.array(take_view(array), order="C") for name, array in drawn.items()}
        copied.clear()
        theirs = {name: on().put(array) for name, array in parameters.items()}
        f, grads = (get_all(on(), r) for r in gated(views | theirs, position))
        with at(kind):
            fits = kind in ROWS and kind != "heads before tokens"  # groups need one more stride
            assert len(copied) == (0 if fits else 5)  # x and gate twice, dy once
            expected, expected_grads = gated(dense | parameters, position)
            assert_same_fields(f, expected)
            assert_same_fields(grads, expected_grads)
            assert grads.dgate.shape == dense["x"].shape
            for name, array in drawn.items():
                assert_same_bits(array, draw(name, shape, "float32"), name)


@hosts
def test_heads_of_a_fused_projection_are_normalised_in_place(on):
    qkv, weight = draw("x", (2, 9, 3, 4, WIDTH), "float32"), optional("weight", WIDTH, "float32")
    expected = qkv.copy()
    expected[:, :, 1] = cunorm.rms_norm(qkv[:, :, 1].copy(), weight)
    q = view_of(on, lambda array: array[:, :, 1], qkv)
    assert cunorm.rms_norm(q, on().put(weight), out=q) is q
    assert_same_bits(qkv, expected)


# --- channels -------------------------------------------------------------------------------------

# Ten channels: their axis, their place in memory, the shape of a drawn array, and a view of it.
FITTING = {
    "channels padded": (-1, "last", (4, 7, 16), lambda a: a[..., 3:13]),
    "every other sample": (-1, "last", (8, 7, 10), lambda a: a[::2]),
    "rows of an image": (-1, "last", (4, 9, 5, 10), lambda a: a[:, 2:5]),
    "samples reversed": (-1, "last", (4, 7, 10), lambda a: a[::-1]),
    "one sample for all": (-1, "last", (1, 7, 10), lambda a: np.broadcast_to(a, (4, 7, 10))),
    "one position for all": (-1, "last", (4, 1, 10), lambda a: np.broadcast_to(a, (4, 7, 10))),
    "PyTorch's channels_last": (1, "last", (4, 5, 3, 10), lambda a: a.transpose(0, 3, 1, 2)),
    "no positions": (1, "last", (4, 16), lambda a: a[:, 2:12]),
    "channels first": (1, "first", (4, 10, 5, 3), lambda a: a[:]),
    "some channels": (1, "first", (4, 16, 7), lambda a: a[:, 3:13]),
    "channels reversed": (1, "first", (4, 10, 7), lambda a: a[:, ::-1]),
    "positions padded": (1, "first", (4, 10, 12), lambda a: a[..., 2:9]),
    "one channel for all": (1, "first", (4, 1, 7), lambda a: np.broadcast_to(a, (4, 10, 7))),
    "samples between": (1, "first", (10, 4, 7), lambda a: a.transpose(1, 0, 2)),
}
COPIED = {  # views that are copied to the nearest layout
    "every other channel, last": (-1, "last", (4, 7, 20), lambda a: a[..., ::2]),
    "columns of an image": (-1, "last", (4, 5, 6, 10), lambda a: a[:, :, 1:4]),
    "channels in the midst": (-1, "first", (4, 5, 10, 3), lambda a: a.transpose(0, 1, 3, 2)),
    "positions in steps": (1, "first", (4, 10, 14), lambda a: a[..., ::2]),
    "transposed image, first": (1, "first", (4, 10, 5, 3), lambda a: a.transpose(0, 1, 3, 2)),
}


@hosts
def test_group_norms_read_strides_that_fit_and_copy_others_once(on, monkeypatch):
    copied = copies(monkeypatch)
    for kind, (axis, memory, shape, take_view) in (FITTING | COPIED).items():
        drawn = {name: draw(name, shape, "float32") for name in ("x", "dy")}
        dense = [in_memory(take_view(array), axis, memory) for array in drawn.values()]
        views = [view_of(on, take_view, array) for array in drawn.values()]
        if views[0] is None:
            continue
        with at(kind):
            expected = run(*dense, GROUPS, axis)
            check(expected, *dense, GROUPS, axis)
            copied.clear()
            results = get_all(on(), run(*views, GROUPS, axis, put=on().put))
            assert len(copied) == (0 if kind in FITTING else 3)  # forward: x; backward: x, dy
            assert_same_fields(results, expected)
            assert strides(results.y) == strides(results.dx) == strides(dense[0])
            for name, array in drawn.items():
                assert_same_bits(array, draw(name, shape, "float32"), name)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("memory", ["last", "first"])
def test_dy_in_another_layout_is_copied_to_that_of_x(memory, axis, monkeypatch):
    shape = (2, 5, 3, 10) if axis == -1 else (2, 10, 5, 3)
    x, dy = (in_memory(draw(name, shape, "float32"), axis, memory) for name in ("x", "dy"))
    other = in_memory(dy, axis, {"last": "first", "first": "last"}[memory])
    expected, copied = run(x, dy, GROUPS, axis), copies(monkeypatch)
    results = run(x, other, GROUPS, axis)
    assert len(copied) == 1
    assert_same_fields(results, expected)
    assert strides(results.dx) == strides(x)


def test_strides_of_axes_of_one_element_do_not_matter(monkeypatch):
    x, dy = (draw(name, (2, 7, 10), "float32") for name in ("x", "dy"))
    expected, copied = run(x, dy, GROUPS), copies(monkeypatch)
    odd = [as_strided(a[:1], (1, 1, 7, 1, 10), (12, 4444, 40, -8, 4)) for a in (x, dy)]
    results = run(*odd, GROUPS)
    assert not copied
    assert_same_bits(results.y.reshape(7, 10), expected.y[0])
    assert_same_bits(results.dx.reshape(7, 10), expected.dx[0])


def test_a_slice_of_one_channel_or_position_is_read_and_written_in_place(monkeypatch):
    for groups, axis, own in ((1, -1, np.s_[..., :1]), (2, 1, np.s_[:, :, :1, :1])):
        x, copied = draw("x", (2, 4, 6, 5), "float32")[own], copies(monkeypatch)
        expected = cunorm.reference.group_norm(x, groups, channel_axis=axis)
        assert cunorm.group_norm(x, groups, channel_axis=axis, out=x) is x
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-5)
        assert not copied


def test_the_crop_of_a_channels_last_tensor_stays_channels_last():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    crop = torch.ones(2, 10, 6, 8).to(memory_format=torch.channels_last)[:, :, :, 1:7]
    y = cunorm.group_norm(crop, 5, channel_axis=1)
    assert y.stride() == torch.relu(crop).stride()


def test_parameters_and_statistics_of_any_strides_are_read_by_their_elements():
    x, dy = (draw(name, (4, 7, 5), "float32") for name in ("x", "dy"))
    padded = {name: draw(name, (8, 10), "float32") for name in ("weight", "bias", "mean", "rstd")}
    weight = padded["weight"][:5, :7].T
    y = cunorm.rms_norm(x, weight, axis=-2)
    assert_same_bits(y, cunorm.rms_norm(x, weight.copy(), axis=-2))
    for view in (np.s_[:4, ::2], np.s_[:4, 4::-1], np.s_[::2, :5]):
        views = {name: array[view] for name, array in padded.items()}
        views |= {name: views[name][0] for name in ("weight", "bias")}
        dense = {name: array.copy() for name, array in views.items()}
        results = [cunorm.group_norm_backward(dy, x, 5, **given) for given in (views, dense)]
        assert_same_fields(*results)
        for given in (views, dense):
            given |= {name: given[name][:, 0] for name in ("mean", "rstd")}
        results = [cunorm.layer_norm_backward(dy[:, 0], x[:, 0], **g) for g in (views, dense)]
        assert_same_fields(*results)
