# SPDX-License-Identifier: MIT
"""No digits are lost if a mean is far from most of the data, or if roundings could add up."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cunorm
from tests.support.gpu_arrays import OnNumpy, get_all
from tests.support.internals import compiler
from tests.support.norm_checks import check_norm, laid_out
from tests.support.operands import assert_same_bits, at, draw
from tests.support.ulps import assert_within, ulp, unit

axes = pytest.mark.parametrize("axis", [-1, 1])
on_cpu = OnNumpy()
NONE = (None, None)


def ones(*shape):
    return np.ones(shape, np.float32)


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
                check_norm(device, far.astype(dtype), center=True)


@axes
def test_a_mean_far_from_0_costs_no_digits_of_groups(device, axis):
    sizes = [(700, 48, 8), (3007, 40, 4), (31, 10, 1)]
    for positions, channels, groups in [(131, 48, 8)] if device.is_gpu else sizes:
        x = draw("x", (2, positions, channels), "float32")
        options = {"num_groups": groups, "channel_axis": axis, "activation": "silu"}
        for far in (x - np.float32(1e6), np.where(np.arange(positions) < 9, 1e4, 0)[:, None] + x):
            with at(positions, channels):
                check_norm(device, laid_out(far.astype(np.float32), axis), **options)


@pytest.mark.parametrize(
    ("positions", "channels", "groups"), [(64, 64, 4), (2048, 32, 1), (1, 350, 5)]
)
def test_a_first_channel_far_from_the_others_costs_no_digits(positions, channels, groups):
    """x is float64, so sums have no wider type; they are of differences from the first channel."""
    x = draw("x", (2, positions, groups, channels // groups), "float64") * 1e-3
    x[..., 0] += 1000
    check_norm(on_cpu, x.reshape(2, positions, channels), num_groups=groups)


# --- sums that could add up their roundings -------------------------------------------------------


@pytest.mark.parametrize("width", [4096, 65536, 262144])
def test_equal_elements_do_not_add_up_their_roundings(width):
    rng = np.random.default_rng(width)
    for value in rng.uniform(1, 2, 4).astype(np.float32):
        check_norm(on_cpu, np.full((1, width), value), parameters=NONE, eps=0.0)
        x = np.where(rng.random((1, width)) < 0.5, value, -value)
        check_norm(on_cpu, x, parameters=NONE, center=True)


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
    x = large_beside_equal(400_000 // width, width)
    parameters = (ones(width), ones(width) if center else None)
    check_norm(on_cpu, x, np.ones_like(x), parameters, center=center, eps=1e-6)


@axes
@pytest.mark.parametrize("positions", [64, 1024])
def test_equal_positions_beside_a_large_one_do_not_add_up_their_roundings(axis, positions):
    x = large_beside_equal(2048, positions).reshape(2, 1024, positions)
    x[1] *= np.abs(x[1]) > 1  # zeros beside a large element
    x = laid_out(np.moveaxis(x, 1, -1), axis)
    check_norm(on_cpu, x, x, (ones(1024), ones(1024)), num_groups=1024, channel_axis=axis)


@pytest.mark.parametrize("rows", [100, 4096, 20000])
def test_equal_gradients_beside_a_large_one_do_not_add_up_their_roundings(rows):
    """A row's gradients are about half an ulp of those of the large row."""
    rng = np.random.default_rng(0)
    large = rng.uniform(1, 2, 64)
    dy = np.repeat(large[None] * 2.0 ** -rng.uniform(22, 26, 64), rows, axis=0)
    dy[0], x = large, ones(rows, 64)
    x[:, ::2] = -1
    check_norm(on_cpu, x, dy.astype(np.float32), (ones(64), ones(64)), center=True)


@pytest.mark.parametrize(("rows", "width"), [(4096, 8), (131072, 2)])
def test_equal_gradients_do_not_add_up_their_roundings(rows, width):
    dy = np.full((rows, width), np.float32(1.3))
    x = draw("x", dy.shape, "float32")
    check_norm(on_cpu, x, dy, (ones(width), ones(width)), center=True)


def test_gradients_of_rows_that_are_read_in_pairs_do_not_add_up_their_roundings():
    """A block adds 256 of 8192 rows, in 32 runs of 8. A sum row by row would be 62 u off."""
    rows, width, term = 8192, 4100, np.float32(1.0868149)  # rows of more than 16 KiB
    dy, x = (np.broadcast_to(value, (rows, width)) for value in (term, np.float32(0)))
    options = {"rstd": ones(rows), "mean": ones(rows), "needs": ("bias",)}
    dbias = cunorm.layer_norm_backward(dy, x, ones(width), ones(width), **options).dbias
    bound = (8 + 2 + 1) * unit("float32")  # the compensated sum of the runs is 2 u off
    assert_within(dbias.astype(float) / (rows * float(term)), np.ones(width), np.full(width, bound))


