# SPDX-License-Identifier: MIT
"""The intermediate values of a row norm, and their error bounds.

    p = s * g (pre-gate) or s    q = p or p - mean(p)    r = q * rstd    k = c / sqrt(d) or 1
    n = k * r * w + bias         y = n * g (post-gate) or n              w = weight + weight_offset

s is x or the stream, g the gate after its activation; dn, dr, dq, dp and ds are gradients. Arrays
are [rows, groups, d], and a row is the last axis. "ulp" is the spacing of the numbers of the
compute type, u is half of the spacing at 1. Bounds are sums of first-order errors, each at its
largest. Two options add errors:

- a gate's activation (see `gate_bounds`). The error of a pre-gate changes p, the statistics, r and
  dp; the error of a post-gate changes y and dr (`branch_bounds` has a gate on the branch);
- `round_before_weight` rounds k * r to a narrow dtype. The exact result is rounded too, but next to
  a tie, a k * r within its bound can round to the other side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cunorm import reference
from tests.support.gate_bounds import Gate, count, gate_of
from tests.support.ulps import Array, narrows, rounding, smallest_normal, ulp, unit


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a norm, and the gate; the defaults are those of cunorm."""

    eps: float
    c: float | None = None
    center: bool = False
    axis: int = -1
    groups: int = 1
    weight_offset: float = 0.0
    round_before_weight: bool = False
    gate: Array | None = None
    gate_activation: str = "silu"
    gate_position: str = "post"

    def rows(self, x: Array) -> Array:
        """Return x as float64 of shape [rows, groups, d]."""
        rows, width = math.prod(x.shape[: self.axis]), math.prod(x.shape[self.axis :])
        return x.astype(np.float64).reshape(rows, self.groups, width // self.groups)

    def parameter(self, parameter: Array, shape: tuple[int, ...]) -> Array:
        """Return weight or bias as float64: [groups, d], or [rows, groups, d] if rows differ.

        `shape` is the shape of x.
        """
        if parameter.ndim > len(shape[self.axis :]):
            return self.rows(np.broadcast_to(parameter, shape))
        return parameter.astype(np.float64).reshape(self.groups, -1)

    def up_to_r(self) -> Options:
        """Return the options of the norm whose y is r."""
        gate = self.gate if self.gate_position == "pre" else None
        return replace(self, c=None, weight_offset=0.0, round_before_weight=False, gate=gate)


class Rows:
    """The exact values of rows, and the errors that a gate or round_before_weight adds."""

    def __init__(self, s, weight, bias, options: Options, *, compute, rounded_to) -> None:
        """Compute the exact rows of a norm of s; round_before_weight rounds kr to `rounded_to`."""
        f = reference.normalize_forward(s, **vars(options.up_to_r()))
        self.compute, self.center = compute, options.center
        self.s, self.r = options.rows(s), options.rows(f.y)
        self.rstd = f.rstd.reshape(*self.r.shape[:-1], 1)
        self.mean = None if f.mean is None else f.mean.reshape(self.rstd.shape)
        gate, is_before = None, options.gate_position == "pre"
        if options.gate is not None and options.gate_position != "branch":
            names = (options.gate_activation, str(options.gate.dtype), compute)
            gate = gate_of(options.rows(options.gate), *names)
        self.before, self.after = (gate, None) if is_before else (None, gate)
        self.added_to_mean = self.added_to_rstd = self.r_error = 0.0  # from a pre-gate
        if self.before is not None:
            self._add_pre_gate(self.before)
        self.k = 1.0 if options.c is None else options.c / math.sqrt(self.r.shape[-1])
        w, b = (None if p is None else options.parameter(p, s.shape) for p in (weight, bias))
        self.w = 1.0 if w is None else w + options.weight_offset
        self.w_error = 0.0  # the rounding of a wider weight: large relative to w if w is near 0
        if w is not None and options.weight_offset:
            self.w_error = rounding(w, compute, str(weight.dtype))
        self.kr, self.kr_error = self.k * self.r, None  # None: kr is not rounded
        if options.round_before_weight and narrows(str(rounded_to), compute):
            self._round(rounded_to)
        self.n = self.kr * self.w + (0.0 if b is None else b)

    def _round(self, dtype: Any) -> None:
        """Round kr; next to a tie, kr - error and kr + error may round to different numbers."""
        kr = self.kr
        error = n_bound(kr, kr, self.compute) + abs(self.k) * self.r_error
        ends = (kr, kr - error, kr + error)
        self.kr, *ends = (reference.round_to(v, dtype).astype(np.float64) for v in ends)
        apart = (np.where(end == self.kr, 0.0, np.abs(end - self.kr)) for end in ends)
        self.kr_error = np.maximum(*apart)

    def _add_pre_gate(self, gate: Gate) -> None:
        """Propagate e, which bounds the error of p = s * g, to the mean, rstd and r.

        The mean changes by at most mean(e), and rstd by the factor 1 + rstd**2 * mean(abs(q) * e).
        q changes by at most e or, with center, e * (1 - 2/d) + mean(e): an element's own error is
        also a summand of the mean's error.
        """
        s, r = self.s, self.r
        error = np.abs(s) * gate.value_error + product_error(s * gate.value, self.compute)
        self.added_to_mean = mean(error)
        self.added_to_rstd = self.rstd * mean(np.abs(r) * error)  # relative
        q_error = error
        if self.center:
            q_error = error * (1 - 2 / s.shape[-1]) + self.added_to_mean
        self.r_error = self.rstd * q_error + np.abs(r) * self.added_to_rstd

    def mean_error(self) -> Array:
        """Bound the error of mean: ulp(mean) + 4 u / rstd (8 u for wide rows).

        The mean is a shift plus a correction of about the standard deviation, which is <= 1 / rstd.
        """
        units = count(4, self.compute, self.r.shape[-1]) * unit(self.compute)
        return ulp(self.mean, self.compute) + units / self.rstd + self.added_to_mean

    def rstd_error(self) -> Array:
        """Bound the error of rstd: 8 u * rstd (16 u for wide rows), plus that of a pre-gate."""
        units = 2 * count(4, self.compute, self.r.shape[-1]) * unit(self.compute)
        return self.rstd * (units + self.added_to_rstd)

    def n_error(self) -> Array:
        """Bound the error of n, for each row or, if kr is rounded, for each element.

        A rounded kr is exact except near a tie. The later operations round once each: weight +
        weight_offset, the product, the sum with bias. A wider weight or bias is rounded first.
        """
        terms = np.abs(self.kr * self.w)
        if self.kr_error is None:
            return n_bound(self.n, terms, self.compute) + np.abs(self.k * self.w) * self.r_error
        sizes = np.maximum(np.abs(self.n), terms)
        error = np.abs(self.w) * self.kr_error + np.abs(self.kr) * self.w_error
        return error + count(3, self.compute) * ulp(sizes, self.compute)

    def y_error(self) -> Array:
        """Bound the error of y = n * g before the store."""
        if self.after is None:
            return self.n_error()
        g, error = self.after.value, self.after.value_error
        product = product_error(self.n * g, self.compute)
        return np.abs(g) * self.n_error() + np.abs(self.n) * error + product

    def ds_error(self, dy: Array, d_residual: Array | None = None, dtype: str = "float32") -> Array:
        """Bound the error of ds = dp * g + d_residual before the store.

        Without a pre-gate, ds is dp + d_residual, and `dp_error` bounds this sum.
        """
        if self.before is None:
            return self.dp_error(dy, d_residual)
        g, dp = self.before.value, self.dp(dy)
        error = np.abs(g) * self.dp_error(dy) + np.abs(dp) * self.before.value_error
        error += product_error(dp * g, self.compute)
        if d_residual is not None:
            error += count(1, self.compute) * 0.5 * ulp(dp * g + d_residual, self.compute)
            error += rounding(d_residual, self.compute, dtype)
        return error

    def dgate_error(self, dy: Array) -> Array:
        """Bound the error of dgate before the store.

        dgate is g' * dp * s for a pre-gate, g' * dy * n for a post-gate. Two products and a dy of a
        wider dtype are rounded.
        """
        if self.before is None:
            gate, factor, error = self.after, dy * self.n, np.abs(dy) * self.n_error()
        else:
            gate, factor = self.before, self.dp(dy) * self.s
            error = np.abs(self.s) * self.dp_error(dy)
        products = 3 * product_error(gate.slope * factor, self.compute)
        return np.abs(gate.slope) * error + np.abs(factor) * gate.slope_error + products

    def dp_error(self, dy: Array, d_residual: Array | None = None) -> Array:
        """Bound the error of dp = rstd * (dr - r * m - mean(dr)), where m = mean(r * dr).

        The bound is 8 ulp of the largest term (16 for wide rows), because terms may cancel. This is
        twice as much as for n, because r and m contain rstd, too. Gates add errors.
        """
        dr, r = self.dr(dy), self.r
        m, shift = mean(r * dr), mean(dr) if self.center else 0.0
        terms = self.rstd * np.maximum(np.maximum(np.abs(dr), np.abs(r * m)), np.abs(shift))
        terms = terms if d_residual is None else np.maximum(terms, np.abs(d_residual))
        error = count(8, self.compute, r.shape[-1]) * ulp(row_max(terms), self.compute)
        if self.before is None and self.after is None:
            return error
        dr_error = np.zeros(dr.shape)
        if self.after is not None:
            dr_error = np.abs(self.k * self.w * dy) * self.after.value_error
        m_error = mean(self.r_error * np.abs(dr) + np.abs(r) * dr_error)
        inner = dr_error + np.abs(m) * self.r_error + np.abs(r) * m_error
        if self.center:
            inner = inner + mean(dr_error)
        return error + self.added_to_rstd * np.abs(self.dp(dy)) + self.rstd * inner

    def dweight_terms(self, dy: Array) -> tuple[Array, Array]:
        """Return abs(summand), which `param_grad_bound` multiplies by 8 u, and a further error.

        With center, the rounding of the mean's correction changes r by up to 2 u = 0.25 * 8 u.
        """
        dn = np.abs(self.dn(dy))
        if self.kr_error is None:
            size = dn * (np.abs(self.kr) + (0.25 * abs(self.k) if self.center else 0.0))
            error = dn * np.abs(self.k) * self.r_error
        else:
            size, error = dn * np.abs(self.kr), dn * self.kr_error
        if self.after is not None:
            error = error + np.abs(dy * self.kr) * self.after.value_error
        return size, error

    def dbias_terms(self, dy: Array) -> tuple[Array, Array]:
        """Return abs(summand) and a further error, as `dweight_terms` does."""
        error = 0.0 if self.after is None else self.after.value_error
        return np.abs(self.dn(dy)), np.abs(dy) * error

    # The exact gradients of n, r and p.

    def dn(self, dy: Array) -> Array:
        return dy if self.after is None else dy * self.after.value

    def dr(self, dy: Array) -> Array:
        return self.k * self.dn(dy) * self.w

    def dp(self, dy: Array) -> Array:
        dr = self.dr(dy)
        dq = self.rstd * (dr - self.r * mean(self.r * dr))
        return dq - mean(dq) if self.center else dq


def n_bound(n: Array, terms: Array, compute: str) -> Array:
    """Bound the error of n for each row: 4 ulp of the largest of n and `terms`; 8 for wide rows.

    rstd is off by an ulp or two, and the mean by less than an ulp of the standard deviation. Then
    q, the products with rstd, k and weight, and the sum with bias are rounded once each.
    The worst of 3 million rows of 2 to 32 elements was 3.9 ulp.
    """
    scale = row_max(np.maximum(np.abs(n), np.abs(terms)))
    return count(4, compute, n.shape[-1]) * ulp(scale, compute)


def product_error(exact: Array, compute: str) -> Array:
    """Bound the rounding of a product; with a small gate, CUDA may flush the product to 0."""
    return count(1, compute) * 0.5 * ulp(exact, compute) + smallest_normal(compute)


def row_max(values: Array) -> Array:
    """Return the largest finite magnitude of each row, as [rows, groups, 1]."""
    sizes = np.abs(values)
    return np.max(sizes, axis=-1, keepdims=True, where=np.isfinite(sizes), initial=0.0)


def mean(values: Array) -> Array:
    """Return the mean of each row, as [rows, groups, 1]."""
    return values.mean(axis=-1, keepdims=True)
