# SPDX-License-Identifier: MIT
"""Row norms of axes that are not the last: `axis` is a tuple, as for channels before positions."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

import cunorm
from tests.support.calls import raises
from tests.support.case_covers import cover
from tests.support.gpu_arrays import OnNumpy
from tests.support.norm_checks import copies
from tests.support.operands import assert_same_bits, at, draw
from tests.support.strided import channels_first

KERNELS = ("row_norm_forward", "row_norm_backward")
SHAPE = (2, 30, 24)  # samples, positions, channels
CENTERED = {"center": True, "shape": SHAPE}
GATE = {"gate": "float32"}
BRANCH = GATE | {"gate_position": "branch", "stream": "+ float32", "d_residual": "float32"}
CASES = {
    "plain": {},
    "without a mean": {"center": False, "bias": None},
    "far from zero": {"far": True},
    "odd positions": {"shape": (3, 7, 40)},
    "odd channels": {"shape": (2, 12, 37)},
    "one channel": {"shape": (2, 12, 1)},
    "one position": {"shape": (5, 1, 24)},
    "many channels": {"shape": (1, 20, 700)},
    "bfloat16": {"x": "bfloat16", "weight": "bfloat16", "bias": "bfloat16", "dy": "bfloat16"},
    "float16, odd": {"x": "float16", "dy": "float16", "shape": (1, 33, 50)},
    "float64": {"x": "float64", "weight": "float64", "bias": "float64", "dy": "float64"},
    "a stream": {"x": "bfloat16", "stream": "+ float32", "d_residual": "float32", "dy": "bfloat16"},
    "a new stream": {"x": "bfloat16", "stream": "as float32", "dy": "bfloat16"},
    "a post-gate": GATE,
    "a pre-gate": GATE | {"gate_position": "pre", "gate_activation": "tanh"},
    "a gate of the branch": BRANCH,
    "a gate of the branch for each sample": BRANCH | {"gate_own": "10"},
    "one gate for each position": BRANCH | {"gate_own": "11 scalar"},
    "an offset": {"weight_offset": 1.0, "round_before_weight": True, "x": "bfloat16"},
    "parameters for each sample": {"weight_own": "10", "bias_own": "10"},
    "added sums": {"accumulate": "float32"},
    "only parameters": {"needs": ("weight", "bias")},
    "given results": {"given": ("y", "dx", "mean", "rstd")},
    "in place": {"in_place": "all"},
}
IN_CI = ("plain", "odd positions", "bfloat16", "a gate of the branch for each sample")


def some(names):
    return [
        pytest.param(one, marks=() if one in IN_CI else pytest.mark.exhaustive) for one in names
    ]


def case_of(kernel, name):
    case = CENTERED | CASES[name]
    if kernel == "row_norm_forward":
        case |= {"given": tuple(n for n in case.get("given", ()) if n != "dx") or None}
    elif "given" in case:
        case |= {"given": ("dx",)}
    elif "in_place" in case:
        case |= {"in_place": "dy"}
    return case


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", some(CASES))
def test_channels_first_are_right_on_a_gpu(kernel, name, device):
    channels_first(kernel, case_of(kernel, name), device).check()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", [*CASES])
def test_channels_first_are_right(kernel, name):
    channels_first(kernel, case_of(kernel, name), OnNumpy()).check()


ODD, EVEN = (2, 13, 37), (3, 14, 24)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_all_pairs_of_options_and_dtypes_go_with_channels_first(kernel, seed, device):
    for case in cover(kernel, {"groups": (1,), "shape": (ODD, EVEN)}, seed):
        with at(case):
            channels_first(kernel, case, device).check()


def test_the_results_of_channels_last_are_those_of_rows_along_the_last_axis(monkeypatch):
    """They have the same bits, and the memory layout of x; nothing is copied."""
    rows, dy = draw("x", (2, 5, 6, 24), "float32"), draw("dy", (2, 5, 6, 24), "float32")
    weight, bias = draw("weight", (24,), "float32"), draw("bias", (24,), "float32")
    f = cunorm.layer_norm_forward(rows, weight, bias)
    g = cunorm.layer_norm_backward(dy, rows, weight, bias, mean=f.mean, rstd=f.rstd)
    copied = copies(monkeypatch)
    for x, own_dy in (
        [np.moveaxis(one, -1, 1) for one in (rows, dy)],
        [np.moveaxis(one, -1, 1).copy() for one in (rows, dy)],
    ):
        y = cunorm.layer_norm_forward(x, weight, bias, axis=(1,))
        saved = {"mean": y.mean, "rstd": y.rstd}
        grads = cunorm.layer_norm_backward(own_dy, x, weight, bias, axis=(-3,), **saved)
        assert not copied
        for result, expected in ((y.y, f.y), (grads.dx, g.dx)):
            assert result.strides == x.strides
            assert_same_bits(np.moveaxis(result, 1, -1), expected)
        assert_same_bits(y.mean, f.mean)
        assert_same_bits(y.rstd, f.rstd)
        exact = cunorm.reference.layer_norm_backward(dy, rows, weight, mean=f.mean, rstd=f.rstd)
        np.testing.assert_allclose(grads.dweight, exact.dweight, rtol=0, atol=1e-5)


def test_rows_of_several_axes_and_of_crops_are_those_of_moved_axes(monkeypatch):
    weight = draw("weight", (4, 6), "float32")
    x = draw("x", (3, 4, 6, 10, 8), "float32")
    views = {
        "side by side": (x, 0),
        "a crop": (x[..., 1:7], 0),
        "some of the channels": (x[:, :2], 0),
        "every other position": (x[..., ::2], 0),
        "reversed": (x[..., ::-1], 0),
        "rows of one axis in steps": (np.moveaxis(x, (1, 2), (-2, -1))[..., ::-1], None),
        "one position": (x[..., :1, :1].copy(), 0),
    }
    for name, (view, count) in views.items():
        with at(name):
            copied = copies(monkeypatch)
            own = weight[: view.shape[1]] if count == 0 else None
            expected = cunorm.reference.rms_norm(view, own, axis=(1, 2), eps=1e-5)
            y = cunorm.rms_norm(view, own, axis=(1, 2), eps=1e-5)
            np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
            assert count is None or not copied


def test_an_x_of_any_order_of_axes_is_right():
    weight = draw("weight", (5,), "float32")
    for shape in ((3, 5, 4, 1), (3, 5, 1, 1), (3, 5, 4, 2), (1, 5, 4, 2)):
        x = draw("x", shape, "float32")
        for order in permutations(range(4)):
            view = np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))
            with at(shape, order):
                y = cunorm.rms_norm(view, weight, axis=(1,))
                exact = cunorm.reference.rms_norm(x, weight, axis=(1,))
                np.testing.assert_allclose(y, exact, rtol=0, atol=1e-5)


def test_other_layouts_of_operands_are_copied_once(monkeypatch):
    x, dy = draw("x", (2, 24, 5, 6), "float32"), draw("dy", (2, 24, 5, 6), "float32")
    last = np.ascontiguousarray(np.moveaxis(dy, 1, -1))
    y = cunorm.rms_norm_forward(x, axis=(1,))
    expected = cunorm.rms_norm_backward(dy, x, rstd=y.rstd, axis=(1,)).dx
    copied = copies(monkeypatch)
    found = cunorm.rms_norm_backward(np.moveaxis(last, -1, 1), x, rstd=y.rstd, axis=(1,)).dx
    assert len(copied) == 1
    assert_same_bits(found, expected)
    with raises(
        ValueError,
        "rms_norm: out has strides ",
        "(720, 1, 144, 24), expected the memory layout of x, such as strides (720, 30, 6, 1)",
    ):
        cunorm.rms_norm(x, axis=(1,), out=np.moveaxis(np.empty((2, 5, 6, 24), "f4"), -1, 1))


def test_wrong_parameters_and_lengths_are_named():
    x = np.ones((2, 24, 5, 6), np.float32)
    expected = " to match x.shape[1], or (1, 24, 1, 1), whose axes before the row may have the "
    expected += "sizes of x"
    for shape in ((7,), (2, 1, 1, 1), (24, 6), (1, 24, 5, 1), (24, 5, 1), (2, 24, 5, 6)):
        with raises(ValueError, f"rms_norm: weight has shape {shape}, expected (24,)", expected):
            cunorm.rms_norm(x, np.ones(shape, np.float32), axis=(1,))
    with raises(ValueError, "rms_norm: groups is 2 and axis is (1,), expected axis -1 with groups"):
        cunorm.rms_norm(x, axis=(1,), groups=2)
    long = np.ones((1, 16385, 2), np.float32)
    text = (
        "l2_norm: x has rows of 16385 elements that lie apart in memory (axis (1,)), expected at "
    )
    with raises(ValueError, text, "most 16384: pass an x whose last axes are a row"):
        cunorm.l2_norm(long, axis=(1,))
    with raises(TypeError, "rms_norm_quantized: axis is (1,), expected an int"):
        cunorm.rms_norm_quantized(x, axis=(1,))
    with raises(TypeError, "row_moments: axis is (1,), expected an int"):
        cunorm.row_moments(x, axis=(1,))


def test_axes_that_equal_ints_are_refused_even_after_a_call_with_ints():
    x = np.ones((2, 3, 4), np.float32)
    cunorm.rms_norm(x, axis=(1,))
    for wrong in ((1.0,), (True,), [1.0]):
        text = f"rms_norm: axis is {tuple(wrong)}, expected an int or a tuple of ints"
        with raises(TypeError, text):
            cunorm.rms_norm(x, axis=wrong)
    assert cunorm.rms_norm(x, axis=[1]).shape == x.shape
    with raises(
        *(ValueError, "rms_norm: weight has shape (3,), expected (3, 4) to match x.shape[-2:], "),
        "alone or after axes that broadcast to (2,): pass axis=(1,) for rows of the channels, ",
        "axis 1",
    ):
        cunorm.rms_norm(x, np.ones(3, np.float32), axis=1)


def test_the_longest_rows_that_lie_apart(device):
    x, dy = draw("x", (1, 16384, 3), "float32"), draw("dy", (1, 16384, 3), "float32")
    weight = draw("weight", (16384,), "float32")
    saved = cunorm.layer_norm_forward(device.put(x), device.put(weight), axis=(1,))
    exact = cunorm.reference.layer_norm_forward(x, weight, axis=(1,))
    np.testing.assert_allclose(device.get(saved.y), exact.y, rtol=0, atol=2e-5)
    given = {"mean": saved.mean, "rstd": saved.rstd, "axis": (1,)}
    grads = cunorm.layer_norm_backward(device.put(dy), device.put(x), device.put(weight), **given)
    oracle = cunorm.reference.layer_norm_backward(
        dy, x, weight, mean=exact.mean, rstd=exact.rstd, axis=(1,)
    )
    np.testing.assert_allclose(device.get(grads.dx), oracle.dx, rtol=0, atol=2e-5)
    np.testing.assert_allclose(device.get(grads.dweight), oracle.dweight, rtol=0, atol=2e-5)
