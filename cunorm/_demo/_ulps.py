# SPDX-License-Identifier: MIT
"""Errors in units of their bounds, and the spacings of numbers that bounds are made of.

Below the smallest normal number of float32, `LOST`, all relative errors end: there a CPU rounds to
fewer digits, and CUDA to zero. So every input, sum and product may be off by `LOST`, and the
factors that follow enlarge that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.results import AddNorm, GroupNormForward, GroupNormGrads, NormForward, NormGrads

Array = NDArray[Any]
Bounds = dict[str, tuple[Array, Array]]  # the exact values and the bound, by field
Result = AddNorm | NormForward | NormGrads | GroupNormForward | GroupNormGrads

# name: bits of the significand with the leading one, exponent of the smallest normal number
_FORMATS = {"float16": (11, -14), "bfloat16": (8, -126), "float32": (24, -126)}
U = 2.0**-24  # half the spacing of float32 at 1
LOST = 2.0**-126


def worst_error(result: Result, bounds: Bounds, fields: Iterable[str]) -> float:
    """Return the largest error in fields of a result of NumPy arrays, in units of its bound.

    An exact value beyond the largest of its dtype is expected to be stored as an infinity.
    """
    worst = 0.0
    for name in fields:
        exact, bound = bounds[name]
        actual = getattr(result, name)
        if actual is None:
            return math.inf
        with np.errstate(all="ignore"):
            stored = exact.astype(actual.dtype).astype(np.float64)
            got = actual.astype(np.float64)
            expected = np.where(np.isinf(stored), stored, exact)
            same = (got == expected) | (np.isnan(got) & np.isnan(exact))
            units = np.where(same, 0.0, abs(got - expected) / bound)
        worst = max(worst, float(np.where(np.isnan(units), np.inf, units).max()))
    return worst


def ulp(values: Array, dtype: str = "float32") -> Array:
    """Return the spacing of a dtype's numbers at each value."""
    digits, lowest = _FORMATS[dtype]
    exponent = np.frexp(values)[1] - 1
    exponent = np.where(values == 0, lowest, np.maximum(exponent, lowest))
    return np.asarray(np.ldexp(1.0, exponent - (digits - 1)))


def stored(exact: Array, error: Array, dtype: str) -> Array:
    """Bound the error of a result that is off by `error` before it is stored in its dtype."""
    rounding = 0.0 if dtype == "float32" else 0.5 * ulp(abs(exact) + error, dtype)
    return np.asarray(error + rounding + LOST)


def row_max(values: Array) -> Array:
    """Return the largest magnitude of each row."""
    return np.asarray(np.max(abs(values), axis=-1, keepdims=True))


def wide(rows: Array) -> int:
    """Return how many times the ulps of an ordinary row are due."""
    return 2 if rows.shape[-1] > 16384 else 1


def mean(values: Array) -> Array:
    """Return the mean of each row."""
    return np.asarray(values.mean(axis=-1, keepdims=True))
