# SPDX-License-Identifier: MIT
"""Number formats, the spacing of their numbers, and comparisons with exact results."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
INFO = {name: ml_dtypes.finfo(name) for name in ("float16", "bfloat16", "float32", "float64")}


def ulp(values: Array, dtype: str) -> Array:
    """Return the spacing of `dtype` at each value, as if exponents had no upper limit.

    The values need not be numbers of `dtype`. The spacing is NaN if a value is not finite.
    """
    info, values = INFO[dtype], np.asarray(values, dtype=np.float64)
    exponent = np.frexp(values)[1] - 1  # 2**exponent <= |value| < 2**(exponent + 1)
    exponent = np.where(values == 0, info.minexp, np.maximum(exponent, info.minexp))
    return np.where(np.isfinite(values), np.ldexp(1.0, exponent - info.nmant), np.nan)


def unit(dtype: str) -> float:
    """Return u, the largest relative error of rounding to `dtype`."""
    return float(INFO[dtype].eps) / 2


def smallest_normal(dtype: str) -> float:
    return float(INFO[dtype].smallest_normal)


def narrows(dtype: str, compute: str) -> bool:
    """Return whether storing a number of type `compute` as `dtype` rounds the number."""
    return INFO[dtype].nmant < INFO[compute].nmant


def rounding(exact: Array, dtype: str, compute: str) -> Array:
    """Return the rounding of the store: half an ulp if `dtype` narrows `compute`, else 0."""
    return 0.5 * ulp(exact, dtype) if narrows(dtype, compute) else np.zeros(np.shape(exact))


def assert_within(actual: Array, expected: Array, bound: Array, name: str = "result") -> float:
    """Assert abs(actual - expected) <= bound, and return the worst error in units of the bound.

    NaN matches only NaN, and an infinity matches only itself. An exact value beyond the largest
    number of actual's dtype is expected to be stored as an infinity.
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
    index = np.unravel_index(np.argmax(units), units.shape)
    if units[index] > 1.0:
        raise AssertionError(
            f"{name}[{', '.join(map(str, index))}] is {got[index]!r}, expected {expected[index]!r}:"
            f" off by {error[index]:.3g}, {units[index]:.3g} times the bound; "
            f"{np.count_nonzero(units > 1.0)} of {units.size} elements ({actual.dtype}) are off"
        )
    return float(units[index])


def assert_same_numbers(actual: Array, expected: Array, name: str) -> float:
    """Assert that two arrays have the same dtype and equal elements, signs of zeros included."""
    assert actual.dtype == expected.dtype, f"{name} is {actual.dtype}, expected {expected.dtype}"
    worst = assert_within(actual, expected.astype(np.float64), np.zeros(expected.shape), name)
    signs = (np.signbit(actual) != np.signbit(expected)) & ~np.isnan(expected)
    assert not signs.any(), f"{name} has {np.count_nonzero(signs)} zeros of the wrong sign"
    return worst
