# SPDX-License-Identifier: MIT
"""Group norms in NumPy as a kernel computes them: done well, or wrong in a way that has a name.

Everything is in the compute type, with one rounding on the store, as in `arithmetic`. The backward
takes mean and rstd as the forward stored them, and corrects the mean as the kernels do.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cunorm.reference import round_to
from cunorm.results import GroupNormForward, GroupNormGrads
from tests.support.arithmetic import Array, activate


class GroupArithmetic:
    """What forward and backward have in common: x as [N, G, D, R], sums over it, n and phi."""

    def __init__(
        self, x: Array, num_groups: int, activation: str | None, channel_axis: int, wrong: str
    ) -> None:
        self.one = np.float64 if x.dtype == np.float64 else np.float32
        self.num_groups, self.channel_axis, self.wrong = num_groups, channel_axis, wrong
        self.x = self.grid(x)
        name = "identity" if activation is None or wrong == "no activation" else activation
        if wrong == "activation is another":
            name = "silu" if name == "sigmoid" else "sigmoid"
        self.activation = {"swish": "silu"}.get(name, name)

    def grid(self, x: Array) -> Array:
        channels_first = np.moveaxis(x, self.channel_axis, 1).astype(self.one, order="C")
        samples, channels, *positions = channels_first.shape
        depth, positions = channels // self.num_groups, math.prod(positions)
        if self.wrong == "channels of a group are apart":
            apart = channels_first.reshape(samples, depth, self.num_groups, positions)
            return np.ascontiguousarray(apart.swapaxes(1, 2))
        return channels_first.reshape(samples, self.num_groups, depth, positions)

    def store(self, grid: Array, like: Array, dtype: Any) -> Array:
        if self.wrong == "channels of a group are apart":
            grid = grid.swapaxes(1, 2)
        channels_first = grid.reshape(np.moveaxis(like, self.channel_axis, 1).shape)
        return np.moveaxis(self.rounded(channels_first, dtype), 1, self.channel_axis)

    def rounded(self, values: Array, dtype: Any) -> Array:
        if self.wrong == "rounded twice":
            values = values.astype(np.float16)
        if self.wrong == "cut off instead of rounded":
            values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
        return round_to(values, dtype)

    def channels(self, parameter: Array | None) -> Array:
        if parameter is None:
            return self.one(1)
        channels = parameter.astype(self.one).reshape(self.num_groups, -1, 1)
        return channels[:, :1] if self.wrong == "channels have the first one's weight" else channels

    def mean(self, grid: Array) -> Array:
        """Return the mean of each group, as [N, G, 1, 1]."""
        rows = grid.reshape(*grid.shape[:2], -1)
        mean = rows.mean(axis=-1, dtype=self.one)
        if self.wrong == "groups have the next one's sums":
            mean = np.roll(mean, 1, axis=1)
        if self.wrong == "samples share their sums":
            mean = np.broadcast_to(mean.mean(axis=0, dtype=self.one), mean.shape)
        return mean[..., None, None]

    def phi(self, n: Array) -> tuple[Array, Array]:
        return activate(n, self.activation, self.wrong)

    def affine(self, xhat: Array, weight: Array | None, bias: Array | None) -> Array:
        n = self.channels(weight) * xhat
        return n if bias is None else n + self.channels(bias)


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
    a = GroupArithmetic(x, num_groups, activation, channel_axis, wrong)
    shift = a.mean(a.x)
    t = a.x - shift
    correction = a.mean(t)
    q, square = t - correction, a.mean(t * t) - correction**2
    if wrong == "mean is not corrected":
        q, square = t, a.mean(t * t)
    if wrong == "variance is E[x*x] - E[x]**2":
        square = np.maximum(a.mean(a.x * a.x) - shift**2, 0)
    if wrong == "variance divides by one less":
        width = math.prod(a.x.shape[2:])
        square = square * a.one(width / (width - 1))
    rstd = 1 / np.sqrt(square + a.one(0 if wrong == "no eps" else eps))
    if wrong == "rstd has half its bits":
        rstd = rstd.astype(np.float16).astype(a.one)
    n = a.affine(q * rstd, weight, bias)
    if wrong == "n is rounded before phi":
        n = round_to(n, x.dtype).astype(a.one)
    y = a.store(a.phi(n)[0], x, x.dtype)
    return GroupNormForward(y, (shift + correction)[..., 0, 0], rstd[..., 0, 0])


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
    a = GroupArithmetic(x, num_groups, activation, channel_axis, wrong)
    dy, rstd = a.grid(dy), rstd[..., None, None]
    t = a.x - mean[..., None, None]
    delta = a.mean(t) * a.one(wrong != "mean is not corrected")
    off = np.spacing(mean)[..., None, None] * a.one(wrong == "phi' has the mean off by an ulp")
    n = a.affine((t - off) * rstd, weight, bias)  # before delta is known
    if wrong == "phi' is that of xhat":
        n = t * rstd
    if wrong == "phi' is that of y":
        n = a.phi(n)[0]
    h = dy * a.phi(n)[1]
    xhat = (t - delta) * rstd

    total_h = h.sum(axis=-1, keepdims=True)
    total_hx = rstd * ((h * t).sum(axis=-1, keepdims=True) - delta * total_h)
    if wrong == "sums are about 0":
        total_hx = (h * a.x).sum(axis=-1, keepdims=True) - mean[..., None, None] * total_h
        total_hx *= rstd
    return GroupNormGrads(
        dx=a.store(_dx(a, h, xhat, rstd, total_h, total_hx, weight), x, x.dtype),
        dweight=_parameter_gradient(a, h * xhat, total_hx, weight),
        dbias=_parameter_gradient(a, h, total_h, bias),
    )


def _dx(
    a: GroupArithmetic, h: Array, xhat: Array, rstd: Array, total_h: Any, total_hx: Any, weight: Any
) -> Array:
    w, positions = a.channels(weight), a.one(a.x.shape[3])
    if a.wrong == "sums divide by D":
        positions = a.one(1)
    ones = a.wrong == "a and b lack weight"
    # Over d of what has been summed over r; the mean over d takes the rest of 1 / (R * D).
    sum_a, sum_b = (a.mean((1 if ones else w) * total / positions) for total in (total_h, total_hx))
    if a.wrong == "no a":
        sum_a = 0 * sum_a
    if a.wrong == "no b":
        sum_b = 0 * sum_b
    return rstd * (w * h - sum_a - xhat * sum_b)


def _parameter_gradient(a: GroupArithmetic, terms: Array, totals: Array, parameter: Any) -> Any:
    """Add up over samples what has been summed over positions, of shape [N, G, D, 1]."""
    if parameter is None:
        return None
    if a.wrong == "sums miss a sample":
        totals = totals[:-1]
    if a.wrong == "sums miss a position":
        totals = terms[..., 1:].sum(axis=-1, keepdims=True)
    if a.wrong == "sums are kept in the parameter's dtype":
        kept = np.moveaxis(terms, -1, 0).reshape(-1, *parameter.shape)
        return np.add.accumulate(kept.astype(parameter.dtype), axis=0)[-1]
    return a.rounded(totals.sum(axis=0).reshape(parameter.shape), parameter.dtype)
