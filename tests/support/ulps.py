# SPDX-License-Identifier: MIT
"""Number formats, the spacing of their numbers, and comparing a result with the exact one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# name: bits of the significand (the leading one included), exponent of the smallest normal number
FORMATS = {
    "float16": (11, -14),
    "bfloat16": (8, -126),
    "float32": (24, -126),
    "float64": (53, -1022),
}


def ulp(values: Array, dtype: str) -> Array:
    """Return the spacing of `dtype` at each value, as if its exponents had no upper end.

    The values need not be numbers of `dtype`: it is the spacing of the binade they lie in, or that
    of the subnormal numbers. NaN for what is not finite.
    """
    digits, lowest = FORMATS[dtype]
    values = np.asarray(values, dtype=np.float64)
    exponent = np.frexp(values)[1] - 1  # of 2**exponent <= |value| < 2**(exponent + 1)
    exponent = np.where(values == 0, lowest, np.maximum(exponent, lowest))
    return np.where(np.isfinite(values), np.ldexp(1.0, exponent - (digits - 1)), np.nan)


def unit(dtype: str) -> float:
    """Return u: the most that rounding to `dtype` is off, as a part of what is rounded."""
    return float(0.5 * ulp(np.array(1.0), dtype))


def smallest_normal(dtype: str) -> float:
    """Return the number below which the numbers of `dtype` are subnormal, or may be flushed."""
    return math.ldexp(1.0, FORMATS[dtype][1])


def narrows(dtype: str, compute: str) -> bool:
    """Say whether storing as `dtype` what was computed as `compute` rounds it."""
    return FORMATS[dtype][0] < FORMATS[compute][0]


def rounding(exact: Array, dtype: str, compute: str) -> Array:
    """Return what the store may cost: half an ulp of the element, if it narrows `compute`."""
    return 0.5 * ulp(exact, dtype) if narrows(dtype, compute) else np.zeros(np.shape(exact))


def row_max(values: Array) -> Array:
    """Return the largest finite magnitude of each row, as [rows, 1]."""
    sizes = np.abs(values)
    return np.max(sizes, axis=-1, keepdims=True, where=np.isfinite(sizes), initial=0.0)


# --- comparing ------------------------------------------------------------------------------------


def assert_within(actual: Array, expected: Array, bound: Array, name: str = "result") -> float:
    """Assert abs(actual - expected) <= bound, and return the worst error in units of the bound.

    NaN matches NaN only, an infinity itself only. An exact value beyond the largest number of
    actual's dtype is expected to be stored as an infinity.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name} has shape {actual.shape}, expected {expected.shape}")
    if actual.size == 0:
        return 0.0
    with np.errstate(all="ignore"):
        stored = expected.astype(actual.dtype).astype(np.float64)
        expected = np.where(np.isinf(stored), stored, expected)
        got = actual.astype(np.float64)
        error = np.abs(got - expected)
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
        units = np.where(same, 0.0, error / bound)
        units = np.where(np.isnan(units), np.inf, units)
    place = np.unravel_index(np.argmax(units), units.shape)
    if units[place] > 1.0:
        raise AssertionError(
            f"{name}[{', '.join(str(int(i)) for i in place)}] is {got[place]!r}, expected "
            f"{expected[place]!r}: off by {error[place]:.3g}, {units[place]:.3g} times "
            f"the bound of {np.broadcast_to(bound, units.shape)[place]:.3g}; "
            f"{np.count_nonzero(units > 1.0)} of {units.size} elements ({actual.dtype}) are off"
        )
    return float(units[place])


def assert_same_numbers(actual: Array, expected: Array, name: str) -> float:
    """Assert that two arrays have one dtype and equal elements, signs of zeros included."""
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{name} is {actual.dtype}, expected {expected.dtype}")
    got, exact = actual.astype(np.float64), expected.astype(np.float64)
    worst = assert_within(got, exact, np.zeros(exact.shape), name)
    signs = (np.signbit(got) != np.signbit(exact)) & ~np.isnan(exact)
    if signs.any():
        raise AssertionError(f"{name} has {np.count_nonzero(signs)} zeros of the wrong sign")
    return worst
