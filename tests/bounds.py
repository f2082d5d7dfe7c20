# SPDX-License-Identifier: MIT
"""How far a result may be from the exact one, and why; the one place that says so.

Bounds are absolute and per element, as float64 arrays. "ulp" is the spacing of a format's numbers.
What is stored in a narrower type than it was computed in has been rounded once more, on the store:
half an ulp of the element in the storage dtype, besides the error of the computation. What is
stored in the compute type has its last rounding counted in the error of the computation.

The error of a computation in float32 is counted in ulps of float32. One in float64 has the same
counts in ulps of float64, twice: once for the kernel and once for the oracle, which is float64 too
and held to the same counts (see `test_reference_is_exact_to_its_own_ulps`).

Bounds are for inputs whose squares neither overflow nor vanish in the compute type, and do not
allow for flush-to-zero of subnormals.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm import reference

Array = NDArray[Any]

# name: bits of the significand (the leading one included), exponent of the smallest normal number
FORMATS = {
    "float16": (11, -14),
    "bfloat16": (8, -126),
    "float32": (24, -126),
    "float64": (53, -1022),
}
WIDE = 16384  # beyond this width, sums are long enough to cost twice the ulps


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


def rounding(exact: Array, dtype: str, compute: str) -> Array:
    """Return what the store may cost: half an ulp of the element, if it narrows `compute`."""
    if FORMATS[dtype][0] >= FORMATS[compute][0]:
        return np.zeros(np.shape(exact))
    return 0.5 * ulp(exact, dtype)


def y_bound(y: Array, dtype: str, compute: str = "float32", *, terms: Array | None = None) -> Array:
    """Bound the error of y, of shape [rows, width]: 4 ulp of the row's largest; 8 for wide rows.

    rstd = 1/sqrt(mean(q * q) + eps) carries the sums' rounding: an ulp or two, as 64 lanes or more
    share the sum and the root halves the error of what is under it. The mean, corrected, is off by
    less than an ulp of the deviation. q, the products with rstd, k and weight, and the sum with
    bias round once each. Arithmetic done well stays below 4 ulp in a thousand rows of any width up
    to 16384. It is no bound for any number of rows: the worst of 400,000 narrow ones is 4.8.

    Errors are relative to what is added up, so `terms`, the size of k * r * weight, counts with y.
    Where bias cancels nearly all of a narrow row, arithmetic done well is 17 ulp of max(abs(y)) off
    at width 2, and 200 at width 1. In wide rows it makes no difference.
    """
    scale = row_max(y if terms is None else np.maximum(np.abs(y), np.abs(terms)))
    count = _count(4, compute, y.shape[-1])
    return count * ulp(scale, compute) + rounding(y, dtype, compute)


def dx_bound(dx: Array, terms: Array, dtype: str, compute: str = "float32") -> Array:
    """Bound the error of dx, of shape [rows, width]: 8 ulp of the largest term; 16 for wide rows.

    dx = rstd * (dr - r * mean(r * dr) - mean(dr)) + d_residual is a sum of terms that may cancel
    entirely (without eps it does at width 1), so the error is relative to the row's largest term,
    see `dx_terms`. 8 where y has 4: rstd, with y's error, comes in three times, and so do sums.
    """
    count = _count(8, compute, dx.shape[-1])
    return count * ulp(row_max(terms), compute) + rounding(dx, dtype, compute)


def param_grad_bound(exact: Array, magnitude: Array, dtype: str, compute: str = "float32") -> Array:
    """Bound the error of dweight or dbias: 8 u times `magnitude`, the sum over rows of |summand|.

    u is half the spacing of `compute` at 1. Each summand dy * k * r has r's error of a few u; the
    sum over rows, in parts of bounded length, adds about as much. No sign is sure, so the sum of
    absolute values is the measure, and the one rounding to the parameter's dtype comes on top.
    """
    u = 0.5 * ulp(np.array(1.0), compute)
    return _count(8, compute) * u * magnitude + 0.5 * ulp(exact, dtype)


def rstd_bound(rstd: Array, compute: str = "float32", *, width: int) -> Array:
    """Bound the error of rstd: relatively, 4 ulp of 1 (8 for wide rows).

    Every y of a row has rstd's relative error. So it may have what y's own bound leaves it, and no
    more can be asked of it than of y: the same count, and relative, as rstd's place in its binade
    says nothing about y's.
    """
    return _count(4, compute, width) * ulp(np.array(1.0), compute) * rstd


def mean_bound(mean: Array, rstd: Array, compute: str = "float32", *, width: int) -> Array:
    """Bound the error of mean: one ulp of it, and 4 u of the deviation (8 for wide rows).

    It is returned rounded once, which is half an ulp. Before that it is a shift plus a correction,
    the mean of what the shift leaves: numbers of the size of the deviation, which is at most
    1/rstd, so that the correction's error is a share of u/rstd (1 u of it was seen). An error in
    the mean moves r by rstd times as much: 4 u of it are half of what y may err.
    """
    u = 0.5 * ulp(np.array(1.0), compute)
    return ulp(mean, compute) + _count(4, compute, width) * u / rstd


def dx_terms(
    dr: Array, r: Array, rstd: Array, d_residual: Array | None = None, *, center: bool
) -> Array:
    """Return the size of the largest term of each element of dx, all as [rows, width]."""
    largest = np.maximum(np.abs(dr), np.abs(r * (r * dr).mean(axis=-1, keepdims=True)))
    if center:
        largest = np.maximum(largest, np.abs(dr.mean(axis=-1, keepdims=True)))
    terms = rstd * largest
    return terms if d_residual is None else np.maximum(terms, np.abs(d_residual))


def row_max(values: Array) -> Array:
    """Return the largest finite magnitude of each row, as [rows, 1]."""
    sizes = np.abs(values)
    return np.max(sizes, axis=-1, keepdims=True, where=np.isfinite(sizes), initial=0.0)


def _count(base: int, compute: str, width: int = 1) -> int:
    return base * (2 if width > WIDE else 1) * (2 if compute == "float64" else 1)


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


def check_forward(
    result: Any,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    residual: Array | None = None,
    *,
    residual_dtype: Any = None,
    c: float | None = None,
    center: bool = False,
    eps: float,
    axis: int = -1,
) -> dict[str, float]:
    """Hold a NormForward of NumPy arrays to the oracle; a field that is None is not looked at.

    For `l2_norm`, give c=1 and eps/d. Returns each field's worst error in units of its bound.
    """
    exact = reference.normalize_forward(
        x,
        weight,
        bias,
        residual=residual,
        residual_dtype=residual_dtype,
        c=c,
        center=center,
        eps=eps,
        axis=axis,
    )
    _assert_fields(result, exact)
    compute = _compute_type(x, residual, exact.residual)
    width = math.prod(x.shape[axis:])
    worst = {}
    if result.y is not None:
        y = _rows(exact.y, axis)
        terms = None if bias is None else y - bias.reshape(-1).astype(np.float64)
        bound = y_bound(y, str(result.y.dtype), compute, terms=terms)
        worst["y"] = assert_within(result.y, exact.y, bound.reshape(x.shape), "y")
    if result.residual is not None:
        worst["residual"] = assert_same_numbers(result.residual, exact.residual, "residual")
    if result.mean is not None:
        bound = mean_bound(exact.mean, exact.rstd, compute, width=width)
        worst["mean"] = assert_within(result.mean, exact.mean, bound, "mean")
    if result.rstd is not None:
        bound = rstd_bound(exact.rstd, compute, width=width)
        worst["rstd"] = assert_within(result.rstd, exact.rstd, bound, "rstd")
    return worst


def check_backward(
    grads: Any,
    dy: Array,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    d_residual: Array | None = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float,
    axis: int = -1,
) -> dict[str, float]:
    """Hold a NormGrads of NumPy arrays to the oracle; a field that is None is not looked at.

    x is what was normalised: the forward's residual where there is one. The exact statistics are
    computed from it, whatever the kernel was given. For `l2_norm`, give c=1 and eps/d. Returns each
    field's worst error in units of its bound.
    """
    statistics = reference.normalize_forward(x, center=center, eps=eps, axis=axis)
    mean, rstd = statistics.mean, statistics.rstd
    exact = reference.normalize_backward(
        dy,
        x,
        weight,
        bias,
        rstd=rstd,
        mean=mean,
        d_residual=d_residual,
        c=c,
        center=center,
        axis=axis,
    )
    _assert_fields(grads, exact)
    compute = _compute_type(x)
    k = 1.0 if c is None else c / math.sqrt(math.prod(x.shape[axis:]))
    r = _rows(reference.normalize(x, center=center, eps=eps, axis=axis), axis)
    dn = _rows(dy, axis)
    dr = k * dn if weight is None else k * dn * weight.reshape(-1).astype(np.float64)
    stream = None if d_residual is None else _rows(d_residual, axis)
    terms = dx_terms(dr, r, rstd.reshape(-1, 1), stream, center=center)
    magnitudes = {
        # r = (t - correction) * rstd is off by its own rounding, and by the correction's, which
        # is up to 2 u whatever r is: a quarter of the 8 u that |summand| gets.
        "dweight": np.abs(dn * k) * (np.abs(r) + (0.25 if center else 0.0)),
        "dbias": np.abs(dn),
    }
    worst = {}
    for name in ("dx", "dresidual"):
        actual = getattr(grads, name)
        if actual is not None:
            bound = dx_bound(_rows(exact.dx, axis), terms, str(actual.dtype), compute)
            worst[name] = assert_within(actual, exact.dx, bound.reshape(x.shape), name)
    for name, magnitude in magnitudes.items():
        actual, expected = getattr(grads, name), getattr(exact, name)
        if actual is not None:
            total = magnitude.sum(axis=0).reshape(expected.shape)
            bound = param_grad_bound(expected, total, str(actual.dtype), compute)
            worst[name] = assert_within(actual, expected, bound, name)
    return worst


def _assert_fields(result: Any, exact: Any) -> None:
    for name in result._fields:
        if getattr(result, name) is not None and getattr(exact, name) is None:
            raise AssertionError(f"{name} does not apply here, and should be None")


def _compute_type(*operands: Array | None) -> str:
    """Return the type of statistics, sums and arithmetic: float64 if x or the stream is."""
    given = [str(operand.dtype) for operand in operands if operand is not None]
    return "float64" if "float64" in given else "float32"


def _rows(x: Array, axis: int) -> Array:
    rows, width = math.prod(x.shape[:axis]), math.prod(x.shape[axis:])
    return x.reshape(rows, width).astype(np.float64)
