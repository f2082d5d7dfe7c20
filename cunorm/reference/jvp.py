# SPDX-License-Identifier: MIT
"""The norms in forward mode: tangents of y, and of a row norm's dx.

`cunorm.normalize_jvp` and `cunorm.group_norm_jvp` have the formulas, their source and the names.
"""

from __future__ import annotations  # keeps the names of type aliases in help()

import math

import numpy as np
from numpy.typing import DTypeLike

from cunorm.reference import rows
from cunorm.reference.activations import ACTIVATIONS
from cunorm.reference.axes import Axis, with_axes
from cunorm.reference.generic import Options, gate_factors, weight_factor
from cunorm.reference.group_norm import as_grid, as_group_rows, in_place_of, per_channel
from cunorm.reference.rows import Array, Float64


class JvpOptions(Options, total=False):
    """Keyword arguments of `normalize_jvp` that the named functions pass on."""

    x_tangent: Array | None
    weight_tangent: Array | None
    bias_tangent: Array | None
    gate_tangent: Array | None
    x_dtype: DTypeLike | None


@with_axes
@np.errstate(all="ignore")
def normalize_jvp(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    x_tangent: Array | None = None,
    weight_tangent: Array | None = None,
    bias_tangent: Array | None = None,
    gate_tangent: Array | None = None,
    rstd: Array,
    mean: Array | None = None,
    c: float | None = None,
    center: bool = False,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Array | None = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    x_dtype: DTypeLike | None = None,
) -> Float64:
    """Return the tangent of y, exactly for any eps, because rstd contains eps.

    A rounded mean is corrected by the mean of p - mean.

    >>> import numpy as np
    >>> from cunorm import reference
    >>> x, x_tangent = np.array([[3.0, -4.0]]), np.array([[1.0, 0.0]])
    >>> rstd = reference.normalize_forward(x, c=1, eps=0.0).rstd
    >>> reference.normalize_jvp(x, x_tangent=x_tangent, rstd=rstd, c=1).round(6)
    array([[0.128, 0.096]])
    """
    _, before, after = gate_factors(gate, gate_activation, gate_position)
    of_gate: Float64 | float = 0.0  # the tangent of g(gate)
    if gate is not None and gate_tangent is not None:
        slope = ACTIVATIONS[gate_activation].slope(rows.as_float64(gate))
        of_gate = slope * rows.as_float64(gate_tangent)
    s, row_rstd = rows.as_float64(x), rows.per_row(rstd, groups)
    v = np.zeros_like(s) if x_tangent is None else rows.as_float64(x_tangent)
    v = v * before + (s * of_gate if gate_position == "pre" else 0.0)
    r = _normalised(rows.as_rows(s * before, axis, groups), mean, row_rstd, center)
    k = 1.0 if c is None else c / math.sqrt(r.shape[-1])
    kr = (k * r).reshape(x.shape)
    if round_before_weight:
        kr = rows.round_to(kr, x.dtype if x_dtype is None else x_dtype).astype(np.float64)

    of_r = _tangent(rows.as_rows(v, axis, groups), r, row_rstd, center).reshape(x.shape)
    of_n = k * of_r * weight_factor(weight, weight_offset)
    if weight_tangent is not None:
        of_n = of_n + kr * rows.as_float64(weight_tangent)
    if bias_tangent is not None:
        of_n = of_n + rows.as_float64(bias_tangent)
    if gate_position == "pre" or gate_tangent is None:
        return np.asarray(of_n * after)
    n = kr * weight_factor(weight, weight_offset)
    n = n if bias is None else n + rows.as_float64(bias)
    return np.asarray(of_n * after + n * of_gate)


@with_axes
@np.errstate(all="ignore")
def normalize_backward_jvp(
    dy: Array,
    x: Array,
    weight: Array | None = None,
    *,
    x_tangent: Array,
    rstd: Array,
    mean: Array | None = None,
    c: float | None = None,
    center: bool = False,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
) -> Float64:
    """Return the tangent of the dx of `normalize_backward`, without a gate, if only x has one."""
    row_rstd = rows.per_row(rstd, groups)
    r = _normalised(rows.as_rows(rows.as_float64(x), axis, groups), mean, row_rstd, center)
    k = 1.0 if c is None else c / math.sqrt(r.shape[-1])
    dr = rows.as_float64(dy) * weight_factor(weight, weight_offset)
    a, v = (rows.as_rows(one, axis, groups) for one in (k * dr, rows.as_float64(x_tangent)))
    of_a, of_v = (_tangent(one, r, row_rstd, center) for one in (a, v))
    found = r * _mean(a * of_v) + _mean(r * a) * of_v + _mean(r * v) * of_a
    return np.asarray((-row_rstd * found).reshape(x.shape))


@np.errstate(all="ignore")
def group_norm_jvp(
    x: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    x_tangent: Array,
    weight_tangent: Array | None = None,
    bias_tangent: Array | None = None,
    mean: Array,
    rstd: Array,
    activation: str | None = None,
    channel_axis: int = -1,
) -> Float64:
    """Return the tangent of y, exactly for any eps, because rstd contains eps.

    A rounded mean is corrected by the mean of x - mean.

    >>> import numpy as np
    >>> from cunorm import reference
    >>> x, x_tangent = np.array([[[3.0], [1.0], [2.0]]]), np.array([[[1.0], [0.0], [0.0]]])
    >>> f = reference.group_norm_forward(x, 1, eps=0.0)
    >>> reference.group_norm_jvp(x, 1, x_tangent=x_tangent, mean=f.mean, rstd=f.rstd).round(6)
    array([[[ 0.204124],
            [ 0.204124],
            [-0.408248]]])
    """
    grid, of_group = as_grid(x, num_groups, channel_axis), rstd.astype(np.float64)[..., None]
    r = _normalised(as_group_rows(grid), mean, of_group, center=True)
    v = as_grid(x_tangent, num_groups, channel_axis)
    of_r = _tangent(as_group_rows(v), r, of_group, center=True).reshape(grid.shape)
    r = r.reshape(grid.shape)
    of_n, n = of_r * per_channel(weight, grid), r * per_channel(weight, grid)
    if weight_tangent is not None:
        of_n = of_n + r * per_channel(weight_tangent, grid)
    if bias_tangent is not None:
        of_n = of_n + per_channel(bias_tangent, grid)
    if bias is not None:
        n = n + per_channel(bias, grid)
    slope = ACTIVATIONS[activation or "identity"].slope(n)
    return in_place_of(x, np.asarray(slope * of_n), channel_axis)


def _mean(p: Float64) -> Float64:
    return np.asarray(p.mean(axis=-1, keepdims=True))


def _normalised(p: Float64, mean: Array | None, rstd: Float64, center: bool) -> Float64:
    """Return r of the rows of p."""
    if center and mean is not None:
        p = rows.centered(p, mean.astype(np.float64).reshape(rstd.shape))[1]
    return p * rstd


def _tangent(v: Float64, r: Float64, rstd: Float64, center: bool) -> Float64:
    """Return the tangent of r for a tangent v of p."""
    found = rstd * (v - r * _mean(r * v))
    return found - _mean(found) if center else found
