# SPDX-License-Identifier: MIT
"""How far the results of a group norm may be from the exact ones, and why.

A group of a sample, its D channels and R positions, is to a group norm what a row is to a row norm,
so that without an activation the bounds are those of `row_errors`: n = weight * xhat + bias, and
the gradients where h = dy.

An activation phi adds what it does to the error of n, and its own: y = phi(n) in the forward,
h = dy * phi'(n) in the backward, on which the gradients depend as those of a row norm with a
post-gate g do on dy * g.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cunorm import reference
from cunorm.reference.activations import ACTIVATIONS
from tests.support.bounds import Expected, compute_type
from tests.support.gate_bounds import Gate, count, gate_error, gate_slope_error
from tests.support.row_errors import Options, Rows
from tests.support.ulps import Array, ulp, unit


def check_group_forward(result: Any, *given: Any, **options: Any) -> dict[str, float]:
    """Do what `check_forward` does, given what the forward takes."""
    return expected_group_forward(*given, **options).check(result)


def check_group_backward(grads: Any, *given: Any, **options: Any) -> dict[str, float]:
    """Do what `check_backward` does, given dy and what the forward takes.

    The kernel's mean is taken to be within half an ulp.
    """
    return expected_group_backward(*given, **options).check(grads)


@np.errstate(all="ignore")
def expected_group_forward(
    x, num_groups, weight, bias, *, eps, activation=None, channel_axis=-1
) -> Expected:
    """Return what a forward is held to."""
    options = {"eps": eps, "channel_axis": channel_axis}
    exact = reference.group_norm_forward(
        x, num_groups, weight, bias, activation=activation, **options
    )
    rows = rows_of(x, num_groups, weight, bias, **options)
    errors = {
        "y": lambda: like(x, y_error(rows, activation or "identity"), channel_axis),
        "mean": lambda: rows.mean_error()[..., 0],
        "rstd": lambda: rows.rstd_error()[..., 0],
    }
    return Expected(exact, errors, rows.compute)


@np.errstate(all="ignore")
def expected_group_backward(
    dy, x, num_groups, weight, bias, *, eps, activation=None, channel_axis=-1
) -> Expected:
    """Return what a backward is held to."""
    f = reference.group_norm_forward(x, num_groups, eps=eps, channel_axis=channel_axis)
    options = {
        "mean": f.mean,
        "rstd": f.rstd,
        "activation": activation,
        "channel_axis": channel_axis,
    }
    exact = reference.group_norm_backward(dy, x, num_groups, weight, bias, **options)
    rows = rows_of(x, num_groups, weight, bias, eps=eps, channel_axis=channel_axis)
    rows.after = activation_slope(rows, activation or "identity")
    channels = x.shape[channel_axis]
    dy = np.moveaxis(dy, channel_axis, 1).astype(np.float64).reshape(rows.s.shape)

    def by_channel(terms: Any) -> Any:
        return lambda: [t.reshape(len(x), channels, -1).sum(axis=(0, 2)) for t in terms(dy)]

    errors = {
        "dx": lambda: like(x, rows.dp_error(dy), channel_axis),
        "dweight": by_channel(rows.dweight_terms),
        "dbias": by_channel(rows.dbias_terms),
    }
    return Expected(exact, errors, rows.compute)


def rows_of(x, num_groups, weight, bias, *, eps, channel_axis) -> Rows:
    """Take apart a group norm without activation: a layer norm of groups of whole samples."""
    first = np.moveaxis(x, channel_axis, 1)
    parameters = (
        None if p is None else np.repeat(p, math.prod(first.shape[2:])) for p in (weight, bias)
    )
    norm = Options(eps=eps, center=True, groups=num_groups)
    samples, compute = first.reshape(len(x), math.prod(first.shape[1:])), compute_type(x)
    return Rows(samples, *parameters, norm, compute=compute, rounded_to=x.dtype)


def like(x: Array, rows: Array, channel_axis: int) -> Array:
    """Return rows, or what broadcasts to [N, G, D * R], with their elements where x has them."""
    shape = np.moveaxis(x, channel_axis, 1).shape
    full = np.broadcast_to(rows, (*rows.shape[:2], math.prod(shape[1:]) // rows.shape[1]))
    return np.moveaxis(full.reshape(shape), 1, channel_axis)


# --- what an activation adds ----------------------------------------------------------------------


def y_error(rows: Rows, activation: str) -> Array:
    """Bound the error of y = phi(n) before the store: n's, times phi' about n, and that of phi."""
    error, slope = rows.n_error(), ACTIVATIONS[activation].slope
    slopes = [np.abs(slope(rows.n + step * error)) for step in (-1, 0, 1)]
    own = gate_error(rows.n, activation, rows.compute, rows.compute)
    return np.maximum.reduce(slopes) * error + own


def activation_slope(rows: Rows, activation: str) -> Gate:
    """Return phi'(n), which h has as a factor, with its error, as a gate after the norm.

    n is recomputed with its error of the forward, and from the rounded mean: what that lacks, half
    an ulp of it or less, is known only from the pass over x that needs phi' already. It is phi'
    alone that sees it, and not xhat, which is corrected. Where weight is 0, n is bias and exact, so
    that a channel of zeros stays on its side of relu's corner. On the wrong side phi' is off by 1,
    and the arithmetic with h has the 8 ulp of `row_errors` of what is not exact.
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

    It is the error times phi'', at its largest of five points about n, as the error need not be
    small where the mean is far from 0. The slope of relu is a step.
    """
    if activation == "relu":
        return np.where((np.abs(n) <= error) & (error > 0), 1.0, 0.0 * n)
    slope, h = ACTIVATIONS[activation].slope, 1e-4  # phi'' is a quotient, right to 1e-8 or so
    points = [n + step * error for step in (-1.0, -0.5, 0.0, 0.5, 1.0)]
    curvatures = [np.abs(slope(z + h) - slope(z - h)) / (2 * h) for z in points]
    return error * np.maximum.reduce(curvatures)
