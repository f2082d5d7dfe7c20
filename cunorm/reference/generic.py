# SPDX-License-Identifier: MIT
"""The generic row norm, forward and backward; the named norms are cases of it.

`cunorm.normalize_forward` and `cunorm.normalize_backward` have the formulas, their source and the
names. With groups, the formulas of a row apply to each group of a row. weight and bias, and the
gate of a branch, broadcast to x's shape, so they may differ between rows.
"""

from __future__ import annotations  # keeps the names of type aliases in help()

import math
from collections.abc import Collection
from typing import TypedDict

import numpy as np
from numpy.typing import DTypeLike

from cunorm.reference import rows
from cunorm.reference.activations import ACTIVATIONS
from cunorm.reference.axes import Axis, row_axes, with_axes
from cunorm.reference.rows import Array, Float64
from cunorm.results import NormForward, NormGrads, Sums


class Options(TypedDict, total=False):
    """Keyword arguments of `normalize_forward` that the named norms pass on."""

    axis: Axis
    groups: int
    weight_offset: float
    round_before_weight: bool
    gate: Array | None
    gate_activation: str
    gate_position: str


class ForwardOptions(Options, total=False):
    """Keyword arguments of `normalize_forward` that the named forwards pass on."""

    mean: Array | None
    rstd: Array | None
    correction: Array | None
    count: int | None
    x_dtype: DTypeLike | None


class BackwardOptions(Options, total=False):
    """Keyword arguments of `normalize_backward` that the named norms pass on."""

    d_residual: Array | None
    branch: Array | None
    x_dtype: DTypeLike | None
    needs: Collection[str]
    sums: Sums[Array] | None
    correction: Array | None
    count: int | None


@with_axes
@np.errstate(all="ignore")
def normalize_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Array | None = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    mean: Array | None = None,
    rstd: Array | None = None,
    correction: Array | None = None,
    count: int | None = None,
    x_dtype: DTypeLike | None = None,
) -> NormForward[Array]:
    """Normalise each row, and return what the backward needs.

    weight and bias have the row's shape, with or without leading axes that are x's or 1. With the
    gate position "branch", the result's residual is x * g(gate), plus residual if there is one; the
    gate then broadcasts as weight does, and the axes of its row may all be 1. round_before_weight
    rounds k * r to x_dtype, by default x's dtype, also without a weight. Groups need axis -1. Given
    statistics (rstd and, with center, mean and correction) are those of rows of `count` elements.
    y, mean and rstd are float64; the result's residual is None if there is neither a residual
    argument nor such a gate.

    >>> import numpy as np
    >>> from cunorm import reference
    >>> x = np.array([[3.0, -4.0]])
    >>> reference.normalize_forward(x, c=1, eps=0.0).y
    array([[ 0.6, -0.8]])
    >>> reference.normalize_forward(x, c=1, eps=0.0, gate=x, gate_activation="relu").y
    array([[ 1.8, -0. ]])
    """
    of_branch, before, after = gate_factors(gate, gate_activation, gate_position)
    residual_out = rows.residual_stream(x, residual, residual_dtype, of_branch)
    s = rows.as_float64(x if residual_out is None else residual_out)

    p = rows.as_rows(s * before, axis, groups)
    if rstd is None:
        mean, q = rows.centered(p, p.mean(axis=-1, keepdims=True)) if center else (None, p)
        rstd = 1.0 / np.sqrt((q * q).mean(axis=-1, keepdims=True) + eps)
    else:
        q, rstd = rows.less_mean(p, mean, correction), rows.per_row(rstd, groups)
    kr = (_k(c, q, count) * (q * rstd)).reshape(x.shape)
    if round_before_weight:
        kr = rows.round_to(kr, x.dtype if x_dtype is None else x_dtype).astype(np.float64)
    y = _affine(kr, weight, weight_offset, bias) * after

    leading = x.ndim - len(row_axes(x.ndim, axis))
    shape = x.shape[:leading] + ((groups,) if groups > 1 else ())  # of the statistics
    mean = None if mean is None else mean.reshape(shape)
    return NormForward(y, residual_out, mean, rstd.reshape(shape))


