# SPDX-License-Identifier: MIT
"""How far the results of a group norm may be from the exact ones, and why.

A group of a sample, its D channels and R positions, is to a group norm what a row is to a row norm,
so the bounds of `error_bounds` hold with "group" for "row" and R * D for the width. They bound the
error of n = weight * xhat + bias, and of the gradients where h = dy. Samples and positions are what
the gradient of a parameter sums over.

An activation phi adds what it does to the error of n, and its own, for which see `gate_bounds`:
y = phi(n) in the forward, h = dy * phi'(n) in the backward. The gradients depend on h as those of a
row norm with a post-gate g do on dy * g: what the error of phi'(n) comes to is in `row_errors`.

Arrays are [N, G, D * R] here, but for arguments and results.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from cunorm import reference
from cunorm.reference.activations import ACTIVATIONS
from tests.support.error_bounds import Array, count, mean_bound, param_grad_bound, rstd_bound
from tests.support.gate_bounds import Gate, gate_error, gate_slope_error
from tests.support.row_errors import Rows
from tests.support.ulps import assert_within, rounding, ulp, unit


@np.errstate(all="ignore")
def check_group_forward(
    result: Any,
    x: Array,
    num_groups: int,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    activation: str | None = None,
    channel_axis: int = -1,
) -> dict[str, float]:
    """Hold a GroupNormForward of NumPy arrays to the oracle; a field that is None is not looked at.

    Returns each field's worst error in units of its bound.
    """
    told = {"eps": eps, "channel_axis": channel_axis}
    exact = reference.group_norm_forward(x, num_groups, weight, bias, activation=activation, **told)
    rows = rows_of(x, num_groups, weight, bias, **told)
    worst = {}
    if result.y is not None:
        error = like(x, y_error(rows, activation or "identity"), channel_axis)
        bound = error + rounding(exact.y, str(result.y.dtype), rows.compute)
        worst["y"] = assert_within(result.y, exact.y, bound, "y")
    for name, bound_of in (("mean", group_mean_bound), ("rstd", group_rstd_bound)):
        actual = getattr(result, name)
        if actual is not None:
            worst[name] = assert_within(actual, getattr(exact, name), bound_of(rows), name)
    return worst


@np.errstate(all="ignore")
def check_group_backward(
    grads: Any,
    dy: Array,
    x: Array,
    num_groups: int,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    activation: str | None = None,
    channel_axis: int = -1,
) -> dict[str, float]:
    """Hold a GroupNormGrads of NumPy arrays to the oracle; a field that is None is not looked at.

    The exact statistics are computed from x, whatever the kernel was given: its mean is taken to be
    within half an ulp. Returns each field's worst error in units of its bound.
    """
    f = reference.group_norm_forward(x, num_groups, eps=eps, channel_axis=channel_axis)
    told = {"mean": f.mean, "rstd": f.rstd, "activation": activation, "channel_axis": channel_axis}
    exact = reference.group_norm_backward(dy, x, num_groups, weight, bias, **told)
    for name in grads._fields:
        if getattr(grads, name) is not None and getattr(exact, name) is None:
            raise AssertionError(f"{name} does not apply here, and should be None")
    rows = rows_of(x, num_groups, weight, bias, eps=eps, channel_axis=channel_axis)
    rows = replace(rows, after=activation_slope(rows, activation or "identity"))
    dy = as_rows(dy, num_groups, channel_axis)
    worst = {}
    if grads.dx is not None:
        error = like(x, rows.dp_error(dy), channel_axis)
        bound = error + rounding(exact.dx, str(grads.dx.dtype), rows.compute)
        worst["dx"] = assert_within(grads.dx, exact.dx, bound, "dx")
    for name, terms in (("dweight", rows.dweight_terms), ("dbias", rows.dbias_terms)):
        actual, expected = getattr(grads, name), getattr(exact, name)
        if actual is not None:
            magnitude, error = (by_channel(t, x.shape[channel_axis]) for t in terms(dy))
            bound = param_grad_bound(expected, magnitude, str(actual.dtype), rows.compute) + error
            worst[name] = assert_within(actual, expected, bound, name)
    return worst


# --- the forward ----------------------------------------------------------------------------------


def y_error(rows: Rows, activation: str) -> Array:
    """Bound the error of y = phi(n) before the store: n's, times phi' about n, and that of phi.

    n's is that of the group's y without activation. phi' is at its largest as far about n as n may
    be off, which is next to n but at the corner of relu.
    """
    error, slope = rows.n_error(), ACTIVATIONS[activation].slope
    slopes = [np.abs(slope(rows.n + step * error)) for step in (-1, 0, 1)]
    own = gate_error(rows.n, activation, rows.compute, rows.compute)
    return np.maximum.reduce(slopes) * error + own


def group_mean_bound(rows: Rows) -> Array:
    """Bound the error of mean, of shape [N, G], as `mean_bound` does."""
    return mean_bound(rows.mean, rows.rstd, rows.compute, width=rows.s.shape[-1])[..., 0]


def group_rstd_bound(rows: Rows) -> Array:
    """Bound the error of rstd, of shape [N, G], as `rstd_bound` does."""
    return rstd_bound(rows.rstd, rows.compute, width=rows.s.shape[-1])[..., 0]


# --- the backward ---------------------------------------------------------------------------------


def activation_slope(rows: Rows, activation: str) -> Gate:
    """Return phi'(n), which h has as a factor, with its error, as a gate after the norm.

    n is recomputed with its error of the forward, and from the rounded mean: what that lacks, half
    an ulp of it or less, is known only from the pass over x that needs phi' already. So n may be
    off by weight * rstd times as much besides. It is phi' alone that sees it, and not xhat, which
    is corrected; phi' moves by phi'' times that, and has the error of its own evaluation. Where
    weight is 0, n is bias and exact, so that a channel of zeros stays on its side of relu's corner.

    On the wrong side of it phi' is off by 1, and so may be all there is in h. The arithmetic with
    h, of which `error_bounds` counts 8 ulp of what is exact, then has them of what is not.
    """
    shift = np.abs(rows.w) * rows.rstd * 0.5 * ulp(rows.mean, rows.compute)
    n_error = np.where(rows.w == 0, 0.0, rows.n_error() + shift)
    error = slope_change(rows.n, n_error, activation)
    error += gate_slope_error(rows.n, activation, rows.compute)
    error *= 1 + count(8, rows.compute, rows.n.shape[-1]) * 2 * unit(rows.compute)
    slope = ACTIVATIONS[activation].slope(rows.n)
    unused = np.full(slope.shape, np.nan)
    return Gate(value=slope, slope=unused, value_error=error, slope_error=unused)


def slope_change(n: Array, error: Array, activation: str) -> Array:
    """Bound the change of phi' from n to what is off by `error` or less.

    It is the error times phi'', which is taken at its largest of five points about n, as the error
    need not be small where the mean is far from 0. The slope of relu is a step: 1 if n may be on
    the other side of it, else nothing.
    """
    if activation == "relu":
        return np.where((np.abs(n) <= error) & (error > 0), 1.0, 0.0 * n)
    points = (n + step * error for step in (-1.0, -0.5, 0.0, 0.5, 1.0))
    return error * np.maximum.reduce([np.abs(curvature(z, activation)) for z in points])


def curvature(z: Array, activation: str) -> Array:
    """Return phi''(z) of an activation that has one; of those with a tail, 0 beyond 1000."""
    z = np.clip(z, -1000.0, 1000.0)  # where every exponential is 0, but products are finite
    if activation == "identity":
        return np.zeros(z.shape)
    if activation == "tanh":
        return -2 * np.tanh(z) * ACTIVATIONS["tanh"].slope(z)
    if activation == "gelu":
        return (2 - z * z) * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    a, da, dda = z, 1.0, 0.0  # phi = z * s(a), but for sigmoid's s(z); s is the sigmoid
    if activation == "gelu_tanh":
        root = math.sqrt(8 / math.pi)
        a = root * (z + 0.044715 * z**3)
        da, dda = root * (1 + 3 * 0.044715 * z * z), root * 6 * 0.044715 * z
    sigmoid = ACTIVATIONS["sigmoid"]
    ds = sigmoid.slope(a)
    dds = ds * (1 - 2 * sigmoid.value(a))
    if activation == "sigmoid":
        return dds
    return 2 * ds * da + z * (dds * da * da + ds * dda)


# --- groups as rows -------------------------------------------------------------------------------


def rows_of(
    x: Array,
    num_groups: int,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    channel_axis: int,
) -> Rows:
    """Take apart a group norm without activation: each group is a row, centred."""
    f = reference.group_norm_forward(x, num_groups, eps=eps, channel_axis=channel_axis)
    s, xhat = (as_rows(values, num_groups, channel_axis) for values in (x, f.y))

    def per_element(parameter: Array | None, absent: float) -> Array | float:
        if parameter is None:
            return absent
        channels = parameter.astype(np.float64).reshape(num_groups, -1)
        return np.repeat(channels, s.shape[-1] // channels.shape[-1], axis=-1)

    w = per_element(weight, 1.0)
    return Rows(
        compute="float64" if x.dtype == np.float64 else "float32",
        center=True,
        before=None,
        after=None,
        s=s,
        r=xhat,
        rstd=f.rstd[..., None],
        mean=f.mean[..., None],
        k=1.0,
        w=w,
        kr=xhat,
        n=xhat * w + per_element(bias, 0.0),
    )


def as_rows(x: Array, num_groups: int, channel_axis: int) -> Array:
    """Return x as float64 of shape [N, G, D * R]."""
    channels_first = np.moveaxis(x, channel_axis, 1)
    width = math.prod(channels_first.shape[1:]) // num_groups
    return channels_first.astype(np.float64).reshape(len(x), num_groups, width)


def like(x: Array, rows: Array, channel_axis: int) -> Array:
    """Return rows, or what broadcasts to [N, G, D * R], with their elements where x has them."""
    channels_first = np.moveaxis(x, channel_axis, 1).shape
    groups = rows.shape[1]
    width = math.prod(channels_first[1:]) // groups
    full = np.broadcast_to(rows, (len(x), groups, width))
    return np.moveaxis(full.reshape(channels_first), 1, channel_axis)


def by_channel(rows: Array, channels: int) -> Array:
    """Sum rows over samples and positions: one number per channel."""
    samples, groups, width = rows.shape
    return rows.reshape(samples, channels, groups * width // channels).sum(axis=(0, 2))
