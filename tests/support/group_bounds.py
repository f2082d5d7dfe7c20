# SPDX-License-Identifier: MIT
"""Error bounds of a group norm.

A group of a sample is like a row of a row norm. Without an activation, y is n = weight * xhat +
bias, and `row_errors` has the bounds.

With an activation phi, y is phi(n), and the gradient of n is h = dy * phi'(n). In a row norm with a
post-gate g, the gradient of n is dy * g. So phi'(n) is passed to `row_errors` as such a g.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cunorm import reference
from cunorm.reference.activations import ACTIVATIONS
from cunorm.reference.rows import sum_to
from tests.support.bounds import Expected, compute_type
from tests.support.gate_bounds import Gate, count, gate_error, gate_slope_error
from tests.support.row_errors import Options, Rows
from tests.support.ulps import Array, ulp, unit


def check_group_forward(result: Any, *given: Any, **options: Any) -> dict[str, float]:
    """Check a GroupNormForward as `check_forward` does; takes the arguments of the forward."""
    return expected_group_forward(*given, **options).check(result)


def check_group_backward(grads: Any, *given: Any, **options: Any) -> dict[str, float]:
    """Check a GroupNormGrads as `check_backward` does; takes dy and the arguments of the forward.

    The kernel's mean is assumed to be within half an ulp of the exact mean.
    """
    return expected_group_backward(*given, **options).check(grads)


@np.errstate(all="ignore")
def expected_group_forward(
    x, num_groups, weight, bias, *, eps, activation=None, channel_axis=-1
) -> Expected:
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
    dy = np.moveaxis(dy, channel_axis, 1).astype(np.float64).reshape(rows.s.shape)

    def by_channel(terms: Any, operand: Any) -> Any:
        shape = len(x), x.shape[channel_axis], -1
        return lambda: [sum_to(t.reshape(shape).sum(axis=2), operand.shape) for t in terms(dy)]

    errors = {
        "dx": lambda: like(x, rows.dp_error(dy), channel_axis),
        "dweight": by_channel(rows.dweight_terms, weight),
        "dbias": by_channel(rows.dbias_terms, bias),
    }
    return Expected(exact, errors, rows.compute)


def rows_of(x, num_groups, weight, bias, *, eps, channel_axis) -> Rows:
    """Return a group norm without activation as a layer norm; a row is a sample, in groups."""
    first = np.moveaxis(x, channel_axis, 1)
    positions = math.prod(first.shape[2:])
    parameters = (None if p is None else np.repeat(p, positions, axis=-1) for p in (weight, bias))
    norm = Options(eps=eps, center=True, groups=num_groups)
    samples, compute = first.reshape(len(x), math.prod(first.shape[1:])), compute_type(x)
    return Rows(samples, *parameters, norm, compute=compute, rounded_to=x.dtype)


def like(x: Array, rows: Array, channel_axis: int) -> Array:
    """Broadcast rows to all elements, and return them in the shape and axis order of x."""
    shape = np.moveaxis(x, channel_axis, 1).shape
    full = np.broadcast_to(rows, (*rows.shape[:2], math.prod(shape[1:]) // rows.shape[1]))
    return np.moveaxis(full.reshape(shape), 1, channel_axis)


# --- activations ----------------------------------------------------------------------------------


def y_error(rows: Rows, activation: str) -> Array:
    """Bound the error of y = phi(n) before the store: n's error times phi', plus `gate_error`."""
    error, slope = rows.n_error(), ACTIVATIONS[activation].slope
    slopes = [np.abs(slope(rows.n + step * error)) for step in (-1, 0, 1)]
    own = gate_error(rows.n, activation, rows.compute, rows.compute)
    return np.maximum.reduce(slopes) * error + own


def activation_slope(rows: Rows, activation: str) -> Gate:
    """Return phi'(n) and its error as a gate after the norm.

    The backward computes n from the rounded mean, which adds `shift` to the error that n has in the
    forward. (Only later steps correct for this rounding.) If weight is 0, n is exactly bias.
    `row_errors` allows 8 ulp for arithmetic with the exact h. The computed h has the error of phi',
    so this error is multiplied by 1 + 8 ulp.
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
    """Bound the change of phi' between n and a value that is off by `error` or less.

    The bound is the error times the largest phi'' at five points around n, because the error may be
    large if the mean is far from 0. The slope of relu jumps from 0 to 1.
    """
    if activation == "relu":
        return np.where((np.abs(n) <= error) & (error > 0), 1.0, 0.0 * n)
    slope, h = ACTIVATIONS[activation].slope, 1e-4  # phi'' by differences, to about 1e-8
    points = [n + step * error for step in (-1.0, -0.5, 0.0, 0.5, 1.0)]
    curvatures = [np.abs(slope(z + h) - slope(z - h)) / (2 * h) for z in points]
    return error * np.maximum.reduce(curvatures)