@with_axes
@np.errstate(all="ignore")
def normalize_backward(
    dy: Array,
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    rstd: Array,
    mean: Array | None = None,
    d_residual: Array | None = None,
    branch: Array | None = None,
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
    needs: Collection[str] = ("x", "weight", "bias", "gate"),
    sums: Sums[Array] | None = None,
    correction: Array | None = None,
    count: int | None = None,
) -> NormGrads[Array]:
    """Differentiate `normalize_forward`, exactly for any eps, because rstd contains eps.

    x is the array that was normalised: the forward's residual if there is one; x_dtype is then the
    dtype of the forward's x. round_before_weight rounds k * r to x_dtype, by default x's dtype:
    dweight and n use the rounded value, and dr ignores the rounding. A rounded mean is
    corrected by the mean of p - mean. An absent operand in `needs` gives None.

    Given sums are those of `normalize_backward_sums` over whole rows of `count` elements. Then the
    mean is not corrected by that of p - mean: `correction` is added to it.

    dweight, dbias and a branch's dgate have the operand's shape. With the gate position "branch",
    `branch` is the forward's x; it is needed for dgate only.

    >>> import numpy as np
    >>> from cunorm import reference
    >>> x, dy = np.array([[3.0, -4.0]]), np.array([[1.0, 0.0]])
    >>> rstd = reference.normalize_forward(x, c=1, eps=0.0).rstd
    >>> reference.normalize_backward(dy, x, rstd=rstd, c=1).dx.round(6)
    array([[0.128, 0.096]])
    """
    if center and mean is None:
        raise ValueError("normalize_backward: mean is None, but center=True needs it")
    of_branch, before, after = gate_factors(gate, gate_activation, gate_position)
    s, row_rstd = rows.as_float64(x), rows.per_row(rstd, groups)
    p = rows.as_rows(s * before, axis, groups)
    if sums is not None or mean is None or not center:
        q = rows.less_mean(p, mean, correction)
    else:
        q = rows.centered(p, rows.per_row(mean, groups))[1]
    r = q * row_rstd
    k = _k(c, q, count)
    kr = (k * r).reshape(x.shape)
    if round_before_weight:
        kr = rows.round_to(kr, x.dtype if x_dtype is None else x_dtype).astype(np.float64)

    dn = rows.as_float64(dy) * after
    dr = rows.as_rows(k * dn * weight_factor(weight, weight_offset), axis, groups)
    if sums is None:
        dq = row_rstd * (dr - r * (r * dr).mean(axis=-1, keepdims=True))
        dp = (dq - dq.mean(axis=-1, keepdims=True) if center else dq).reshape(x.shape)
    else:
        d = q.shape[-1] if count is None else count
        means = [0.0 if one is None else k * rows.per_row(one, groups) / d for one in sums]
        dp = (row_rstd * (dr - r * means[1] - means[0])).reshape(x.shape)
    ds = dp * before
    if d_residual is not None:
        ds = ds + rows.as_float64(d_residual)

    grads: dict[str, Array] = {}
    if bias is not None and "bias" in needs:
        grads["dbias"] = rows.sum_to(dn, bias.shape)
    if weight is not None and "weight" in needs:
        grads["dweight"] = rows.sum_to(dn * kr, weight.shape)
    if "x" in needs:
        grads["dx"] = ds if of_branch is None else ds * of_branch
        grads["dresidual"] = ds
    if gate is not None and "gate" in needs:
        if gate_position == "branch":
            dg = _of_branch(ds, branch, gate.shape)
        else:
            n = _affine(kr, weight, weight_offset, bias)
            dg = dp * s if gate_position == "pre" else rows.as_float64(dy) * n
        grads["dgate"] = ACTIVATIONS[gate_activation].slope(rows.as_float64(gate)) * dg
    return NormGrads(**grads)


def gate_factors(
    gate: Array | None, activation: str, position: str
) -> tuple[Float64 | None, Float64 | float, Float64 | float]:
    """Return the gate's factors of the branch, of rows before the norm and after it.

    1 is no factor; None is no gate of the branch.
    """
    if gate is None:
        return None, 1.0, 1.0
    g = ACTIVATIONS[activation].value(rows.as_float64(gate))
    if position == "branch":
        return g, 1.0, 1.0
    return (None, g, 1.0) if position == "pre" else (None, 1.0, g)


def _of_branch(ds: Float64, branch: Array | None, shape: tuple[int, ...]) -> Float64:
    if branch is None:
        raise ValueError("normalize_backward: branch is None, but the gate's gradient needs it")
    return rows.sum_to(ds * rows.as_float64(branch), shape)


def weight_factor(weight: Array | None, offset: float) -> Float64 | float:
    """Return weight + offset, or 1 without a weight."""
    return 1.0 if weight is None else rows.as_float64(weight) + offset


def _affine(kr: Float64, weight: Array | None, offset: float, bias: Array | None) -> Float64:
    n = kr * weight_factor(weight, offset)
    return n if bias is None else n + rows.as_float64(bias)


def _k(c: float | None, s: Float64, count: int | None) -> float:
    return 1.0 if c is None else c / math.sqrt(s.shape[-1] if count is None else count)
