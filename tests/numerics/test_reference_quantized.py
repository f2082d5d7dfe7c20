# SPDX-License-Identifier: MIT
"""The oracle of quantised results against exact fractions, ml_dtypes and PyTorch."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from cunorm import reference
from tests.support.operands import assert_same_bits
from tests.support.quantized import (
    CODES,
    LARGEST,
    LEAST,
    QUANTIZED,
    SCALES,
    interesting,
    magnitudes,
    midpoints,
    rounded,
)

FLOATS = QUANTIZED[:2]
each_dtype = pytest.mark.parametrize("dtype", QUANTIZED)
each_float = pytest.mark.parametrize("dtype", FLOATS)


def quantized(values, dtype, **options):
    """Return q of one row."""
    return reference.quantize(values[None], dtype=dtype, **options)[0][0]


def clamped(values, dtype):
    return np.clip(values, -LARGEST[dtype], LARGEST[dtype])


# --- rounding to codes ----------------------------------------------------------------------------


@each_dtype
def test_codes_are_the_numbers_that_ml_dtypes_and_numpy_read(dtype):
    found = magnitudes(dtype)
    read = np.arange(len(found), dtype=np.uint8).view(CODES[dtype]).astype(np.float64)
    np.testing.assert_array_equal(read, found)
    assert found[-1] == LARGEST[dtype]


@each_dtype
def test_every_number_of_16_bits_and_every_midpoint_is_rounded_to_nearest_even(dtype):
    values = interesting(dtype)
    assert_same_bits(quantized(values, dtype, scale=1.0), rounded(values, dtype))


@each_dtype
def test_neighbours_of_midpoints_in_float64_are_rounded_once(dtype):
    """In float32 they are midpoints."""
    middles = midpoints(dtype)
    near = [np.nextafter(middles, end) for end in (0, np.inf)]
    values = np.concatenate([*near, *(-one for one in near)])
    got = quantized(values, dtype, scale=1.0)
    assert_same_bits(got, rounded(values, dtype))
    assert (got != quantized(values.astype(np.float32), dtype, scale=1.0)).any()


@each_float
def test_numbers_are_rounded_as_ml_dtypes_and_pytorch_cast_clamped_numbers(dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    values = interesting(dtype)
    values = values[~np.isnan(values)]
    got, near = quantized(values, dtype, scale=1.0), clamped(values, dtype)
    assert_same_bits(got, near.astype(CODES[dtype]))
    cast = torch.from_numpy(near).to(getattr(torch, dtype)).view(torch.uint8).numpy()
    assert_same_bits(got, cast.view(CODES[dtype]))


def test_integers_are_rounded_as_python_rounds_fractions():
    values = interesting("int8")
    values = values[np.isfinite(values) & (np.abs(values) < 200)]
    drawn = np.random.default_rng(0).choice(values, 3000)
    exact = [max(-127, min(127, round(Fraction(float(value))))) for value in drawn]
    assert_same_bits(quantized(drawn, "int8", scale=1.0), np.int8(exact))


@each_dtype
def test_nan_and_infinity_under_a_given_scale(dtype):
    got = quantized(np.float32([np.nan, -np.nan, np.inf, -np.inf]), dtype, scale=3.0)
    nan = 0 if dtype == "int8" else 0x7F
    assert got.view(np.uint8)[:2].tolist() == [nan, nan]
    assert got[2:].astype(np.float32).tolist() == [LARGEST[dtype], -LARGEST[dtype]]


# --- quotients ------------------------------------------------------------------------------------


def near(exact, kind=np.float32):
    """Return the float nearest to a positive fraction, or the even one of two."""
    guess = kind(float(exact))
    candidates = [np.nextafter(guess, kind(0)), guess, np.nextafter(guess, kind(np.inf))]
    odd = {one: int(one.view(f"u{one.itemsize}")) & 1 for one in candidates}
    return min(candidates, key=lambda one: (abs(Fraction(float(one)) - exact), odd[one]))


def drawn(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.uniform(1, 2, count) * np.exp2(rng.uniform(-30, 20, count))


@each_dtype
@pytest.mark.parametrize("given", [0.3, 7.0, 1e-3, 2.0**-126, 3e38])
def test_a_quotient_is_rounded_to_float32_and_then_to_a_code(dtype, given):
    scale, near_codes = np.float32(given), midpoints(dtype)
    values = np.concatenate([drawn(500), near_codes]) * np.float64(scale)
    values = values[values < np.finfo(np.float32).max].astype(np.float32)
    inverse = near(1 / Fraction(float(scale)))
    for value, got in zip(values, quantized(values, dtype, scale=given), strict=True):
        exact = Fraction(float(value))
        exact *= Fraction(float(inverse)) if dtype == "int8" else 1 / Fraction(float(scale))
        assert_same_bits(got[None], rounded(near(exact)[None], dtype))


@each_dtype
def test_a_found_scale_is_the_nearest_float_to_the_quotient_of_the_largest_magnitude(dtype):
    a = np.float32([*drawn(200), 2.0**-149, 3e38, 1.0, np.finfo(np.float32).max])
    y = np.stack([a / 2, -a, a / 3, 0 * a], -1)
    for row, scale in zip(y, reference.quantize(y, dtype=dtype)[1][:, 0], strict=True):
        exact = Fraction(float(-row[1])) / LARGEST[dtype]
        assert scale == max(near(exact), np.float32(LEAST[dtype]))


@each_float
def test_a_scale_of_float8_e8m0fnu_is_the_power_of_two_at_or_above_the_quotient(dtype):
    powers = np.exp2(np.arange(-149.0, 128)).astype(np.float32)
    ends = [np.nextafter(powers, np.float32(end)) for end in (0, np.inf)]
    own = (LARGEST[dtype] * np.exp2(np.arange(-135.0, 100))).astype(np.float32)
    a = np.float32([*drawn(300), *powers, *own, *np.nextafter(own, np.float32(np.inf))])
    a = np.concatenate([a, *ends])
    a = a[(a > 0) & np.isfinite(a)]
    scales = reference.quantize(a[:, None], dtype=dtype, scale_dtype="float8_e8m0fnu")[1][:, 0]
    for magnitude, code in zip(a, scales.view(np.uint8), strict=True):
        quotient = Fraction(float(magnitude)) / LARGEST[dtype]
        power = Fraction(2) ** (int(code) - 127)
        assert quotient <= power
        assert code == 0 or power / 2 < quotient


@each_float
def test_a_power_of_two_beyond_the_largest_scale_is_nan(dtype):
    y = LARGEST[dtype] * np.exp2([[127.0], [127.5], [300.0], [-127.0], [-126.5], [-300.0]])
    scales = reference.quantize(y, dtype=dtype, scale_dtype="float8_e8m0fnu")[1]
    assert scales.view(np.uint8).ravel().tolist() == [254, 255, 255, 0, 1, 0]


# --- special values, blocks and axes --------------------------------------------------------------


@pytest.mark.parametrize("scale_dtype", SCALES)
@each_dtype
def test_rows_with_special_values_have_the_documented_scales_and_codes(dtype, scale_dtype):
    if dtype == "int8" and scale_dtype != "float32":
        return
    y = np.float32([[0, 0], [np.nan, 1], [np.inf, 1], [-np.inf, -1], [1e-44, 0]])
    q, scale = reference.quantize(y, dtype=dtype, scale_dtype=scale_dtype)
    least = float(np.float32(LEAST[dtype])) if scale_dtype == "float32" else 2.0**-127
    infinite = math.inf if scale_dtype == "float32" else math.nan
    found = scale.astype(np.float64)[:, 0]
    np.testing.assert_array_equal(found, [least, math.nan, infinite, infinite, least])
    nan = np.uint8(0 if dtype == "int8" else 0x7F)
    codes = q.view(np.uint8)
    assert not codes[0].any()
    assert (codes[1] == nan).all()
    assert codes[2, 0] == codes[3, 0] == nan
    if scale_dtype == "float32":
        assert codes[2, 1] == 0 and q[3, 1] == 0
    else:
        assert (codes[2:4] == nan).all()


@each_dtype
def test_a_bound_clamps_the_largest_magnitude_and_no_nan(dtype):
    y = np.float32([[1, 8], [1, 2], [np.nan, 8], [np.inf, 1]])
    q, scale = reference.quantize(y, dtype=dtype, absmax_bound=4.0)
    a = np.float32([4, 2, np.nan, 4])[:, None]
    assert_same_bits(scale, a / np.float32(LARGEST[dtype]))
    assert q[0, 1] == q[3, 0] == LARGEST[dtype]


@pytest.mark.parametrize("block", [32, 64, 128, None])
@pytest.mark.parametrize("groups", [1, 3])
@each_dtype
def test_each_block_of_each_group_of_each_row_is_quantised_as_it_is_alone(dtype, groups, block):
    width, y = 164, np.random.default_rng(0).standard_normal((2, 3, 164 * groups))
    y = (y * np.exp2(np.arange(y.shape[-1]) % 7)).astype(np.float32)
    q, scale = reference.quantize(y, dtype=dtype, groups=groups, block=block)
    starts = [*range(0, width, block or width)]
    assert scale.shape == (2, 3, groups * len(starts))
    for row in np.ndindex(2, 3):
        for number, (group, start) in enumerate((g, s) for g in range(groups) for s in starts):
            end = min(start + (block or width), width)
            columns = slice(group * width + start, group * width + end)
            alone = reference.quantize(y[row][None, columns], dtype=dtype)
            assert_same_bits(q[row][columns], alone[0][0])
            assert scale[row][number] == alone[1][0, 0]


def test_a_row_of_several_axes_has_one_scale_with_axes_of_one():
    y = np.random.default_rng(0).standard_normal((4, 3, 5)).astype(np.float32)
    q, scale = reference.quantize(y, axis=-2)
    alone = reference.quantize(y.reshape(4, 15))
    assert scale.shape == (4, 1, 1)
    assert_same_bits(q.reshape(4, 15), alone[0])
    assert_same_bits(scale.reshape(4, 1), alone[1])


@pytest.mark.parametrize("block", [None, 32])
@each_dtype
def test_dequantised_numbers_are_within_half_a_step_of_y(dtype, block):
    y = np.random.default_rng(0).standard_normal((5, 100)).astype(np.float32)
    q, scale = reference.quantize(y, dtype=dtype, block=block)
    back = reference.dequantize(q, scale, block=block)
    a = scale.max() * LARGEST[dtype]
    half = {"int8": a / 127, "float8_e4m3fn": a / 8, "float8_e5m2": a / 4}[dtype] / 2
    assert np.abs(back - y).max() <= half * (1 + 2.0**-20)  # of rounded quotients and products
    per_row = np.repeat(scale, block, -1)[:, :100] if block else scale
    assert_same_bits(back, (q.astype(np.float32) * per_row).astype(np.float32))
