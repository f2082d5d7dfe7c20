# SPDX-License-Identifier: MIT
"""The generic row norm, forward and backward; the named norms are cases of it.

`cunorm.normalize_forward` and `cunorm.normalize_backward` have the formulas, their source and the
names. With groups, the formulas of a row apply to each group of a row.
"""

from __future__ import annotations  # keeps the names of type aliases in help()

import math
from collections.abc import Collection
from typing import TypedDict

import numpy as np
from numpy.typing import DTypeLike

from cunorm.reference import rows
from cunorm.reference.activations import ACTIVATIONS
from cunorm.reference.rows import Array, Float64
from cunorm.results import NormForward, NormGrads


class Options(TypedDict, total=False):
    """Keyword arguments of `normalize_forward` that the named norms pass on."""

    axis: int
    groups: int
    weight_offset: float
    round_before_weight: bool
    gate: Array | None
    gate_activation: str
    gate_position: str


class BackwardOptions(Options, total=False):
    """Keyword arguments of `normalize_backward` that the named norms pass on."""

    d_residual: Array | None
    x_dtype: DTypeLike | None
    needs: Collection[str]


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
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Array | None = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
) -> NormForward[Array]:
    """Normalise each row, and return what the backward needs.

    round_before_weight rounds k * r to x's dtype, also without a weight. Groups need axis -1. y,
    mean and rstd are float64; the result's residual is None if neither residual argument is given.

    >>> import numpy as np
    >>> from cunorm import reference
    >>> x = np.array([[3.0, -4.0]])
    >>> reference.normalize_forward(x, c=1, eps=0.0).y
    array([[ 0.6, -0.8]])
    >>> reference.normalize_forward(x, c=1, eps=0.0, gate=x, gate_activation="relu").y
    array([[ 1.8, -0. ]])
    """
    residual_out = rows.residual_stream(x, residual, residual_dtype)
    s = rows.as_rows(x if residual_out is None else residual_out, axis, groups)
    before, after = _gate_factors(gate, gate_activation, gate_position, axis, groups)

    p = s * before
    mean, q = rows.centered(p, p.mean(axis=-1, keepdims=True)) if center else (None, p)
    rstd = 1.0 / np.sqrt((q * q).mean(axis=-1, keepdims=True) + eps)
    kr = _k(c, s) * (q * rstd)
    if round_before_weight:
        kr = rows.round_to(kr, x.dtype).astype(np.float64)
    y = _affine(kr, weight, weight_offset, bias) * after

    shape = x.shape[:axis] + ((groups,) if groups > 1 else ())  # of the statistics
    mean = None if mean is None else mean.reshape(shape)
    return NormForward(y.reshape(x.shape), residual_out, mean, rstd.reshape(shape))


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
    c: float | None = None,
    center: bool = False,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Array | None = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    x_dtype: DTypeLike | None = None,
    needs: Collection[str] = ("x", "weight", "bias", "gate"),
) -> NormGrads[Array]:
    """Differentiate `normalize_forward`, exactly for any eps, because rstd contains eps.

    x is the array that was normalised: the forward's residual if there is one; x_dtype is then the
    dtype of the forward's x. round_before_weight rounds k * r to x_dtype, by default x's dtype:
    dweight and n use the rounded value, and dr ignores the rounding. A rounded mean is
    corrected by the mean of p - mean. An absent operand in `needs` gives None.

    >>> import numpy as np
    >>> from cunorm import reference
    >>> x, dy = np.array([[3.0, -4.0]]), np.array([[1.0, 0.0]])
    >>> rstd = reference.normalize_forward(x, c=1, eps=0.0).rstd
    >>> reference.normalize_backward(dy, x, rstd=rstd, c=1).dx.round(6)
    array([[0.128, 0.096]])
    """
    if center and mean is None:
        raise ValueError("normalize_backward: mean is None, but center=True needs it")
    before, after = _gate_factors(gate, gate_activation, gate_position, axis, groups)
    s, row_rstd = rows.as_rows(x, axis, groups), rows.per_row(rstd, groups)
    p = s * before
    q = p if mean is None or not center else rows.centered(p, rows.per_row(mean, groups))[1]
    r = q * row_rstd
    k = _k(c, s)
    kr = k * r
    if round_before_weight:
        kr = rows.round_to(kr, x.dtype if x_dtype is None else x_dtype).astype(np.float64)

    dn = rows.as_rows(dy, axis, groups) * after
    dr = k * dn * rows.per_element(weight, weight_offset, groups)
    dq = row_rstd * (dr - r * (r * dr).mean(axis=-1, keepdims=True))
    dp = dq - dq.mean(axis=-1, keepdims=True) if center else dq

    grads: dict[str, Array] = {}
    if bias is not None and "bias" in needs:
        grads["dbias"] = rows.sum_over_rows(dn, x.shape[axis:])
    if weight is not None and "weight" in needs:
        grads["dweight"] = rows.sum_over_rows(dn * kr, x.shape[axis:])
    if "x" in needs:
        ds = dp * before
        if d_residual is not None:
            ds = ds + rows.as_rows(d_residual, axis, groups)
        grads["dx"] = grads["dresidual"] = ds.reshape(x.shape)
    if gate is not None and "gate" in needs:
        slope = ACTIVATIONS[gate_activation].slope(rows.as_rows(gate, axis, groups))
        n = _affine(kr, weight, weight_offset, bias)
        dg = dp * s if gate_position == "pre" else rows.as_rows(dy, axis, groups) * n
        grads["dgate"] = (slope * dg).reshape(x.shape)
    return NormGrads(**grads)


def _gate_factors(
    gate: Array | None, activation: str, position: str, axis: int, groups: int
) -> tuple[Float64 | float, Float64 | float]:
    """Return the gate's factor of rows before the norm, and its factor after it; 1 is no factor."""
    if gate is None:
        return 1.0, 1.0
    g = ACTIVATIONS[activation].value(rows.as_rows(gate, axis, groups))
    return (g, 1.0) if position == "pre" else (1.0, g)


def _affine(kr: Float64, weight: Array | None, offset: float, bias: Array | None) -> Float64:
    groups = kr.shape[1]
    n = kr * rows.per_element(weight, offset, groups)
    return n if bias is None else n + rows.per_element(bias, 0.0, groups)


def _k(c: float | None, s: Float64) -> float:
    return 1.0 if c is None else c / math.sqrt(s.shape[-1])
