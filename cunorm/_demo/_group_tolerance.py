# SPDX-License-Identifier: MIT
"""How far a group norm that was computed in float32 may be from the exact one.

The bounds are those of the tests, for finite input whose squares do not overflow. A group of a
sample is what a row is to a row norm, so those of `_tolerance` hold for n = r * weight + bias, and
for the gradients where h = dy. The activation g, silu or none, adds to them. With u half the
spacing of float32 at 1:

- g(n) is off by n's error times g', at its largest within that error; by 4 ulp of its own for the
  exponential, the division and the product; and by what the rounding of the exponential's argument,
  2 u of it, moves s: 2 u n * n s (1 - s).
- h = dy * g'(n) has the error of g' = s + n s (1 - s): 8 u of the two terms, 2 u n times the second
  for the argument, and g'' times the error of n. n is recomputed from the rounded mean, as how far
  that is off is known only later: half an ulp of the mean, times rstd * weight, on top.
- dx = rstd * (w h - mean(w h) - r mean(r w h)) moves by rstd times the error of each of its terms.

To all this comes what is `LOST`, see `_ulps`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cunorm import reference
from cunorm._demo._ulps import LOST, Array, Bounds, U, mean, row_max, stored, ulp, wide
from cunorm.reference.activations import ACTIVATIONS
from cunorm.results import GroupNormForward, GroupNormGrads


@dataclass(frozen=True)
class Groups:
    """What a group norm makes of its groups, exactly, as [samples, groups, elements]."""

    channels_first: tuple[int, ...]  # the shape of x with its axis of channels moved to 1
    channel_axis: int
    r: Array
    r_lost: Array  # with what is lost of x, the mean and the difference
    rstd: Array  # [samples, groups, 1], as mean
    mean: Array
    weight: Array
    n: Array
    is_silu: bool

    @classmethod
    def of(
        cls,
        x: Array,
        num_groups: int,
        weight: Array,
        bias: Array,
        *,
        eps: float,
        activation: str | None,
        channel_axis: int,
    ) -> Groups:
        """Take apart the group norm of x, whose parameters are float32."""
        f = reference.group_norm_forward(x, num_groups, eps=eps, channel_axis=channel_axis)
        shape = np.moveaxis(x, channel_axis, 1).shape
        r, s = (_as_groups(values, num_groups, channel_axis) for values in (f.y, x))
        w, b = (
            np.repeat(parameter.astype(np.float64), math.prod(shape[2:])).reshape(r.shape[1:])
            for parameter in (weight, bias)
        )
        rstd = f.rstd[..., None]
        return cls(
            channels_first=shape,
            channel_axis=channel_axis,
            r=r,
            r_lost=LOST * (1 + 4 * rstd * (1 + abs(s))),
            rstd=rstd,
            mean=f.mean[..., None],
            weight=w,
            n=r * w + b,
            is_silu=activation == "silu",
        )

    def taken(self, x: Array) -> Array:
        """Return what has x's shape as float64, group by group."""
        return _as_groups(x, self.r.shape[1], self.channel_axis)

    def like_x(self, errors: Array) -> Array:
        """Return errors of elements where x has them."""
        return np.moveaxis(errors.reshape(self.channels_first), 1, self.channel_axis)

    def of_channels(self, errors: Array) -> Array:
        """Add up errors of elements for each channel."""
        samples, channels = self.channels_first[:2]
        return np.asarray(errors.reshape(samples, channels, -1).sum(axis=(0, 2)))

    def n_error(self) -> Array:
        """Bound the error of n."""
        terms = np.maximum(abs(self.n), abs(self.r * self.weight))
        error = 4 * wide(self.r) * ulp(row_max(terms)) + abs(self.weight) * self.r_lost + LOST
        return np.asarray(error)

    def y_error(self) -> Array:
        """Bound the error of y before the store."""
        error = self.n_error()
        if not self.is_silu:
            return error
        n, silu = self.n, ACTIVATIONS["silu"]
        steepest = np.maximum.reduce([abs(silu.slope(n + step * error)) for step in (-1, 0, 1)])
        own = 4 * ulp(silu.value(n)) + 2 * U * abs(n * _second_term(n)) + LOST * (1 + abs(n))
        return np.asarray(steepest * error + own)

    def slope(self) -> tuple[Array, Array]:
        """Return g'(n), and bound its error."""
        n = self.n
        if not self.is_silu:
            return np.ones(n.shape), np.zeros(n.shape)
        slope, second = ACTIVATIONS["silu"].slope(n), abs(_second_term(n))
        own = 8 * U * (ACTIVATIONS["sigmoid"].value(n) + second) + 2 * U * abs(n) * second
        of_n = self.n_error() + abs(self.weight) * self.rstd * 0.5 * ulp(self.mean)
        near = [abs(_silu_curvature(n + step * of_n)) for step in (-1.0, -0.5, 0.0, 0.5, 1.0)]
        return slope, own + of_n * np.maximum.reduce(near) + LOST * (1 + abs(n)) ** 3


