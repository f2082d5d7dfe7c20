# SPDX-License-Identifier: MIT
"""The group norm, forward and backward, and the instance norm, which has one channel per group.

`cunorm.group_norm_forward` and `cunorm.group_norm_backward` have the formulas, their source and the
names. x is viewed as [N, G, D, R]: N samples, G groups of D channels each, R positions. The sums of
the backward have x - mean in place of x, so that a mean far from 0 loses no digits.
"""

from __future__ import annotations  # keeps the names of type aliases in help()

import math
from collections.abc import Collection

import numpy as np

from cunorm.reference.activations import ACTIVATIONS
from cunorm.reference.rows import Array, Float64, centered, sum_to
from cunorm.results import GroupNormForward, GroupNormGrads


@np.errstate(all="ignore")
def group_norm_forward(
    x: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
    channel_axis: int = -1,
) -> GroupNormForward[Array]:
    """Normalise each group of each sample, and return what the backward needs.

    weight and bias have shape (C,), (1, C) or (N, C); mean and rstd have shape (N, num_groups).

    >>> import numpy as np
    >>> from cunorm import reference
    >>> x = np.array([[[1.0, 10.0], [3.0, 20.0]]])  # a sample of two positions, two channels
    >>> f = reference.group_norm_forward(x, 2, eps=0.0, activation="relu")
    >>> f.y
    array([[[0., 0.],
            [1., 1.]]])
    >>> f.mean
    array([[ 2., 15.]])
    """
    grid = as_grid(x, num_groups, channel_axis)
    rows = as_group_rows(grid)
    mean, q = centered(rows, rows.mean(axis=-1, keepdims=True))
    rstd = 1.0 / np.sqrt((q * q).mean(axis=-1, keepdims=True) + eps)
    n = _affine((q * rstd).reshape(grid.shape), weight, bias)
    y = ACTIVATIONS[activation or "identity"].value(n)
    return GroupNormForward(in_place_of(x, y, channel_axis), mean[..., 0], rstd[..., 0])


@np.errstate(all="ignore")
def group_norm_backward(
    dy: Array,
    x: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    mean: Array,
    rstd: Array,
    activation: str | None = None,
    channel_axis: int = -1,
    needs: Collection[str] = ("x", "weight", "bias"),
) -> GroupNormGrads[Array]:
    """Differentiate `group_norm_forward`, exactly for any eps, because rstd contains eps.

    A rounded mean is corrected by the mean of x - mean. An absent operand in `needs` gives None.

    >>> import numpy as np
    >>> from cunorm import reference
    >>> x, dy = np.array([[[3.0], [1.0], [2.0]]]), np.array([[[1.0], [0.0], [0.0]]])
    >>> f = reference.group_norm_forward(x, 1, eps=0.0)
    >>> reference.group_norm_backward(dy, x, 1, mean=f.mean, rstd=f.rstd).dx.round(6)
    array([[[ 0.204124],
            [ 0.204124],
            [-0.408248]]])
    """
    grid = as_grid(x, num_groups, channel_axis)
    mean, rstd = (statistic.astype(np.float64)[..., None] for statistic in (mean, rstd))
    q = centered(as_group_rows(grid), mean)[1]
    r = (q * rstd).reshape(grid.shape)
    slope = ACTIVATIONS[activation or "identity"].slope(_affine(r, weight, bias))
    h = as_grid(dy, num_groups, channel_axis) * slope
    total_h, total_hr = (terms.sum(axis=-1, keepdims=True) for terms in (h, h * r))

    grads: dict[str, Array] = {}
    if bias is not None and "bias" in needs:
        grads["dbias"] = _as_parameter(total_h, bias)
    if weight is not None and "weight" in needs:
        grads["dweight"] = _as_parameter(total_hr, weight)
    if "x" in needs:
        w, width = per_channel(weight, grid), math.prod(grid.shape[2:])
        a, b = ((w * total).sum(axis=2, keepdims=True) / width for total in (total_h, total_hr))
        grads["dx"] = in_place_of(x, rstd[..., None] * (w * h - a - r * b), channel_axis)
    return GroupNormGrads(**grads)


def group_norm(
    x: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
    channel_axis: int = -1,
) -> Float64:
    """Return y of `group_norm_forward`."""
    operands = x, num_groups, weight, bias
    f = group_norm_forward(*operands, eps=eps, activation=activation, channel_axis=channel_axis)
    return np.asarray(f.y)


def instance_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
    channel_axis: int = -1,
) -> Float64:
    """Return y of `group_norm_forward` with each channel a group of its own."""
    operands = x, x.shape[channel_axis], weight, bias
    return group_norm(*operands, eps=eps, activation=activation, channel_axis=channel_axis)


def as_grid(x: Array, num_groups: int, channel_axis: int) -> Float64:
    """Copy x to [N, G, D, R], contiguous so that NumPy sums the last axes pairwise."""
    channels_first = np.moveaxis(x, channel_axis, 1)
    samples, channels, *positions = channels_first.shape
    shape = samples, num_groups, channels // num_groups, math.prod(positions)
    return channels_first.astype(np.float64, order="C").reshape(shape)


def in_place_of(x: Array, grid: Float64, channel_axis: int) -> Float64:
    """Return a grid in the layout of x."""
    channels_first = grid.reshape(np.moveaxis(x, channel_axis, 1).shape)
    return np.ascontiguousarray(np.moveaxis(channels_first, 1, channel_axis))


def per_channel(parameter: Array | None, grid: Float64) -> Float64 | float:
    """Return a parameter as [G, D, 1], [1, G, D, 1] or [N, G, D, 1], or 1 if there is none."""
    if parameter is None:
        return 1.0
    return parameter.astype(np.float64).reshape(*parameter.shape[:-1], *grid.shape[1:3], 1)


def _as_parameter(totals: Float64, parameter: Array) -> Float64:
    """Sum [N, G, D, 1] over the samples that share a parameter."""
    return sum_to(totals.reshape(totals.shape[0], parameter.shape[-1]), parameter.shape)


def _affine(r: Float64, weight: Array | None, bias: Array | None) -> Float64:
    n = per_channel(weight, r) * r
    return n if bias is None else n + per_channel(bias, r)


def as_group_rows(grid: Float64) -> Float64:
    """Return each group as a row: [N, G, D * R]."""
    return grid.reshape(*grid.shape[:2], math.prod(grid.shape[2:]))
