# SPDX-License-Identifier: MIT
"""Rows and groups that are all alike, huge, zero or not finite."""

from __future__ import annotations

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.support.bounds import check_backward, check_forward
from tests.support.norm_checks import (
    check_group_norm,
    check_layer_norm,
    group_norm,
    laid_out,
    parameters,
)
from tests.support.operands import DTYPES, assert_same_bits, at, draw

axes = pytest.mark.parametrize("axis", [-1, 1])
not_finite = pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])

# --- constant rows and groups ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_constant_row_under_center_gives_exactly_bias(device, dtype):
    for width in (33,) if device.is_gpu else (1, 31, 128, 1000, 20481):
        bias = parameters(width, dtype)[1]
        for value in (0.1, 1e4 + 0.3):
            x = np.full((3, width), value, DTYPES[dtype])
            with at(f"width {width}", f"value {value}"):
                f = check_layer_norm(device, x)
                assert_same_bits(f.y, np.broadcast_to(bias, x.shape))
                np.testing.assert_array_equal(f.mean, x[:, 0].astype(f.mean.dtype))


@axes
def test_a_constant_group_gives_the_activation_of_bias(device, axis):
    """To the bit, whatever the constant: some have a mean that is not exactly a sum's rounding."""
    sizes = [(1, 10, 5), (31, 10, 1), (3007, 40, 4)]
    for positions, channels, groups in sizes[:2] if device.is_gpu else sizes:
        rng = np.random.default_rng(positions)
        constants = rng.uniform(-1, 1, (5, 1, groups)) * 10.0 ** rng.integers(-3, 5, (5, 1, groups))
        x = np.repeat(constants.astype(np.float32), channels // groups, axis=-1)
        x = laid_out(np.repeat(x, positions, axis=1), axis)
        f = check_group_norm(device, x, groups, axis)
        of_bias = check_group_norm(device, np.zeros_like(x), groups, axis)
        with at(positions, channels):
            assert_same_bits(f.y, of_bias.y)
            assert_same_bits(f.mean, constants[:, 0].astype(np.float32), "mean")


# --- c and eps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("center", [False, True])
def test_c_is_the_length_of_a_row_and_eps_is_added_to_the_mean_square(center):
    x, dy = (draw(name, (12, 500), "float32") for name in ("x", "dy"))
    for c in (-2.5, 0.0, 1e-3, np.float32(0.1), 7):
        f = cunorm.normalize_forward(x, c=c, center=center, eps=0.0)
        lengths = np.linalg.norm(f.y.astype(np.float64), axis=-1)
        np.testing.assert_allclose(lengths, abs(float(c)), rtol=1e-6)
        told = {"c": float(c), "center": center, "eps": 0.0}
        check_forward(f, x, None, None, **told)
        saved = {"rstd": f.rstd, "mean": f.mean, "c": c, "center": center}
        check_backward(cunorm.normalize_backward(dy, x, **saved), dy, x, None, None, **told)
    for eps in (0, 1e-12, 0.5, 1e6, np.float32(1e-3)):
        f = cunorm.normalize_forward(x, center=center, eps=eps)
        check_forward(f, x, None, None, center=center, eps=float(eps))
    zeros = np.zeros((2, 100), np.float32)
    assert_same_bits(cunorm.normalize(zeros, center=center), zeros)
    assert np.isnan(cunorm.normalize(zeros, center=center, eps=0.0)).all()


# --- large and not finite -------------------------------------------------------------------------


def test_large_finite_float16_values_do_not_overflow(device):
    rng = np.random.default_rng(0)
    for width in (33,) if device.is_gpu else (33, 65536):
        x = (65504.0 * rng.choice([-1, 1, 0.5], (3, width))).astype(np.float16)
        f = check_layer_norm(device, x)
        assert np.isfinite(f.y).all()
        assert (f.rstd > 0).all()
        y = device.get(cunorm.rms_norm(device.put(x))).astype(np.float64)
        np.testing.assert_allclose(y, reference.rms_norm(x), rtol=2.0**-10, atol=2.0**-24)
    x = (65504.0 * rng.choice([-1, 1], (2, 301, 10))).astype(np.float16)
    assert np.isfinite(check_group_norm(device, x, 2, -1).y).all()


def test_float32_rows_and_groups_whose_squares_overflow_give_what_ieee_gives(device):
    for width in (512,) if device.is_gpu else (8, 512, 4096):
        for large in (slice(None), slice(1), slice(-1, None)):
            x = np.ones((1, width), np.float32)
            x[:, large] = 1e30
            f = cunorm.rms_norm_forward(device.put(x))
            assert_same_bits(device.get(f.rstd), np.zeros(1, np.float32))
            assert_same_bits(device.get(f.y), np.zeros_like(x))
    for axis in (-1, 1):
        x = np.full((1, 40, 64), 1e30, np.float32)
        x[:, ::2] *= -1
        f = cunorm.group_norm_forward(device.put(laid_out(x, axis)), 4, channel_axis=axis)
        assert_same_bits(device.get(f.rstd), np.zeros((1, 4), np.float32))
        assert not device.get(f.y).any()


@pytest.mark.parametrize("center", [False, True])
@not_finite
def test_what_is_not_finite_stays_in_its_row(device, value, center):
    for width in (128,) if device.is_gpu else (1, 33, 1000):
        arrays = {name: draw(name, (9, width), "float32") for name in ("x", "dy", "d_residual")}
        clean = both(device, arrays, center)
        for operand in arrays:
            for column in {0, width // 2, width - 1}:
                poisoned = {name: array.copy() for name, array in arrays.items()}
                poisoned[operand][4, column] = value
                results = both(device, poisoned, center)
                assert not np.isfinite(results["dx"][4, column])
                assert operand != "x" or np.isnan(results["y"][4, column])
                for name, array in results.items():
                    with at(width, operand, column):
                        others = (np.delete(v, 4, axis=0) for v in (array, clean[name]))
                        assert_same_bits(*others, name)


def both(on, arrays, center):
    there = {name: on.put(array) for name, array in arrays.items()}
    f = cunorm.normalize_forward(there["x"], center=center)
    grads = cunorm.normalize_backward(**there, rstd=f.rstd, mean=f.mean, center=center)
    results = {"y": f.y, "rstd": f.rstd, "dx": grads.dx} | ({"mean": f.mean} if center else {})
    return {name: on.get(array) for name, array in results.items()}


@axes
@not_finite
def test_what_is_not_finite_stays_in_its_group_of_its_sample(device, value, axis):
    sizes = [(300, 40, 8), (3007, 40, 4)]
    for positions, channels, groups in [(131, 40, 8)] if device.is_gpu else sizes:
        x, dy = (draw(name, (3, positions, channels), "float32") for name in ("x", "dy"))
        clean = grouped(device, x, dy, groups, axis)
        own = np.arange(channels) >= (groups - 1) * (channels // groups)
        for operand in ("x", "dy"):
            poisoned = {"x": x.copy(), "dy": dy.copy()}
            poisoned[operand][1, positions // 2, -1] = value
            results = grouped(device, *poisoned.values(), groups, axis)
            for field, result in results.items():
                bad = np.zeros(result.shape, bool)
                if field == "dx" or (field == "y" and operand == "x"):
                    bad[1, :, own] = True
                elif field in ("mean", "rstd"):
                    bad[1, -1] = operand == "x"
                elif result.ndim == 1:
                    bad[own if operand == "x" else -1] = True
                with at(positions, operand, field):
                    if field != "rstd" and (np.isnan(value) or result.ndim == 3):
                        assert not np.isfinite(result[bad]).any()
                    assert_same_bits(result[~bad], clean[field][~bad], field)


def grouped(on, x, dy, groups, axis):
    """Return the results of a group norm with silu, channels last."""
    f, grads, *_ = group_norm(on, laid_out(x, axis), laid_out(dy, axis), groups, axis)
    results = f._asdict() | grads._asdict()
    return {n: np.moveaxis(a, axis, -1) if a.ndim == 3 else a for n, a in results.items()}


@pytest.mark.parametrize("positions", [63, 64, 65])
def test_an_infinite_weight_poisons_no_sum_beyond_the_sample(positions):
    """What lies outside a pack is 0, and 0 times infinity would be NaN in the sums."""
    x, dy = (draw(name, (1, 4, positions), "float32") for name in ("x", "dy"))
    weight, bias = np.float32([np.inf, 1, 1, 1]), np.ones(4, np.float32)
    told = {"channel_axis": 1, "activation": "silu"}
    f = cunorm.group_norm_forward(x, 4, weight, bias, **told)
    given = (dy, x, 4, weight, bias)
    grads = cunorm.group_norm_backward(*given, mean=f.mean, rstd=f.rstd, **told)
    exact = reference.group_norm_backward(*given, mean=f.mean, rstd=f.rstd, **told)
    for field in ("dbias", "dweight"):
        isnan = (np.isnan(getattr(grads, field)), np.isnan(getattr(exact, field)))
        np.testing.assert_array_equal(*isnan)
