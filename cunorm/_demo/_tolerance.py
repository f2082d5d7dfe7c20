# SPDX-License-Identifier: MIT
"""How far a result that was computed in float32 may be from the exact one.

The bounds are those of the tests, for finite input whose squares do not overflow: ulps of float32
for the computation, and half an ulp of a narrower dtype for the store. Beyond a width of 16384 the
sums are long enough to cost twice as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm import reference
from cunorm.results import AddNorm, NormForward, NormGrads

Array = NDArray[Any]
Bounds = dict[str, tuple[Array, Array]]  # the exact values and the bound, by field

# name: bits of the significand with the leading one, exponent of the smallest normal number
_FORMATS = {"float16": (11, -14), "bfloat16": (8, -126), "float32": (24, -126)}
_U = 2.0**-24


def forward_bounds(exact: NormForward, bias: Array | None, dtype: str) -> Bounds:
    """Return exact values and bounds for a forward of the oracle, on a matrix."""
    terms = exact.y if bias is None else np.maximum(abs(exact.y), abs(exact.y - bias))
    count = 4 * _wide(exact.y)
    bounds = {
        "y": (exact.y, count * _ulp(_row_max(terms)) + _store(exact.y, dtype)),
        "rstd": (exact.rstd, 2 * count * _U * exact.rstd),
    }
    if exact.mean is not None:
        bounds["mean"] = (exact.mean, _ulp(exact.mean) + count * _U / exact.rstd)
    if exact.residual is not None:  # rounded the same way, and nothing else
        stream = exact.residual.astype(np.float64)
        bounds["residual"] = (stream, np.zeros(stream.shape))
    return bounds


def backward_bounds(
    exact: NormGrads,
    dy: Array,
    x: Array,
    weight: Array | None,
    d_residual: Array | None,
    *,
    rstd: Array,
    c: float | None,
    center: bool,
    eps: float,
) -> Bounds:
    """Return exact values and bounds for a backward of the oracle, on a matrix; rstd is exact."""
    r = reference.normalize(x, center=center, eps=eps)
    dn = (1.0 if c is None else c / math.sqrt(x.shape[-1])) * dy.astype(np.float64)
    dr = dn if weight is None else dn * weight
    # dx is relative to the largest of the terms it is a sum of, as they may cancel.
    terms = np.maximum(abs(dr), abs(r * (r * dr).mean(axis=-1, keepdims=True)))
    if center:
        terms = np.maximum(terms, abs(dr.mean(axis=-1, keepdims=True)))
    terms = rstd[:, np.newaxis] * terms
    if d_residual is not None:
        terms = np.maximum(terms, abs(d_residual.astype(np.float64)))
    error = 8 * _wide(x) * _ulp(_row_max(terms))
    bound = error + _store(exact.dx, str(x.dtype))
    bounds = {"dx": (exact.dx, bound), "dresidual": (exact.dx, bound)}
    # dweight and dbias are relative to the sum over rows of |summand|; the correction of the mean
    # moves every r of a row, also where it is zero.
    if exact.dweight is not None:
        total = (abs(dn) * (abs(r) + (0.25 if center else 0.0))).sum(axis=0)
        bounds["dweight"] = (exact.dweight, 8 * _U * total + 0.5 * _ulp(exact.dweight))
    if exact.dbias is not None:
        total = abs(dy.astype(np.float64)).sum(axis=0)
        bounds["dbias"] = (exact.dbias, 8 * _U * total + 0.5 * _ulp(exact.dbias))
    return bounds


def worst_error(
    result: AddNorm | NormForward | NormGrads, bounds: Bounds, fields: Iterable[str]
) -> float:
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


def _ulp(values: Array, dtype: str = "float32") -> Array:
    """Return the spacing of a dtype's numbers at each value."""
    digits, lowest = _FORMATS[dtype]
    exponent = np.frexp(values)[1] - 1
    exponent = np.where(values == 0, lowest, np.maximum(exponent, lowest))
    return np.asarray(np.ldexp(1.0, exponent - (digits - 1)))


def _store(exact: Array, dtype: str) -> Array | float:
    return 0.0 if dtype == "float32" else 0.5 * _ulp(exact, dtype)


def _row_max(values: Array) -> Array:
    return np.asarray(np.max(abs(values), axis=-1, keepdims=True))


def _wide(rows: Array) -> int:
    return 2 if rows.shape[-1] > 16384 else 1
