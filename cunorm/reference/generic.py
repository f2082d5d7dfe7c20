# SPDX-License-Identifier: MIT
"""The generic row norm, forward and backward, which all the named forms are cases of.

In the formulas d is the length of a row, k = c / sqrt(d), and mean() is over a row. Their source is
"Normalize with Residual or Gate", with eps added to the mean square.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cunorm.results import NormForward, NormGrads

Array = NDArray[Any]
Float64 = NDArray[np.float64]

OPERANDS = ("x", "weight", "bias")


@np.errstate(all="ignore")
def normalize_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: int = -1,
) -> NormForward:
    """Normalise each row, and return what the backward needs.

    ::

        s = x + residual                            rounded to the residual's dtype
        q = s - mean(s)      if center, else s
        rstd = 1 / sqrt(mean(q * q) + eps)
        r = q * rstd
        y = k * r * weight + bias

    The fields y, mean and rstd are float64. residual is None if neither residual nor
    residual_dtype is given.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> reference.normalize_forward(np.array([[3.0, -4.0]]), c=1, eps=0.0).y
    array([[ 0.6, -0.8]])
    """
    leading, row_shape = x.shape[:axis], x.shape[axis:]
    new_residual = _residual_stream(x, residual, residual_dtype)
    s = _as_rows(x if new_residual is None else new_residual, axis)

    mean, q = _center(s, s.mean(axis=-1, keepdims=True)) if center else (None, s)
    rstd = 1.0 / np.sqrt((q * q).mean(axis=-1, keepdims=True) + eps)
    r = q * rstd
    y = _k(c, row_shape) * r
    if weight is not None:
        y = y * _flat(weight)
    if bias is not None:
        y = y + _flat(bias)

    return NormForward(
        y=y.reshape(x.shape),
        residual=new_residual,
        mean=None if mean is None else mean.reshape(leading),
        rstd=rstd.reshape(leading),
    )


@np.errstate(all="ignore")
def normalize_backward(
    dy: Array,
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    rstd: Array,
    mean: Array | None = None,
    d_residual: Array | None = None,
    c: float | None = None,
    center: bool = False,
    axis: int = -1,
    needs: Collection[str] = OPERANDS,
) -> NormGrads:
    """Differentiate `normalize_forward`; exact with eps, which rstd contains.

    ::

        dbias   = sum over rows of dy
        dweight = sum over rows of dy * k * r
        dr = k * dy * weight
        dq = rstd * (dr - r * mean(r * dr))
        dx = dq - mean(dq)   if center, else dq;    plus d_residual

    x is what was normalised: the forward's residual where there is one. The mean may be rounded:
    x tells what it lacks. An operand in `needs` that is absent gives None, as does dgate.

    Examples
    --------
    >>> import numpy as np
    >>> from cunorm import reference
    >>> x, dy = np.array([[3.0, -4.0]]), np.array([[1.0, 0.0]])
    >>> rstd = reference.normalize_forward(x, c=1, eps=0.0).rstd
    >>> reference.normalize_backward(dy, x, rstd=rstd, c=1).dx.round(6)
    array([[0.128, 0.096]])
    """
    row_shape = x.shape[axis:]
    k = _k(c, row_shape)
    dn = _as_rows(dy, axis)
    q = _as_rows(x, axis)
    if center:
        if mean is None:
            raise ValueError("normalize_backward: mean is None, but center=True needs it")
        q = _center(q, _per_row(mean))[1]
    row_rstd = _per_row(rstd)
    r = q * row_rstd

    dx = dweight = dbias = None
    if bias is not None and "bias" in needs:
        dbias = _sum_over_rows(dn).reshape(row_shape)
    if weight is not None and "weight" in needs:
        dweight = _sum_over_rows(dn * (k * r)).reshape(row_shape)
    if "x" in needs:
        dr = k * dn if weight is None else k * dn * _flat(weight)
        dq = row_rstd * (dr - r * (r * dr).mean(axis=-1, keepdims=True))
        ds = dq - dq.mean(axis=-1, keepdims=True) if center else dq
        if d_residual is not None:
            ds = ds + _as_rows(d_residual, axis)
        dx = ds.reshape(x.shape)
    return NormGrads(dx=dx, dweight=dweight, dbias=dbias, dgate=None, dresidual=dx)


# --- what the formulas are made of ----------------------------------------------------------------


@np.errstate(all="ignore")
def round_to(values: Array, dtype: DTypeLike) -> Array:
    """Round float32 or float64 values to a storage dtype: once, to nearest, ties to even.

    `astype` does so but for one case: `ml_dtypes` goes from float64 to bfloat16 by way of float32
    and so rounds twice. Here the first of those two steps rounds to odd, which leaves no mark.
    """
    dtype = np.dtype(dtype)
    if dtype.name != "bfloat16" or values.dtype != np.float64:
        return values.astype(dtype)
    single = np.asarray(values.astype(np.float32))
    inexact = single != values
    bits = single.view(np.uint32)
    toward_zero = bits - (np.abs(single) > np.abs(values)).astype(np.uint32)
    return np.where(inexact, toward_zero | 1, bits).view(np.float32).astype(dtype)


def _residual_stream(
    x: Array, residual: Array | None, residual_dtype: DTypeLike | None
) -> Array | None:
    if residual is None:
        return None if residual_dtype is None else round_to(x.astype(np.float64), residual_dtype)
    compute = np.float64 if np.float64 in (x.dtype, residual.dtype) else np.float32
    return round_to(x.astype(compute) + residual.astype(compute), residual.dtype)


def _as_rows(x: Array, axis: int) -> Float64:
    """Copy x into a [rows, d] matrix, contiguous so that NumPy sums its rows pairwise."""
    return x.astype(np.float64, order="C").reshape(-1, math.prod(x.shape[axis:]))


def _per_row(statistic: Array) -> Float64:
    return statistic.astype(np.float64).reshape(-1, 1)


def _flat(parameter: Array) -> Float64:
    return parameter.astype(np.float64).reshape(-1)


def _k(c: float | None, row_shape: tuple[int, ...]) -> float:
    return 1.0 if c is None else c / math.sqrt(math.prod(row_shape))


def _center(s: Float64, mean: Float64) -> tuple[Float64, Float64]:
    """Correct a rounded mean by the mean of what it leaves; return it, and the rows about it."""
    t = s - mean
    correction = t.mean(axis=-1, keepdims=True)
    return mean + correction, t - correction


def _sum_over_rows(terms: Float64) -> Float64:
    """Sum over the rows; transposed, as NumPy sums pairwise along a contiguous axis only."""
    return np.asarray(np.ascontiguousarray(terms.T).sum(axis=-1))
