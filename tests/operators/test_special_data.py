# SPDX-License-Identifier: MIT
"""Rows and groups that are constant, huge, zero or not finite."""

from __future__ import annotations

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.support.case_covers import FACTORS
from tests.support.cases import call_of, groups_of
from tests.support.gpu_arrays import OnNumpy
from tests.support.norm_checks import check_norm, laid_out
from tests.support.operands import DTYPES, assert_same_bits, at, draw, optional
from tests.support.placed import Samples

axes = pytest.mark.parametrize("axis", [-1, 1])

# --- constant rows and groups ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_constant_row_with_center_gives_exactly_bias(device, dtype):
    for width in (33,) if device.is_gpu else (1, 31, 128, 1000, 20481):
        bias = optional("bias", width, dtype)
        for value in (0.1, 1e4 + 0.3):
            x = np.full((3, width), value, DTYPES[dtype])
            with at(f"width {width}", f"value {value}"):
                f, _ = check_norm(device, x, center=True)
                assert_same_bits(f.y, np.broadcast_to(bias, x.shape))
                np.testing.assert_array_equal(f.mean, x[:, 0].astype(f.mean.dtype))


@axes
def test_a_constant_group_gives_the_activation_of_bias_and_without_bias_zeros(device, axis):
    """y has the bits that it has for zeros, and the mean is the constant."""
    sizes = [(1, 10, 5), (31, 10, 1), (1999, 24, 3), (3007, 40, 4)]
    for positions, channels, groups in sizes[:2] if device.is_gpu else sizes:
        options = {"num_groups": groups, "channel_axis": axis}
        rng = np.random.default_rng(positions)
        constants = rng.uniform(-1, 1, (5, 1, groups)) * 10.0 ** rng.integers(-3, 5, (5, 1, groups))
        x = np.repeat(constants.astype(np.float32), channels // groups, axis=-1)
        x = laid_out(np.repeat(x, positions, axis=1), axis)
        f, _ = check_norm(device, x, activation="silu", **options)
        constant, _ = check_norm(device, np.zeros_like(x), activation="silu", **options)
        with at(positions, channels):
            assert_same_bits(f.y, constant.y)
            assert_same_bits(f.mean, constants[:, 0].astype(np.float32), "mean")
            assert not device.get(cunorm.group_norm(device.put(x), **options)).any()


# --- c and eps ------------------------------------------------------------------------------------


def test_a_row_or_group_of_one_element_has_a_gradient_of_rounded_products_alone(device):
    """dx is a product minus its mean; the mean is the same product, but rounded."""
    x, dy, weight = (draw(name, (500, 1), "float32") for name in ("x", "dy", "weight"))
    _, row = check_norm(device, x, dy, (weight[0], None), center=True)
    of_groups, own = (a.reshape(5, 1, 100) for a in (x, dy)), weight[:100, 0].copy()
    _, group = check_norm(device, *of_groups, (own, None), num_groups=100)
    unit = np.finfo(np.float32).eps / np.sqrt(1e-5)
    assert (np.abs(row.dx) <= unit * np.abs(dy * weight[0])).all()
    assert (np.abs(group.dx)[:, 0] <= 2 * unit * np.abs(own * dy.reshape(5, 100))).all()


@pytest.mark.parametrize("center", [False, True])
def test_c_is_the_length_of_a_row_and_eps_is_added_to_the_mean_square(center):
    x = draw("x", (12, 500), "float32")
    for c in (-2.5, 0.0, 1e-3, np.float32(0.1), 7):
        f, _ = check_norm(OnNumpy(), x, parameters=(None, None), c=c, center=center, eps=0.0)
        lengths = np.linalg.norm(f.y.astype(np.float64), axis=-1)
        np.testing.assert_allclose(lengths, abs(float(c)), rtol=1e-6)
    for eps in (0, 1e-12, 0.5, 1e6, np.float32(1e-3)):
        check_norm(OnNumpy(), x, parameters=(None, None), center=center, eps=eps)
    zeros = np.zeros((2, 100), np.float32)
    assert_same_bits(cunorm.normalize(zeros, center=center), zeros)
    assert np.isnan(cunorm.normalize(zeros, center=center, eps=0.0)).all()


# --- large and not finite -------------------------------------------------------------------------


def test_large_finite_float16_values_do_not_overflow(device):
    rng = np.random.default_rng(0)
    x = (65504.0 * rng.choice([-1, 1, 0.5], (3, 33 if device.is_gpu else 1003))).astype(np.float16)
    f, _ = check_norm(device, x, center=True)
    assert np.isfinite(f.y).all()
    assert (f.rstd > 0).all()
    y = device.get(cunorm.rms_norm(device.put(x))).astype(np.float64)
    np.testing.assert_allclose(y, reference.rms_norm(x), rtol=2.0**-10, atol=2.0**-24)
    x = (65504.0 * rng.choice([-1, 1], (2, 301, 10))).astype(np.float16)
    f, _ = check_norm(device, x, num_groups=2, activation="silu")
    assert np.isfinite(f.y).all()


def sizes(kernel, is_gpu):
    """Return cases of a row norm, or of a group norm in both layouts."""
    if "row" in kernel:
        widths = (128,) if is_gpu else (1, 33, 1000)
        return [{"shape": (1, 1, 9, w), "center": c} for w in widths for c in (False, True)]
    found = [(131, 40, 8)] if is_gpu else [(300, 40, 8), (3007, 40, 4)]
    orders = ((True, -1), (False, 1))
    return [{"samples": Samples(3, (n,), *rest, *at)} for n, *rest in found for at in orders]


# With eps 0 the squares must not underflow; with a larger eps they may.
IN_RANGE = {1e-30: 1e-5, 1e-16: 0.0, 1e-10: 0.0, 1e10: 1e-5, 1e16: 1e-5}


@pytest.mark.parametrize("scale", IN_RANGE)
@pytest.mark.parametrize("kernel", FACTORS)
def test_large_and_small_numbers_are_within_the_bounds(device, kernel, scale):
    for case in sizes(kernel, device.is_gpu):
        with at(case):
            call_of(kernel, case | {"scale": scale, "eps": IN_RANGE[scale]}, device).check()


@pytest.mark.parametrize("scale", [1e20, 3e37])
@pytest.mark.parametrize("kernel", ["row_norm_forward", "group_norm_forward"])
def test_rows_and_groups_whose_squares_overflow_give_zeros_or_nan(device, kernel, scale):
    for case in sizes(kernel, device.is_gpu):
        plain = {"weight": None, "bias": None, "activation": None, "scale": scale}
        f = call_of(kernel, case | plain, device).run()
        width = groups_of(case, f.y)[0].size
        with at(case):
            assert width == 1 or not np.nan_to_num(f.y).any()
            assert width == 1 or not np.nan_to_num(f.rstd).any()


@pytest.mark.parametrize("large", [slice(None), slice(1), slice(-1, None)])
def test_one_large_element_overflows_as_all_do(device, large):
    for width in (512,) if device.is_gpu else (8, 512, 4096):
        x = np.ones((1, width), np.float32)
        x[:, large] = 1e30
        f = cunorm.rms_norm_forward(device.put(x))
        assert_same_bits(device.get(f.rstd), np.zeros(1, np.float32))
        assert_same_bits(device.get(f.y), np.zeros_like(x))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kernel", FACTORS)
def test_numbers_that_are_not_finite_affect_only_their_row_or_group(device, kernel, value):
    field, operands = ("dx", ("x", "dy")) if "backward" in kernel else ("y", ("x",))
    for case in sizes(kernel, device.is_gpu):
        clean = groups_of(case, getattr(call_of(kernel, case, device).run(), field))
        for operand in operands:
            call = call_of(kernel, case, device)
            parts = groups_of(case, call.inputs[operand].host)
            index = tuple(size // 2 for size in parts.shape)
            parts[index] = value
            got, own = groups_of(case, getattr(call.run(), field)), np.zeros(parts.shape, bool)
            own[index[0], :, index[2]] = True
            with at(case, operand):
                assert not np.isfinite(got[index])
                assert_same_bits(got[~own], clean[~own], field)


@pytest.mark.parametrize("positions", [63, 64, 65])
def test_an_infinite_weight_poisons_no_sum_beyond_the_sample(positions):
    """Elements that fill up a pack are 0, and 0 times infinity would be NaN in the sums."""
    x, dy = (draw(name, (1, 4, positions), "float32") for name in ("x", "dy"))
    weight, bias = np.float32([np.inf, 1, 1, 1]), np.ones(4, np.float32)
    options = {"channel_axis": 1, "activation": "silu"}
    f = cunorm.group_norm_forward(x, 4, weight, bias, **options)
    given = (dy, x, 4, weight, bias)
    grads = cunorm.group_norm_backward(*given, mean=f.mean, rstd=f.rstd, **options)
    exact = reference.group_norm_backward(*given, mean=f.mean, rstd=f.rstd, **options)
    for field in ("dbias", "dweight"):
        isnan = (np.isnan(getattr(grads, field)), np.isnan(getattr(exact, field)))
        np.testing.assert_array_equal(*isnan)