@axes
def test_equal_terms_of_groups_do_not_add_up_their_roundings(device, axis):
    """All roundings of a sum have the same sign."""
    shape = (1, 2048, 8) if axis == -1 else (1, 8, 2048)
    x = np.random.default_rng(0).choice([-1.1, 1.1], shape).astype(np.float32)
    dy = np.full(shape, np.float32(1.1))
    check_norm(device, x, dy, (ones(8), ones(8)), num_groups=8, channel_axis=axis)


def test_a_beginning_unlike_the_rest_does_not_add_up_its_roundings():
    for positions, share, noise in ((256, 4, 0), (256, 8, 1e-3), (1000, 4, 0.1)):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((1, positions, 256)) * noise
        x[:, : positions // share] += 1e4 * np.exp(rng.uniform(-1, 1, 256))
        check_norm(on_cpu, x.astype(np.float32), parameters=NONE, num_groups=256)


@pytest.mark.parametrize("far", [100.37, 1.0037e16])
@pytest.mark.parametrize(("axis", "positions", "sampled"), [(-1, 256, 8), (1, 4096, 21 * 64)])
def test_elements_that_a_cpu_samples_may_be_unlike_the_rest(axis, positions, sampled, far):
    """In deviations, the mean of the sampled elements is as far from the group's as possible."""
    in_sample = np.arange(positions) % sampled < (1 if axis == -1 else 64)
    x = np.where(in_sample, np.float32(0), np.float32(far))
    x = laid_out(np.repeat(x[None, :, None], 8, axis=-1), axis)
    check_norm(on_cpu, x, parameters=NONE, num_groups=4, channel_axis=axis)


# --- the roundings of rstd and of k * rstd --------------------------------------------------------


def run_on(device, function, *arrays, **options):
    """Call a function on a device, and return its results as NumPy arrays."""
    options = {n: device.put(v) if hasattr(v, "dtype") else v for n, v in options.items()}
    return get_all(device, function(*map(device.put, arrays), **options))


def test_rstd_is_rounded_once_and_its_product_with_k_three_times(device):
    """A row is (1, b) with an integer b: the sum of squares is exact in any order.

    The first y is k * rstd, where k = c / sqrt(2). The rounding of rstd changes this product by at
    most one ulp, and so does that of k. The product is rounded, too: the error is at most 2.5 ulps.
    """
    b = np.arange(1, 301 if device.is_gpu else 2048)
    x = np.stack([np.ones(len(b)), b], axis=1).astype(np.float32)
    rstd = 1 / np.sqrt((1 + b * b) / 2)
    for c in (None, 3.0, 1 / 3, 1e30):
        k = 1.0 if c is None else c / math.sqrt(2)
        result = run_on(device, cunorm.normalize_forward, x, c=c, eps=0.0)
        y_check = (result.y[:, 0], k * rstd, 0.501 if c is None else 2.5)
        for actual, exact, ulps in ((result.rstd, rstd, 0.501), y_check):
            error = np.abs(actual - exact) / ulp(exact, "float32")
            with at(c):
                assert error.max() <= ulps


def test_a_length_beyond_float32_is_infinite_or_zero(device):
    """As in float32 arithmetic with k = c / sqrt(2)."""
    if compiler() is None and not device.is_gpu:
        pytest.skip("without a compiler NumPy computes in float64")
    x = np.array([[1, 2], [-3, 4], [3e38, 3e38], [0, 0]], np.float32)
    for c in (1e40, -1e40, 1e-50, -1e-50, 0.0, -0.0):
        with np.errstate(all="ignore"):
            k = np.float32(c / math.sqrt(2))
            expected = x * (k / np.sqrt(np.square(x).mean(axis=1, keepdims=True)))
        y = run_on(device, cunorm.normalize_forward, x, c=c, eps=0.0).y
        with at(c):
            np.testing.assert_array_equal(y, expected)
            assert (np.signbit(y[:2]) == np.signbit(expected[:2])).all()


def test_the_backward_rounds_before_weight_like_the_forward(device):
    """dweight of dy = 1 is the backward's rounded k * r, and y of weight 1 is the forward's."""
    groups = 300 if device.is_gpu else 2000
    options, weight = {"round_before_weight": True, "groups": groups}, ones(groups * 64)
    x = np.random.default_rng(11).standard_normal((1, groups * 64)).astype(np.float16)
    for c in (None, 3.0, 1 / 3):
        f = run_on(device, cunorm.normalize_forward, x, weight, c=c, eps=0.0, **options)
        more = options | {"rstd": f.rstd, "c": c}
        grads = run_on(device, cunorm.normalize_backward, np.ones_like(x), x, weight, **more)
        with at(c):
            assert_same_bits(grads.dweight, f.y[0].astype(np.float32))
