# SPDX-License-Identifier: MIT
"""Norms in NumPy as a kernel computes them: done well, or wrong in a way that has a name.

Everything is in the compute type, with one rounding on the store. It is what the bounds must leave
room for, and what is `wrong` they must not.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm.reference import round_to
from cunorm.results import NormForward, NormGrads
from tests.support.row_errors import Options

Array = NDArray[Any]


# --- the gate -------------------------------------------------------------------------------------


def erfc(values: Array) -> Array:
    return np.vectorize(math.erfc, otypes=[np.float64])(values).astype(values.dtype)


@np.errstate(under="ignore", over="ignore")
def activate(z: Array, activation: str, wrong: str = "") -> tuple[Array, Array]:
    """Return g(z) and g'(z), every step rounded to z's dtype."""
    one, b = z.dtype.type, np.clip(z, -64, 64)  # b: beyond, all tails are 0, but powers overflow
    if activation == "identity":
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


# --- rows -----------------------------------------------------------------------------------------


class Arithmetic:
    """What forward and backward have in common: operands as [rows, groups, d], statistics, n."""

    def __init__(self, x: Array, dtypes: tuple[Any, ...], wrong: str, options: Options) -> None:
        self.one = np.float64 if np.float64 in dtypes else np.float32
        self.shape, self.groups, self.wrong, self.options = x.shape, options.groups, wrong, options
        width = x.shape[-1] if wrong == "k is of the whole width" else x.shape[-1] // self.groups
        has_k = options.c is not None and wrong != "no c"
        self.k = self.one(options.c / math.sqrt(width) if has_k else 1)
        self.is_pre = (options.gate_position == "pre") != (wrong == "gate is on the other side")
        self.g, self.slope = self._gate(options.gate)

    def _gate(self, gate: Array | None) -> tuple[Array, Array]:
        if gate is None or self.wrong == "gate is left out":
            return self.one(1), self.one(0)
        name = {"swish": "silu"}.get(self.options.gate_activation, self.options.gate_activation)
        if self.wrong == "activation is another":
            name = "silu" if name == "sigmoid" else "sigmoid"
        g, slope = activate(self.rows(gate), name, self.wrong)
        return (g.astype(np.float16).astype(self.one) if self.wrong == "g is half" else g), slope

    @property
    def before(self) -> Array:
        return self.g if self.is_pre else self.one(1)

    @property
    def after(self) -> Array:
        return self.one(1) if self.is_pre else self.g

    def rows(self, x: Array) -> Array:
        return x.astype(self.one).reshape(len(x), self.groups, -1)

    def mean(self, values: Array) -> Array:
        axis = (-2, -1) if self.wrong == "groups share a statistic" else -1
        total = values.mean(axis=axis, keepdims=True, dtype=self.one)
        return np.broadcast_to(total, (*values.shape[:-1], 1))

    def statistic(self, values: Array) -> Array:
        return values.reshape(len(values), *((self.groups,) if self.groups > 1 else ()))

    def weight(self, weight: Array | None) -> Array:
        if weight is None:
            return self.one(1)
        w = weight.astype(self.one).reshape(self.groups, -1)
        if self.options.weight_offset and self.wrong != "offset is not added":
            w = w + self.one(self.options.weight_offset)
        return w[:1] if self.wrong == "all groups have the first one's weight" else w

    def rounded(self, kr: Array, dtype: Any) -> Array:
        rounds = self.options.round_before_weight
        if rounds != (self.wrong == "rounding before weight is otherwise"):
            kr = round_to(kr, dtype).astype(self.one)
        return kr

    def affine(self, kr: Array, weight: Array | None, bias: Array | None) -> Array:
        n = kr if weight is None else kr * self.weight(weight)
        return n if bias is None else n + bias.astype(self.one).reshape(self.groups, -1)

    def centered(self, p: Array) -> tuple[Array | None, Array, Array]:
        """Return the mean, what is about it, and the mean square of that."""
        if not self.options.center:
            return None, p, self.mean(p * p)
        shift = self.mean(p)
        t = p - shift
        correction = self.mean(t)
        q, square = t - correction, self.mean(t * t) - correction**2
        if self.wrong == "mean is not corrected":
            q, square = t, self.mean(t * t)
        if self.wrong == "variance is E[x*x] - E[x]**2":
            square = np.maximum(self.mean(p * p) - shift**2, 0)
        if self.wrong == "variance divides by d - 1":
            square = square * self.one(p.shape[-1] / (p.shape[-1] - 1))
        return shift + correction, q, square


def forward(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    residual: Array | None = None,
    *,
    wrong: str = "",
    **options: Any,
) -> NormForward:
    options = Options(**options)
    stream, dtypes = None, (x.dtype, getattr(residual, "dtype", None))
    a = Arithmetic(x, dtypes, wrong, options)
    s = x.astype(a.one)
    if residual is not None:
        total = s + residual.astype(a.one)
        stream = round_to(total, residual.dtype)
        s = total if wrong == "norm reads the unrounded sum" else stream.astype(a.one)
    mean, q, square = a.centered(a.rows(s) * a.before)
    rstd = 1 / np.sqrt(square + a.one(0 if wrong == "no eps" else options.eps))
    if wrong == "rstd has half its bits":
        rstd = rstd.astype(np.float16).astype(a.one)
    rounded_to = residual.dtype if wrong == "rounded as the stream is" else x.dtype
    n = a.affine(a.rounded(a.k * (q * rstd), rounded_to), weight, bias)
    y = round_to((n * a.after).reshape(x.shape), x.dtype)
    return NormForward(y, stream, None if mean is None else a.statistic(mean), a.statistic(rstd))


def backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    d_residual: Array | None = None,
    *,
    x_dtype: Any = None,
    wrong: str = "",
    **options: Any,
) -> NormGrads:
    options = Options(**options)
    a = Arithmetic(x, (x.dtype,), wrong, options)
    dy, s = a.rows(dy), a.rows(x)
    mean, q, square = a.centered(s * a.before)
    if options.center:  # what remains is corrected as the kernels do it, from the rounded mean
        q = s * a.before - mean
        q = q if wrong == "mean is not corrected" else q - a.mean(q)
    rstd = 1 / np.sqrt(square + a.one(options.eps))
    r = q * rstd
    is_stream = x_dtype is None or wrong == "rounded as the stream is"
    kr = a.rounded(a.k * r, x.dtype if is_stream else x_dtype)
    dn = dy if wrong == "dn is not gated" else dy * a.after
    dp = _dp(a, r, rstd, dn, weight)
    ds = dp * a.before
    if d_residual is not None and wrong != "no d_residual":
        above = a.rows(d_residual)
        ds = (dp + above) * a.before if wrong == "d_residual is gated" else ds + above
    if wrong == "rounded twice":
        ds = ds.astype(np.float16)
    ds = ds.reshape(x.shape)
    return NormGrads(
        dx=round_to(ds, x.dtype if x_dtype is None else x_dtype),
        dweight=_dweight(a, dy if wrong == "sums are not gated" else dn, kr, r, weight),
        dbias=_dbias(a, dy if wrong == "sums are not gated" else dn, bias),
        dgate=_dgate(a, dp * s, dy, kr, weight, bias),
        dresidual=round_to(ds, x.dtype),
    )


def _dp(a: Arithmetic, r: Array, rstd: Array, dn: Array, weight: Array | None) -> Array:
    dr = a.k * dn if weight is None else a.k * dn * a.weight(weight)
    slope = a.mean(r * dr)
    if a.wrong == "no mean(r * dr)":
        slope = slope * 0
    has_shift = a.options.center and a.wrong != "no mean(dq)"
    return rstd * (dr - r * slope - (a.mean(dr) if has_shift else 0))


def _dgate(a: Arithmetic, dp_s: Array, dy: Array, kr: Array, weight: Any, bias: Any) -> Any:
    gate = a.options.gate
    if gate is None:
        return None
    n = a.affine(kr, weight, None if a.wrong == "dgate forgets bias" else bias)
    if a.wrong == "dgate has y for n":
        n = n * a.after
    dgate = a.slope * (dp_s if a.is_pre else dy * n)
    if a.wrong == "dgate is of the other group":
        dgate = dgate[:, ::-1]
    return round_to(dgate.reshape(a.shape), gate.dtype)


def _dweight(a: Arithmetic, dn: Array, kr: Array, r: Array, weight: Array | None) -> Any:
    if weight is None:
        return None
    summands = (dn * (r if a.wrong == "dweight without k" else kr)).reshape(a.shape)
    if a.wrong == "sums are kept in the parameter's dtype":
        return np.add.accumulate(summands.astype(weight.dtype), axis=0)[-1]
    return round_to(summands.sum(axis=0), weight.dtype)


def _dbias(a: Arithmetic, dn: Array, bias: Array | None) -> Any:
    if bias is None:
        return None
    summands = (dn[:-1] if a.wrong == "dbias misses a row" else dn).reshape(-1, a.shape[-1])
    return round_to(summands.sum(axis=0), bias.dtype)