def forward_bounds(groups: Groups, exact: GroupNormForward, dtype: str) -> Bounds:
    """Return exact values and bounds for a forward of the oracle."""
    many = wide(groups.r)
    return {
        "y": (exact.y, stored(exact.y, groups.like_x(groups.y_error()), dtype)),
        "mean": (exact.mean, ulp(exact.mean) + 4 * many * U / exact.rstd),
        "rstd": (exact.rstd, 8 * many * U * exact.rstd),
    }


def backward_bounds(groups: Groups, exact: GroupNormGrads, dy: Array) -> Bounds:
    """Return exact values and bounds for a backward of the oracle.

    Parameters and their gradients are float32.
    """
    dtype, r = str(dy.dtype), groups.r
    dy = groups.taken(dy)
    slope, slope_error = groups.slope()
    h, h_error = dy * slope, abs(dy) * slope_error
    h_lost = LOST * (1 + abs(slope) + 2 * abs(dy))
    # dweight and dbias are relative to the sum of |summand|; the correction of the mean moves every
    # r of a group, also where it is zero.
    of_dweight = abs(h) * (8 * U * (abs(r) + 0.25) + groups.r_lost) + abs(r) * (h_error + h_lost)
    of_dbias = 8 * U * abs(h) + h_error + h_lost
    of_dx = groups.like_x(_dx_error(groups, h, h_error, h_lost))
    bounds = {"dx": (exact.dx, stored(exact.dx, of_dx, dtype))}
    for name, error in (("dweight", of_dweight), ("dbias", of_dbias)):
        gradient = getattr(exact, name)
        total = groups.of_channels(error + LOST)
        bounds[name] = (gradient, total + 0.5 * ulp(gradient) + LOST)
    return bounds


def _dx_error(groups: Groups, h: Array, h_error: Array, h_lost: Array) -> Array:
    """Bound the error of dx before the store."""
    r, rstd, dr = groups.r, groups.rstd, groups.weight * h
    # It is relative to the largest of the terms dx is a sum of, as they may cancel.
    terms = np.maximum(abs(dr), np.maximum(abs(r * mean(r * dr)), abs(mean(dr))))
    dr_error, dr_lost = abs(groups.weight) * h_error, abs(groups.weight) * h_lost + LOST
    of_terms = dr_error + abs(r) * mean(abs(r) * dr_error) + mean(dr_error)
    error = 8 * wide(r) * ulp(row_max(rstd * terms)) + rstd * of_terms
    return np.asarray(error + rstd * (dr_lost + LOST * (1 + abs(r))) + LOST)


def _second_term(z: Array) -> Array:
    """Return z s (1 - s)."""
    return np.asarray(z * ACTIVATIONS["sigmoid"].slope(z))


def _silu_curvature(z: Array) -> Array:
    """Return the second derivative of silu."""
    s, slope = (f(z) for f in ACTIVATIONS["sigmoid"])
    return np.asarray(slope * (2 + z * (1 - 2 * s)))


def _as_groups(x: Array, num_groups: int, channel_axis: int) -> Array:
    channels_first = np.moveaxis(x, channel_axis, 1).astype(np.float64, order="C")
    return channels_first.reshape(len(x), num_groups, -1)
