# SPDX-License-Identifier: MIT
"""No digits are lost if a mean is far from most of the data, or if roundings could add up."""

from __future__ import annotations

import numpy as np
import pytest

import cunorm
from tests.support.bounds import check_backward, check_forward
from tests.support.gpu_arrays import get_all
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.internals import compiler
from tests.support.norm_checks import check_group_norm, check_layer_norm, laid_out
from tests.support.operands import at, draw
from tests.support.scales import (
    check_backward_rounds_what_the_forward_rounded,
    check_scales,
    check_scales_beyond_float32,
)
from tests.support.ulps import assert_within, unit

axes = pytest.mark.parametrize("axis", [-1, 1])

# --- a mean far from zero -------------------------------------------------------------------------

DRIFTS = {
    "mean of 1e6": lambda at, width: 1e6,
    "ramp": lambda at, width: 1e4 * at / width,
    "beginning": lambda at, width: np.where(at < 64, -1e4, 1e4),
    "first element": lambda at, width: 1e6 * (at == 0),
    "last element": lambda at, width: 1e5 * (at == width - 1),
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_a_mean_far_from_0_costs_no_digits(device, drift):
    for dtype in ("float32",) if device.is_gpu else ("float32", "float64"):
        for width in (1000,) if device.is_gpu else (1, 2, 33, 1003, 20480):
            shape = (max(3, min(20, 20_000 // width)), width)
            far = draw("x", shape, "float64") + DRIFTS[drift](np.arange(width), width)
            with at(dtype, width):
                check_layer_norm(device, far.astype(dtype))


@axes
def test_a_mean_far_from_0_costs_no_digits_of_groups(device, axis):
    sizes = [(700, 48, 8), (3007, 40, 4), (31, 10, 1)]
    for positions, channels, groups in [(131, 48, 8)] if device.is_gpu else sizes:
        x = draw("x", (2, positions, channels), "float32")
        for far in (x - np.float32(1e6), np.where(np.arange(positions) < 9, 1e4, 0)[:, None] + x):
            with at(positions, channels):
                check_group_norm(device, laid_out(far.astype(np.float32), axis), groups, axis)


@pytest.mark.parametrize(("positions", "channels", "groups"), [(64, 64, 4), (2048, 32, 1)])
def test_a_first_channel_far_from_the_others_costs_no_digits(positions, channels, groups):
    """x is float64, so sums have no wider type; they are of differences from the first channel."""
    size = (2, positions, groups, channels // groups)
    x = np.random.default_rng(0).standard_normal(size) * 1e-3
    x[..., 0] += 1000
    x = x.reshape(2, positions, channels)
    f = cunorm.group_norm_forward(x, groups)
    check_group_forward(f, x, groups, None, None, eps=1e-5)


# --- sums that could add up their roundings -------------------------------------------------------


@pytest.mark.parametrize("width", [4096, 65536, 262144])
def test_equal_elements_do_not_add_up_their_roundings(width):
    rng = np.random.default_rng(width)
    for value in rng.uniform(1, 2, 4).astype(np.float32):
        x = np.full((1, width), value)
        check_forward(cunorm.rms_norm_forward(x, eps=0), x, None, None, eps=0)
        x = np.where(rng.random((1, width)) < 0.5, value, -value)
        check_forward(cunorm.layer_norm_forward(x), x, None, None, center=True, eps=1e-5)


def large_beside_equal(rows, width):
    """Return rows of equal elements and a larger one; its square is 2**18 to 2**28 times theirs.

    One small square, or the sum of some small squares, is about half an ulp of the large square.
    """
    rng = np.random.default_rng(width)
    large = rng.uniform(1, 4, (rows, 1)) * rng.choice([-1, 1], (rows, 1))
    x = np.repeat(large * 2.0 ** -rng.uniform(9, 14, (rows, 1)), width, axis=1)
    np.put_along_axis(x, rng.integers(0, width, (rows, 1)), large, axis=1)
    return x.astype(np.float32)


@pytest.mark.parametrize("width", [1000, 1024, 4096])
@pytest.mark.parametrize("center", [False, True])
def test_equal_elements_beside_a_large_one_do_not_add_up_their_roundings(center, width):
    x, ones = large_beside_equal(400_000 // width, width), np.ones(width, np.float32)
    options, bias = {"center": center, "eps": 1e-6}, ones if center else None
    f = cunorm.normalize_forward(x, ones, bias, **options)
    check_forward(f, x, ones, bias, **options)
    saved = {"rstd": f.rstd, "mean": f.mean, "center": center}
    grads = cunorm.normalize_backward(np.ones_like(x), x, ones, bias, **saved)
    check_backward(grads, np.ones_like(x), x, ones, bias, **options)


@axes
@pytest.mark.parametrize("positions", [64, 1024])
def test_equal_positions_beside_a_large_one_do_not_add_up_their_roundings(axis, positions):
    x = large_beside_equal(2048, positions).reshape(2, 1024, positions)
    x[1] *= np.abs(x[1]) > 1  # zeros beside a large element
    x, ones = laid_out(np.moveaxis(x, 1, -1), axis), np.ones(1024, np.float32)
    given, options = (x, 1024, ones, ones), {"channel_axis": axis}
    f = cunorm.group_norm_forward(*given, **options)
    check_group_forward(f, *given, **options, eps=1e-5)
    grads = cunorm.group_norm_backward(x, *given, **options, mean=f.mean, rstd=f.rstd)
    check_group_backward(grads, x, *given, **options, eps=1e-5)


@pytest.mark.parametrize("rows", [100, 4096, 20000])
def test_equal_gradients_beside_a_large_one_do_not_add_up_their_roundings(rows):
    """A row's gradients are about half an ulp of those of the large row."""
    rng = np.random.default_rng(0)
    large = rng.uniform(1, 2, 64)
    dy = np.repeat(large[None] * 2.0 ** -rng.uniform(22, 26, 64), rows, axis=0)
    dy[0] = large
    dy, x, ones = dy.astype(np.float32), np.ones((rows, 64), np.float32), np.ones(64, np.float32)
    x[:, ::2] = -1
    options = {"center": True, "eps": 1e-5}
    f = cunorm.normalize_forward(x, ones, ones, **options)
    saved = {"rstd": f.rstd, "mean": f.mean, "center": True}
    grads = cunorm.normalize_backward(dy, x, ones, ones, **saved)
    check_backward(grads, dy, x, ones, ones, **options)


@pytest.mark.parametrize(("rows", "width"), [(4096, 8), (131072, 2)])
def test_equal_gradients_do_not_add_up_their_roundings(rows, width):
    x, ones = draw("x", (rows, width), "float32"), np.ones(width, np.float32)
    dy = np.full((rows, width), np.float32(1.3))
    saved = cunorm.layer_norm_forward(x, ones, ones)
    grads = cunorm.layer_norm_backward(dy, x, ones, ones, rstd=saved.rstd, mean=saved.mean)
    check_backward(grads, dy, x, ones, ones, center=True, eps=1e-5)


def test_gradients_of_rows_that_are_read_in_pairs_do_not_add_up_their_roundings():
    """A block adds 256 of 8192 rows, in 32 runs of 8. A sum row by row would be 62 u off."""
    rows, width, term = 8192, 4100, np.float32(1.0868149)  # rows of more than 16 KiB
    dy, x = (np.broadcast_to(value, (rows, width)) for value in (term, np.float32(0)))
    ones, saved = np.ones(width, np.float32), np.ones(rows, np.float32)
    options = {"rstd": saved, "mean": saved, "needs": ("bias",)}
    dbias = cunorm.layer_norm_backward(dy, x, ones, ones, **options).dbias
    bound = (8 + 2 + 1) * unit("float32")  # the compensated sum of the runs is 2 u off
    assert_within(dbias.astype(float) / (rows * float(term)), np.ones(width), np.full(width, bound))


def run_on(device, function):
    """Return a function of NumPy arrays that calls `function` on a device."""

    def run(*arrays, **options):
        options = {n: device.put(v) if hasattr(v, "dtype") else v for n, v in options.items()}
        return get_all(device, function(*map(device.put, arrays), **options))

    return run


@axes
def test_equal_terms_of_groups_do_not_add_up_their_roundings(device, axis):
    """All roundings of a sum have the same sign."""
    shape = (1, 2048, 8) if axis == -1 else (1, 8, 2048)
    x = (np.random.default_rng(0).choice([-1.1, 1.1], shape)).astype(np.float32)
    dy, weight = np.full(shape, np.float32(1.1)), np.ones(8, np.float32)
    given = {"x": x, "num_groups": 8, "weight": weight, "bias": weight, "channel_axis": axis}
    f = run_on(device, cunorm.group_norm_forward)(**given)
    check_group_forward(f, **given, eps=1e-5)
    given["dy"] = dy
    grads = run_on(device, cunorm.group_norm_backward)(**given, mean=f.mean, rstd=f.rstd)
    check_group_backward(grads, **given, eps=1e-5)


def test_a_beginning_unlike_the_rest_does_not_add_up_its_roundings():
    for positions, share, noise in ((256, 4, 0), (256, 8, 1e-3), (1000, 4, 0.1)):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((1, positions, 256)) * noise
        x[:, : positions // share] += 1e4 * np.exp(rng.uniform(-1, 1, 256))
        x = x.astype(np.float32)
        check_group_forward(cunorm.group_norm_forward(x, 256), x, 256, None, None, eps=1e-5)


@pytest.mark.parametrize("far", [100.37, 1.0037e16])
@pytest.mark.parametrize(("axis", "positions", "sampled"), [(-1, 256, 8), (1, 4096, 21 * 64)])
def test_elements_that_a_cpu_samples_may_be_unlike_the_rest(axis, positions, sampled, far):
    """In deviations, the mean of the sampled elements is as far from the group's as possible."""
    in_sample = np.arange(positions) % sampled < (1 if axis == -1 else 64)
    x = np.where(in_sample, np.float32(0), np.float32(far))
    x = np.ascontiguousarray(np.broadcast_to(x, (1, 8, positions)))
    x = x if axis == 1 else np.ascontiguousarray(np.moveaxis(x, 1, -1))
    f = cunorm.group_norm_forward(x, 4, channel_axis=axis)
    check_group_forward(f, x, 4, None, None, eps=1e-5, channel_axis=axis)


def test_rstd_is_rounded_once_and_its_product_with_k_three_times(device):
    forward, rows = run_on(device, cunorm.normalize_forward), 300 if device.is_gpu else 2047
    check_scales(lambda x, c: forward(x, c=c, eps=0.0), rows)


def test_a_length_beyond_float32_is_infinite_or_zero(device):
    if compiler() is None and not device.is_gpu:
        pytest.skip("without a compiler NumPy computes in float64")
    forward = run_on(device, cunorm.normalize_forward)
    check_scales_beyond_float32(lambda x, c: forward(x, c=c, eps=0.0))


def test_the_backward_rounds_before_weight_like_the_forward(device):
    norm = (cunorm.normalize_forward, cunorm.normalize_backward)
    rows = 300 if device.is_gpu else 2000
    check_backward_rounds_what_the_forward_rounded(*(run_on(device, f) for f in norm), rows=rows)
