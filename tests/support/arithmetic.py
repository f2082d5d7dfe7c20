# SPDX-License-Identifier: MIT
"""Norms in NumPy as a kernel computes them: done well, or wrong in a way that has a name.

Everything is in the compute type, with one rounding on the store. It is what the bounds must leave
room for, and what is `wrong` they must not.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cunorm.reference import round_to
from cunorm.results import GroupNormForward, GroupNormGrads, NormForward, NormGrads
from tests.support.error_bounds import Array
from tests.support.group_bounds import as_rows, like, per_element
from tests.support.row_errors import Options

# --- activations ----------------------------------------------------------------------------------


def erfc(values: Array) -> Array:
    return np.vectorize(math.erfc, otypes=[np.float64])(values).astype(values.dtype)


@np.errstate(under="ignore", over="ignore")
def activate(z: Array, activation: str | None, wrong: str = "") -> tuple[Array, Array]:
    """Return g(z) and g'(z), every step rounded to z's dtype."""
    one, b = z.dtype.type, np.clip(z, -64, 64)  # b: beyond, all tails are 0, but powers overflow
    if activation in (None, "identity"):
        return z, np.ones_like(z)
    if activation == "relu":
        return np.maximum(z, 0), (z >= 0 if wrong == "relu' is 1 at 0" else z > 0).astype(one)
    if activation == "tanh":
        g, e = np.tanh(z), np.exp(-2 * np.abs(z))
        return g, 1 - g * g if wrong == "tanh' is 1 - tanh**2" else 4 * e / ((1 + e) * (1 + e))
    if activation == "gelu":
        cdf = erfc(z * -one(math.sqrt(0.5))) / 2
        if wrong == "gelu is from 1 + erf":
            cdf = (2 - erfc(z * one(math.sqrt(0.5)))) / 2
        density = np.exp(-b * b / 2) * one(1 / math.sqrt(2 * math.pi))
        return z * cdf, cdf if wrong == "g' lacks a term" else cdf + z * density
    a, slope = z, one(1)
    if activation == "gelu_tanh":
        root = one(math.sqrt(8 / math.pi))
        cubic = one(0 if wrong == "gelu_tanh lacks its cube" else 0.044715) * root
        a, slope = b * (root + cubic * (b * b)), root + 3 * cubic * (b * b)
    e = np.exp(-np.abs(a))
    larger, smaller = 1 / (1 + e), e / (1 + e)
    s, rest = np.where(a < 0, smaller, larger), np.where(a < 0, larger, smaller)
    if wrong == "1 - s is a difference":
        rest = 1 - s
    if activation == "sigmoid":
        return s, s * rest
    return z * s, s if wrong == "g' lacks a term" else s + z * (s * rest * slope)


# --- what all norms have in common: rows are the last axis ----------------------------------------


def mean_of(values: Array) -> Array:
    return values.mean(axis=-1, keepdims=True, dtype=values.dtype)


def statistics(p: Array, eps: float, center: bool, wrong: str) -> tuple[Array, Array, Array]:
    """Return the mean, what is about it, and rstd."""
    shift, q, square = np.zeros_like(p[..., :1]), p, mean_of(p * p)
    if center:
        shift = mean_of(p)
        t = p - shift
        correction = mean_of(t)
        q, square = t - correction, mean_of(t * t) - correction**2
        if wrong == "mean is not corrected":
            q, square = t, mean_of(t * t)
        if wrong == "variance is E[x*x] - E[x]**2":
            square = np.maximum(mean_of(p * p) - shift**2, 0)
        if wrong == "variance divides by d - 1":
            square = square * p.dtype.type(p.shape[-1] / (p.shape[-1] - 1))
        shift = shift + correction
    rstd = 1 / np.sqrt(square + p.dtype.type(eps))
    if wrong == "rstd has half its bits":
        rstd = rstd.astype(np.float16).astype(p.dtype)
    return shift, q, rstd


def gradient(dr: Array, r: Array, rstd: Array, center: bool, wrong: str) -> Array:
    slope, shift = mean_of(r * dr), mean_of(dr)
    slope = 0 * slope if wrong == "no mean(r * dr)" else slope
    has_shift = center and wrong != "no mean(dr)"
    return rstd * (dr - r * slope - (shift if has_shift else 0))


def stored(values: Array, dtype: Any, wrong: str) -> Array:
    if wrong == "rounded twice":
        values = values.astype(np.float16)
    if wrong == "cut off instead of rounded":
        values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return round_to(values, dtype)


def summed(terms: Array, parameter: Array | None, wrong: str) -> Array | None:
    """Add up terms, of shape [anything, size of the parameter]."""
    if parameter is None:
        return None
    if wrong == "a sum misses a term":
        terms = terms[1:]
    if wrong == "sums are kept in the parameter's dtype":
        return np.add.accumulate(terms.astype(parameter.dtype), axis=0)[-1]
    return stored(np.ascontiguousarray(terms.T).sum(axis=1), parameter.dtype, wrong)


# --- row norms ------------------------------------------------------------------------------------


class RowNorm:
    """Operands of a row norm as [rows, groups, d], in the compute type."""

    def __init__(self, x: Array, dtypes: tuple[Any, ...], wrong: str, options: Options) -> None:
        self.one = np.float64 if np.float64 in dtypes else np.float32
        self.wrong, self.options = wrong, options
        d = x.shape[-1] // options.groups
        self.k = self.one(1 if options.c is None else options.c / math.sqrt(d))
        g = slope = self.one(1)
        if options.gate is not None:
            name = {"swish": "silu"}.get(options.gate_activation, options.gate_activation)
            g, slope = activate(self.rows(options.gate), name, wrong)
        self.g, self.slope, is_pre = g, slope, options.gate_position == "pre"
        self.before, self.after = (g, self.one(1)) if is_pre else (self.one(1), g)

    def rows(self, x: Array) -> Array:
        return x.astype(self.one).reshape(len(x), self.options.groups, -1)

    def weight(self, weight: Array | None) -> Array:
        if weight is None:
            return self.one(1)
        w = weight.astype(self.one).reshape(self.options.groups, -1)
        return w + self.one(self.options.weight_offset)

    def rounded(self, kr: Array, dtype: Any) -> Array:
        return round_to(kr, dtype).astype(self.one) if self.options.round_before_weight else kr

    def affine(self, kr: Array, weight: Array | None, bias: Array | None) -> Array:
        n = kr * self.weight(weight)
        return n if bias is None else n + bias.astype(self.one).reshape(self.options.groups, -1)

    def statistic(self, values: Array) -> Array:
        return values[..., 0] if self.options.groups > 1 else values[:, 0, 0]


def forward(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    residual: Array | None = None,
    *,
    wrong: str = "",
    **told: Any,
) -> NormForward:
    options = Options(**told)
    a = RowNorm(x, (x.dtype, getattr(residual, "dtype", None)), wrong, options)
    stream, s = None, x.astype(a.one)
    if residual is not None:
        total = s + residual.astype(a.one)
        stream = round_to(total, residual.dtype)
        s = total if wrong == "norm reads the unrounded sum" else stream.astype(a.one)
    mean, q, rstd = statistics(a.rows(s) * a.before, options.eps, options.center, wrong)
    n = a.affine(a.rounded(a.k * (q * rstd), x.dtype), weight, bias)
    y = stored((n * a.after).reshape(x.shape), x.dtype, wrong)
    return NormForward(y, stream, a.statistic(mean) if options.center else None, a.statistic(rstd))


def backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    d_residual: Array | None = None,
    *,
    x_dtype: Any = None,
    wrong: str = "",
    **told: Any,
) -> NormGrads:
    options, x_dtype = Options(**told), x.dtype if x_dtype is None else x_dtype
    a = RowNorm(x, (x.dtype,), wrong, options)
    dy, s, width = a.rows(dy), a.rows(x), x.shape[-1]
    mean, q, rstd = statistics(s * a.before, options.eps, options.center, wrong)
    if options.center:  # what remains is corrected as the kernels do it, from the rounded mean
        q = s * a.before - mean
        q = q if wrong == "mean is not corrected" else q - mean_of(q)
    r = q * rstd
    kr = a.rounded(a.k * r, x_dtype)
    dn = dy if wrong == "dn is not gated" else dy * a.after
    dp = gradient(a.k * dn * a.weight(weight), r, rstd, options.center, wrong)
    ds = dp * a.before
    if d_residual is not None:
        above = a.rows(d_residual)
        ds = (dp + above) * a.before if wrong == "d_residual is gated" else ds + above
    ds, dgate = ds.reshape(x.shape), None
    if options.gate is not None:
        n = a.affine(kr, weight, bias) * (a.after if wrong == "dgate has y for n" else 1)
        dgate = a.slope * (dp * s if options.gate_position == "pre" else dy * n)
        dgate = stored(dgate.reshape(x.shape), options.gate.dtype, wrong)
    dn = dy if wrong == "sums are not gated" else dn
    kr = r if wrong == "dweight without k" else kr
    return NormGrads(
        dx=stored(ds, x_dtype, wrong),
        dweight=summed((dn * kr).reshape(-1, width), weight, wrong),
        dbias=summed(dn.reshape(-1, width), bias, wrong),
        dgate=dgate,
        dresidual=stored(ds, x.dtype, wrong),
    )


# --- group norms: rows are groups, [N, G, D * R] --------------------------------------------------


def group_forward(
    x: Array,
    num_groups: int,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    activation: str | None = None,
    channel_axis: int = -1,
    wrong: str = "",
) -> GroupNormForward:
    rows, w, b = _groups(x, num_groups, weight, bias, channel_axis)
    mean, q, rstd = statistics(rows, eps, True, wrong)
    n = q * rstd * w + b
    if wrong == "n is rounded before phi":
        n = round_to(n, x.dtype).astype(rows.dtype)
    y = like(x, activate(n, activation, wrong)[0], channel_axis)
    return GroupNormForward(stored(y, x.dtype, wrong), mean[..., 0], rstd[..., 0])


def group_backward(
    dy: Array,
    x: Array,
    num_groups: int,
    weight: Array | None,
    bias: Array | None,
    *,
    mean: Array,
    rstd: Array,
    activation: str | None = None,
    channel_axis: int = -1,
    wrong: str = "",
) -> GroupNormGrads:
    """Take mean and rstd as the forward stored them, and correct the mean as the kernels do."""
    rows, w, b = _groups(x, num_groups, weight, bias, channel_axis)
    dy = as_rows(dy, num_groups, channel_axis).astype(rows.dtype)
    mean, rstd = mean[..., None], rstd[..., None]
    t = rows - mean
    delta = mean_of(t) * (wrong != "mean is not corrected")
    off = np.spacing(mean) * (wrong == "phi' has the mean off by an ulp")
    n = (t - off) * rstd * w + b  # before delta is known
    if wrong == "phi' is that of y":
        n = activate(n, activation)[0]
    h, xhat = dy * activate(n, activation, wrong)[1], (t - delta) * rstd
    dx = gradient(w * h, xhat, rstd, True, wrong)
    channels = x.shape[channel_axis]

    def terms(values: Array) -> Array:
        values = np.ascontiguousarray(values).reshape(len(x), channels, -1)
        return np.moveaxis(values, 1, -1).reshape(-1, channels)

    of_weight = h * xhat
    if wrong == "sums are about 0":
        of_weight = h * (rows * rstd) - h * (mean * rstd)
    return GroupNormGrads(
        dx=stored(like(x, dx, channel_axis), x.dtype, wrong),
        dweight=summed(terms(of_weight), weight, wrong),
        dbias=summed(terms(h), bias, wrong),
    )


def _groups(x: Array, num_groups: int, weight: Any, bias: Any, channel_axis: int) -> list[Array]:
    one = np.float64 if x.dtype == np.float64 else np.float32
    rows = as_rows(x, num_groups, channel_axis)
    w, b = (per_element(values, num_groups, rows.shape[-1]) for values in (weight, bias))
    w, b = 1.0 if weight is None else w, 0.0 if bias is None else b
    return [np.asarray(values, one) for values in (rows, w, b)]
