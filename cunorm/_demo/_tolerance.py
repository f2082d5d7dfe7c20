# SPDX-License-Identifier: MIT
"""How far a result that was computed in float32 may be from the exact one.

The bounds are those of the tests, for finite input whose squares do not overflow: ulps of float32
for the computation, and half an ulp of a narrower dtype for the store. Beyond a width of 16384 the
sums are long enough to cost twice as much.

For a gate they are wider than those of the tests, and simpler. It is g = silu(z) with abs(z) up to
`LARGEST_GATE`, 4, and no mean is subtracted. With u half the spacing of float32 at 1:

- g(z) = z s(z) is within 16 u of itself, 8 u for the exponential, the division and the product with
  z, and 2 u abs(z) for the rounding of the exponential's argument; a product with g within 17 u.
- Before the norm that moves rstd by 17 u, and r by 34 u; after it, y and the gradient of n by 17 u.
- dp = rstd (dr - r mean(r dr)) moves by at most 5 times 17 u of its terms' sizes: once for rstd or
  dr, and four times for r, which mean(r dr) has twice, where it is r that moves.
- g'(z) = s + z s (1 - s) is within 72 u of s: its terms are at most s and 4 s, within 8 u each, and
  the argument's rounding moves the second by 2 u abs(z). Products with it round three times.

To all this comes what is `LOST`, see `_ulps`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from cunorm import reference
from cunorm._demo._ulps import LOST, Array, Bounds, U, mean, row_max, stored, ulp, wide
from cunorm.reference.activations import ACTIVATIONS
from cunorm.results import NormForward, NormGrads

LARGEST_GATE = 4.0

_GATE = 17 * U  # of a product with the gate


@dataclass(frozen=True)
class Rows:
    """What a norm makes of its rows, exactly, as [rows, groups, d]."""

    s: Array
    r: Array
    rstd: Array  # [rows, groups, 1]
    k: float
    kr: Array  # k * r, rounded if it is before weight
    kr_error: Array | float  # next to a tie of that rounding
    kr_lost: Array  # with what is lost of x, the gate, p, their mean and the difference
    weight: Array | float  # with its offset
    bias: Array | float
    gate: Array | None
    is_pre_gate: bool
    center: bool

    @classmethod
    def of(
        cls,
        s: Array,
        weight: Array | None,
        bias: Array | None,
        gate: Array | None,
        *,
        is_pre_gate: bool,
        groups: int,
        weight_offset: float,
        rounded_to: DTypeLike | None,
        c: float | None,
        center: bool,
        eps: float,
    ) -> Rows:
        """Take apart the norm of s, a matrix."""
        shape = (len(s), groups, s.shape[-1] // groups)
        before = gate if is_pre_gate else None
        f = reference.normalize_forward(
            s, center=center, eps=eps, groups=groups, gate=before, gate_position="pre"
        )
        r, rstd = f.y.reshape(shape), f.rstd.reshape(*shape[:2], 1)
        k = 1.0 if c is None else c / math.sqrt(shape[-1])
        s = s.astype(np.float64).reshape(shape)
        kr_lost = LOST * (1 + 4 * k * rstd * (1 + abs(s)))
        kr, kr_error = _rounded(k * r, kr_lost, rounded_to)
        return cls(
            s=s,
            r=r,
            rstd=rstd,
            k=k,
            kr=kr,
            kr_error=kr_error,
            kr_lost=kr_lost,
            weight=1.0 if weight is None else _parameter(weight, groups) + weight_offset,
            bias=0.0 if bias is None else _parameter(bias, groups),
            gate=None if gate is None else gate.astype(np.float64).reshape(shape),
            is_pre_gate=is_pre_gate,
            center=center,
        )

    @property
    def n(self) -> Array:
        """What a post-gate multiplies."""
        return np.asarray(self.kr * self.weight + self.bias)

    @property
    def after(self) -> Array | float:
        """The factor of a post-gate."""
        return 1.0 if self.gate is None or self.is_pre_gate else _silu(self.gate)

    def flat(self, errors: Array) -> Array:
        """Return errors of elements, or of whole rows, as the matrix that was given."""
        return np.broadcast_to(errors, self.s.shape).reshape(len(self.s), -1)

    def n_error(self) -> Array:
        """Bound the error of n."""
        terms = abs(self.kr * self.weight)
        error = 4 * self.wide * ulp(row_max(np.maximum(abs(self.n), terms)))
        of_kr = np.asarray(self.kr_error + self.kr_lost)
        error = np.asarray(error + np.abs(self.weight) * of_kr + LOST)
        return error + 2 * _GATE * terms if self.is_pre_gate else error

    def dp_error(self, dy: Array, d_residual: Array | None) -> tuple[Array, Array]:
        """Return dp as it is without center, and bound its error."""
        dr = self.k * dy * self.after * self.weight
        slope = mean(self.r * dr)
        # It is relative to the largest of the terms dp is a sum of, as they may cancel.
        terms = np.maximum(abs(dr), abs(self.r * slope))
        if self.center:
            terms = np.maximum(terms, abs(mean(dr)))
        terms = self.rstd * terms
        if d_residual is not None:
            terms = np.maximum(terms, abs(d_residual))
        dr_lost = abs(self.k * self.weight) * self.dn_lost(dy) + LOST
        error = 8 * self.wide * ulp(row_max(terms))
        error = error + self.rstd * (dr_lost + LOST * (1 + abs(self.r))) + LOST
        if self.gate is not None:
            sizes = self.rstd * (abs(dr) + abs(self.r) * mean(abs(self.r * dr)))
            error = error + 5 * _GATE * sizes
        return self.rstd * (dr - self.r * slope), error

    def dn_lost(self, dy: Array) -> Array:
        """Return what is lost of dy, the gate and their product."""
        return np.asarray(LOST * (1 + np.abs(self.after) + 2 * np.abs(dy)))

    @property
    def wide(self) -> int:
        """How many times the ulps of an ordinary row are due."""
        return wide(self.s)


def forward_bounds(rows: Rows, exact: NormForward, dtype: str) -> Bounds:
    """Return exact values and bounds for a forward of the oracle, on a matrix."""
    error = rows.n_error() * abs(rows.after)
    if rows.gate is not None and not rows.is_pre_gate:
        error = error + _GATE * abs(exact.y.reshape(rows.s.shape)) + 2 * LOST * abs(rows.n)
    of_rstd = 8 * rows.wide * U + (_GATE if rows.is_pre_gate else 0.0)
    bounds = {
        "y": (exact.y, stored(exact.y, rows.flat(error), dtype)),
        "rstd": (exact.rstd, of_rstd * exact.rstd),
    }
    if exact.mean is not None:
        bounds["mean"] = (exact.mean, ulp(exact.mean) + 4 * rows.wide * U / exact.rstd)
    if exact.residual is not None:  # rounded the same way, and nothing else but what is lost
        stream = exact.residual.astype(np.float64)
        bounds["residual"] = (stream, np.where(abs(stream) < LOST / U, 2 * LOST, 0.0))
    return bounds


def backward_bounds(rows: Rows, exact: NormGrads, dy: Array, d_residual: Array | None) -> Bounds:
    """Return exact values and bounds for a backward of the oracle, on matrices of one dtype.

    Parameters and their gradients are float32.
    """
    dtype = str(dy.dtype)
    dy = dy.astype(np.float64).reshape(rows.s.shape)
    above = None if d_residual is None else d_residual.astype(np.float64).reshape(rows.s.shape)
    dp, error = rows.dp_error(dy, above)
    of_dx = error
    if rows.gate is not None and rows.is_pre_gate:
        g = _silu(rows.gate)
        of_dx = abs(g) * error + _GATE * abs(dp * g) + 2 * LOST * abs(dp)
    bound = stored(exact.dx, rows.flat(of_dx), dtype)
    bounds = {"dx": (exact.dx, bound), "dresidual": (exact.dx, bound)}
    if rows.gate is not None:
        if rows.is_pre_gate:
            factor, error = dp * rows.s, abs(rows.s) * error + LOST * abs(dp)
        else:
            factor, error = dy * rows.n, abs(dy) * rows.n_error() + LOST * abs(rows.n)
        of_dgate = rows.flat(_dgate_error(rows.gate, factor, error))
        bounds["dgate"] = (exact.dgate, stored(exact.dgate, of_dgate, dtype))
    # dweight and dbias are relative to the sum over rows of |summand|; the correction of the mean
    # moves every r of a row, also where it is zero.
    dn, of_gate = abs(dy * rows.after), 0.0 if rows.gate is None else 2 * _GATE
    dn_lost = rows.dn_lost(dy)
    if exact.dweight is not None:
        sizes = abs(rows.kr) + (0.25 * rows.k if rows.center else 0.0)
        total = dn * ((8 * U + of_gate) * sizes + rows.kr_error + rows.kr_lost)
        total = total + dn_lost * abs(rows.kr)
        bounds["dweight"] = _of_parameter(exact.dweight, total)
    if exact.dbias is not None:
        bounds["dbias"] = _of_parameter(exact.dbias, (8 * U + of_gate) * dn + dn_lost)
    return bounds


def _dgate_error(z: Array, factor: Array, error: Array) -> Array:
    """Bound the error of g'(z) times a factor, which has one of its own."""
    slope, s = ACTIVATIONS["silu"].slope(z), ACTIVATIONS["sigmoid"].value(z)
    error = error + 3 * U * abs(factor) + 2 * LOST
    return np.asarray(abs(slope) * error + 72 * U * s * abs(factor) + LOST * (1 + abs(factor)))


def _rounded(kr: Array, lost: Array, dtype: DTypeLike | None) -> tuple[Array, Array | float]:
    """Round k * r; next to a tie, what is off by its own error may go to the other side."""
    if dtype is None or np.dtype(dtype).itemsize >= 4:
        return kr, 0.0
    error = 4 * wide(kr) * ulp(row_max(kr)) + lost
    exact, low, high = (
        reference.round_to(values, dtype).astype(np.float64)
        for values in (kr, kr - error, kr + error)
    )
    return exact, np.maximum(abs(low - exact), abs(high - exact))


def _silu(z: Array) -> Array:
    return ACTIVATIONS["silu"].value(z)


def _of_parameter(exact: Array, errors: Array) -> tuple[Array, Array]:
    total = (errors + LOST).sum(axis=0).reshape(exact.shape)
    return exact, total + 0.5 * ulp(exact) + LOST


def _parameter(array: Array, groups: int) -> Array:
    return array.astype(np.float64).reshape(groups, -1)
