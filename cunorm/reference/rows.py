# SPDX-License-Identifier: MIT
"""The steps of the row norms: rounding, the residual stream, copies as rows, sums."""

from __future__ import annotations  # keeps the names of type aliases in help()

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cunorm.reference.axes import Axis, width

Array = NDArray[Any]
Float64 = NDArray[np.float64]


@np.errstate(all="ignore")
def round_to(values: Array, dtype: DTypeLike) -> Array:
    """Round float32 or float64 values to a storage dtype: once, to nearest, ties to even.

    `astype` does so, except that `ml_dtypes` rounds float64 to float32 and then to its own types.
    Here the first of these steps rounds to odd, so that the second one rounds `values` correctly.
    """
    dtype = np.dtype(dtype)
    if dtype.name in ("float16", "float32", "float64") or values.dtype != np.float64:
        return values.astype(dtype)
    single = np.asarray(values.astype(np.float32))
    inexact = single != values
    bits = single.view(np.uint32)
    toward_zero = bits - (np.abs(single) > np.abs(values)).astype(np.uint32)
    return np.where(inexact, toward_zero | 1, bits).view(np.float32).astype(dtype)


def residual_stream(
    x: Array,
    residual: Array | None,
    residual_dtype: DTypeLike | None,
    factor: Float64 | None = None,
) -> Array | None:
    """Return x + residual in residual_dtype or residual's dtype, or None if both are absent.

    With a factor of x, x * factor replaces x, and without residual and residual_dtype the stream
    has x's dtype. The product and the sum are computed in float64.
    """
    if factor is not None:
        s, dtype = x.astype(np.float64) * factor, x.dtype
        if residual is not None:
            s, dtype = s + residual.astype(np.float64), residual.dtype
        return round_to(s, dtype if residual_dtype is None else residual_dtype)
    if residual is None:
        return None if residual_dtype is None else round_to(x.astype(np.float64), residual_dtype)
    dtype = np.dtype(residual.dtype if residual_dtype is None else residual_dtype)
    compute = np.float64 if np.float64 in (x.dtype, dtype) else np.float32
    return round_to(x.astype(compute) + residual.astype(compute), dtype)


def as_float64(operand: Array) -> Float64:
    """Copy an operand to a contiguous array."""
    return operand.astype(np.float64, order="C")


def as_rows(x: Float64, axis: Axis, groups: int) -> Float64:
    """View a contiguous x as [rows, groups, d], of which NumPy sums the last axis pairwise."""
    d = width(x.shape, axis) // groups
    return x.reshape(-1, groups, d)


def per_row(statistic: Array, groups: int) -> Float64:
    """Return a statistic as [rows, groups, 1]."""
    return statistic.astype(np.float64).reshape(-1, groups, 1)


def centered(p: Float64, mean: Float64) -> tuple[Float64, Float64]:
    """Correct a rounded mean by the mean of p - mean; return the new mean, and p - new mean."""
    t = p - mean
    correction = t.mean(axis=-1, keepdims=True)
    return mean + correction, t - correction


def less_mean(p: Float64, mean: Array | None, correction: Array | None) -> Float64:
    """Return p less the mean of its rows and groups, which is given as a sum of two numbers."""
    for one in (mean, correction):
        if one is not None:
            p = p - per_row(one, p.shape[1])
    return p


def sum_to(terms: Float64, shape: tuple[int, ...]) -> Float64:
    """Sum over the axes that broadcasting `shape` to the terms' shape repeats.

    They become one contiguous axis, because NumPy sums no other axis pairwise.
    """
    same = (1,) * (terms.ndim - len(shape)) + shape
    repeated = [axis for axis, size in enumerate(same) if size == 1]
    count = math.prod(terms.shape[axis] for axis in repeated)
    columns = np.ascontiguousarray(np.moveaxis(terms, repeated, range(-len(repeated), 0)))
    return np.asarray(columns.reshape(*shape, count).sum(axis=-1))


@np.errstate(over="ignore", invalid="ignore")
def store(arrays: Mapping[str, Array | None], results: Any, added: Collection[str] = ()) -> None:
    """Write each result, rounded once, to the array of its name; add those in `added`."""
    for name, array in arrays.items():
        if array is not None:
            exact = getattr(results, name)
            array[...] = round_to(array + exact if name in added else exact, array.dtype)
