# SPDX-License-Identifier: MIT
"""How far the results of a norm without a gate may be from the exact ones, and why.

`row_errors` says what a gate, or a rounding before weight, adds to this.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.ulps import rounding, row_max, ulp, unit

Array = NDArray[Any]

WIDE = 16384  # beyond this width, sums are long enough to cost twice the ulps


def y_bound(y: Array, dtype: str, compute: str = "float32", *, terms: Array | None = None) -> Array:
    """Bound the error of y, of shape [rows, width]: 4 ulp of the row's largest; 8 for wide rows.

    rstd = 1/sqrt(mean(q * q) + eps) carries the sums' rounding: an ulp or two, as 64 lanes or more
    share the sum and the root halves the error of what is under it. The mean, corrected, is off by
    less than an ulp of the deviation. q, the products with rstd, k and weight, and the sum with
    bias round once each. Arithmetic done well stays below 4 ulp in a thousand rows of any width up
    to 16384, and came to 3.9 in the worst of 3 million rows of 2 to 32 elements.

    Errors are relative to what is added up, so `terms`, the size of k * r * weight, counts with y.
    Where bias cancels nearly all of a narrow row, arithmetic done well is 17 ulp of max(abs(y)) off
    at width 2, and 200 at width 1. In wide rows it makes no difference.
    """
    return n_bound(y, y if terms is None else terms, compute) + rounding(y, dtype, compute)


def n_bound(n: Array, terms: Array, compute: str) -> Array:
    """Bound what `y_bound` does without the store: the error of n, of each row, as [rows, 1]."""
    scale = row_max(np.maximum(np.abs(n), np.abs(terms)))
    return count(4, compute, n.shape[-1]) * ulp(scale, compute)


def dx_bound(dx: Array, terms: Array, dtype: str, compute: str = "float32") -> Array:
    """Bound the error of dx, of shape [rows, width]: 8 ulp of the largest term; 16 for wide rows.

    dx = rstd * (dr - r * mean(r * dr) - mean(dr)) + d_residual is a sum of terms that may cancel
    entirely (without eps it does at width 1), so the error is relative to the row's largest term,
    see `dx_terms`. 8 where y has 4: rstd, with y's error, comes in three times, and so do sums.
    """
    return dp_bound(terms, compute) + rounding(dx, dtype, compute)


def dp_bound(terms: Array, compute: str) -> Array:
    """Bound what `dx_bound` does without the store, of each row, as [rows, 1]."""
    return count(8, compute, terms.shape[-1]) * ulp(row_max(terms), compute)


def param_grad_bound(exact: Array, magnitude: Array, dtype: str, compute: str = "float32") -> Array:
    """Bound the error of dweight or dbias: 8 u times `magnitude`, the sum over rows of |summand|.

    u is half the spacing of `compute` at 1. Each summand dy * k * r has r's error of a few u; the
    sum over rows, in parts of bounded length, adds about as much. No sign is sure, so the sum of
    absolute values is the measure, and the one rounding to the parameter's dtype comes on top.
    """
    return count(8, compute) * unit(compute) * magnitude + 0.5 * ulp(exact, dtype)


def rstd_bound(rstd: Array, compute: str = "float32", *, width: int) -> Array:
    """Bound the error of rstd: relatively, 4 ulp of 1 (8 for wide rows).

    Every y of a row has rstd's relative error. So it may have what y's own bound leaves it, and no
    more can be asked of it than of y: the same count, and relative, as rstd's place in its binade
    says nothing about y's.
    """
    return count(4, compute, width) * 2 * unit(compute) * rstd


def mean_bound(mean: Array, rstd: Array, compute: str = "float32", *, width: int) -> Array:
    """Bound the error of mean: one ulp of it, and 4 u of the deviation (8 for wide rows).

    It is returned rounded once, which is half an ulp. Before that it is a shift plus a correction,
    the mean of what the shift leaves: numbers of the size of the deviation, which is at most
    1/rstd, so that the correction's error is a share of u/rstd (1 u of it was seen). An error in
    the mean moves r by rstd times as much: 4 u of it are half of what y may err.
    """
    return ulp(mean, compute) + count(4, compute, width) * unit(compute) / rstd


def dx_terms(
    dr: Array, r: Array, rstd: Array, d_residual: Array | None = None, *, center: bool
) -> Array:
    """Return the size of the largest term of each element of dx, all as [rows, width]."""
    largest = np.maximum(np.abs(dr), np.abs(r * (r * dr).mean(axis=-1, keepdims=True)))
    if center:
        largest = np.maximum(largest, np.abs(dr.mean(axis=-1, keepdims=True)))
    terms = rstd * largest
    return terms if d_residual is None else np.maximum(terms, np.abs(d_residual))


def count(base: int, compute: str, width: int = 1) -> int:
    """Return how many ulps stand for `base` ulps of float32 in a row of ordinary width."""
    return base * (2 if width > WIDE else 1) * (2 if compute == "float64" else 1)
