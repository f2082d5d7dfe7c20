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
from functools import partial
from typing import Any

import numpy as np

from cunorm import reference
from cunorm.reference.activations import ACTIVATIONS
from tests.support.bounds import Held
from tests.support.error_bounds import Array, count, mean_bound, rstd_bound
from tests.support.gate_bounds import Gate, gate_error, gate_slope_error
from tests.support.row_errors import Rows
from tests.support.ulps import ulp, unit


def check_group_forward(result: Any, *given: Any, **told: Any) -> dict[str, float]:
    """Hold a GroupNormForward of NumPy arrays to the oracle; a field that is None is not looked at.

    Takes what the forward takes, eps without default. Returns each field's worst error in units of
    its bound.
    """
    return of_group_forward(*given, **told).check(result)


def check_group_backward(grads: Any, *given: Any, **told: Any) -> dict[str, float]:
    """Hold a GroupNormGrads of NumPy arrays to the oracle; a field that is None is not looked at.

    Takes dy, what the forward takes, and eps. The exact statistics are computed from x, whatever
    the kernel was given: its mean is taken to be within half an ulp. Returns as above.
    """
    return of_group_backward(*given, **told).check(grads)


@np.errstate(all="ignore")
def of_group_forward(
    x: Array,
    num_groups: int,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    activation: str | None = None,
    channel_axis: int = -1,
) -> Held:
    """Return what a forward is held to."""
    told = {"eps": eps, "channel_axis": channel_axis}
    exact = reference.group_norm_forward(x, num_groups, weight, bias, activation=activation, **told)
    rows = rows_of(x, num_groups, weight, bias, **told)
    width = rows.s.shape[-1]
    errors = {
        "y": lambda: like(x, y_error(rows, activation or "identity"), channel_axis),
        "mean": lambda: mean_bound(rows.mean, rows.rstd, rows.compute, width=width)[..., 0],
        "rstd": lambda: rstd_bound(rows.rstd, rows.compute, width=width)[..., 0],
    }
    return Held(exact, errors, rows.compute)


@np.errstate(all="ignore")
def of_group_backward(
    dy: Array,
    x: Array,
    num_groups: int,
    weight: Array | None,
    bias: Array | None,
    *,
    eps: float,
    activation: str | None = None,
    channel_axis: int = -1,
) -> Held:
    """Return what a backward is held to."""
    f = reference.group_norm_forward(x, num_groups, eps=eps, channel_axis=channel_axis)
    told = {"mean": f.mean, "rstd": f.rstd, "activation": activation, "channel_axis": channel_axis}
    exact = reference.group_norm_backward(dy, x, num_groups, weight, bias, **told)
    rows = rows_of(x, num_groups, weight, bias, eps=eps, channel_axis=channel_axis)
    rows = replace(rows, after=activation_slope(rows, activation or "identity"))
    dy = as_rows(dy, num_groups, channel_axis)

    def of_sums(terms: Any) -> list[Array]:
        return [by_channel(t, x.shape[channel_axis]) for t in terms(dy)]

    errors = {
        "dx": lambda: like(x, rows.dp_error(dy), channel_axis),
        "dweight": partial(of_sums, rows.dweight_terms),
        "dbias": partial(of_sums, rows.dbias_terms),
    }
    return Held(exact, errors, rows.compute)


# --- what an activation adds ----------------------------------------------------------------------


def y_error(rows: Rows, activation: str) -> Array:
    """Bound the error of y = phi(n) before the store: n's, times phi' about n, and that of phi.

    n's is that of the group's y without activation. phi' is at its largest as far about n as n may
    be off, which is next to n but at the corner of relu.
    """
    error, slope = rows.n_error(), ACTIVATIONS[activation].slope
    slopes = [np.abs(slope(rows.n + step * error)) for step in (-1, 0, 1)]
    own = gate_error(rows.n, activation, rows.compute, rows.compute)
    return np.maximum.reduce(slopes) * error + own


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
    slope, h = ACTIVATIONS[activation].slope, 1e-4  # phi'' is a quotient, right to 1e-8 or so
    points = [n + step * error for step in (-1.0, -0.5, 0.0, 0.5, 1.0)]
    curvatures = [np.abs(slope(z + h) - slope(z - h)) / (2 * h) for z in points]
    return error * np.maximum.reduce(curvatures)


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
    w, b = (per_element(values, num_groups, s.shape[-1]) for values in (weight, bias))
    w, b = 1.0 if weight is None else w, 0.0 if bias is None else b
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
        n=xhat * w + b,
    )


def per_element(parameter: Array | None, num_groups: int, width: int) -> Array | None:
    """Return a parameter of channels as [G, D * R]."""
    if parameter is None:
        return None
    channels = parameter.astype(np.float64).reshape(num_groups, -1)
    return np.repeat(channels, width // channels.shape[-1], axis=-1)


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
