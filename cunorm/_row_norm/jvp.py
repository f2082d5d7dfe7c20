# SPDX-License-Identifier: MIT
"""Row norms in forward mode: the tangent of y."""

from __future__ import annotations  # keeps the names of type aliases in help()

from cunorm._core.memo import typed_key
from cunorm._core.types import Activation, ArrayT, Axis, DTypeLike, GatePosition, SupportsDLPack
from cunorm._dispatch import dispatch
from cunorm._row_norm.jvp_plan import ROW_JVP
from cunorm._row_norm.jvp_spec import jvp_scalars
from cunorm._row_norm.spec import UNIT_LENGTH, RowOptions


def normalize_jvp(
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    x_tangent: SupportsDLPack | None = None,
    weight_tangent: SupportsDLPack | None = None,
    bias_tangent: SupportsDLPack | None = None,
    gate_tangent: SupportsDLPack | None = None,
    rstd: SupportsDLPack,
    mean: SupportsDLPack | None = None,
    c: float | None = None,
    center: bool = False,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    x_dtype: DTypeLike | None = None,
    dtype: DTypeLike | None = None,
    out: SupportsDLPack | None = None,
) -> ArrayT:
    """Return the tangent of y of `normalize`: a Jacobian-vector product, for forward mode.

    A tangent is marked by ', a tangent that is not given is 0. k is c / sqrt(d), d is the number of
    elements of a row, mean() is over a row, g is the activation of the gate, and g' its
    derivative::

        p = x * g(gate)                                     if there is a pre-gate, else x
        p' = x' * g(gate) + x * g'(gate) * gate'            if there is a pre-gate, else x'
        r = (p - mean) * rstd                               without center, p * rstd
        r' = rstd * (p' - r * mean(r * p') - mean(p'))      mean(p') only with center
        n = k * r * (weight + weight_offset) + bias
        n' = k * r' * (weight + weight_offset) + k * r * weight' + bias'
        y' = n' * g(gate) + n * g'(gate) * gate'            if there is a post-gate, else n'

    The source is that of `normalize_backward`, of which this is the transpose: the sum of dy * y'
    is the sum of dx * x', dweight * weight', dbias * bias' and dgate * gate'. It is exact for any
    eps: rstd contains eps.

    Parameters
    ----------
    x : array
        The array that was normalised: the forward's ``residual`` if it has one, else its x.
    weight, bias : array, optional
        The weight and bias of the forward. Only gate_tangent with a post-gate needs the bias.
    x_tangent : array, optional
        The tangent of x, of x's shape. Of a residual stream, it is the tangent of the stream: that
        of the forward's x, with a gate of the branch that of ``x * g(gate)``, plus that of
        residual. Each tangent may have any of the four dtypes; one must be given.
    weight_tangent, bias_tangent, gate_tangent : array, optional
        The tangents of weight, bias and gate. The first two may have any shape that weight may
        have, the last has x's shape.
    rstd, mean : array
        The forward's results, of shape ``x.shape[:axis]`` (and `groups`, if not 1); float64 if x
        is, else float32 or float64, which is then the compute type. The mean must be given with
        center, and only then.
    c, center, axis, groups, weight_offset, gate, gate_activation, gate_position : optional
        The values that the forward got. A gate of the branch is left out: it belongs to x_tangent.
    round_before_weight, x_dtype : bool and dtype, optional
        For n and weight', k * r is rounded to x_dtype, by default x's dtype. The derivative of this
        rounding counts as 1.
    dtype : dtype, optional
        The dtype of the tangent; by default that of the forward's y.
    out : array, optional
        The array that is written and returned instead of a new one. It may be exactly an input of
        x's shape; otherwise it overlaps no input.

    Returns
    -------
    array
        The tangent of y, with x's shape, framework and device.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As for `normalize`, and also if the mean is missing, if no tangent is given, or if weight or
        gate is missing beside its tangent.

    Notes
    -----
    Rounding: the computation is in the compute type, and the result is rounded once, on the store.
    The rounding error of the mean is measured on x and removed. No bit depends on other rows or on
    strides. Overflow and strides are as for `normalize`.

    Second derivatives: the derivative of dx of `normalize_backward` is not a public function of
    arrays; `cunorm.torch` and `cunorm.jax` have derivatives of all orders.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, x_tangent = np.array([[3, 4]], dtype=np.float32), np.array([[1, 0]], dtype=np.float32)
    >>> saved = cunorm.normalize_forward(x, c=1)
    >>> cunorm.normalize_jvp(x, x_tangent=x_tangent, rstd=saved.rstd, c=1).round(4)
    array([[ 0.128, -0.096]], dtype=float32)

    The difference quotient is about the same:

    >>> step = np.float32(1e-3)
    >>> ((cunorm.normalize(x + step * x_tangent, c=1) - saved.y) / step).round(3)
    array([[ 0.128, -0.096]], dtype=float32)
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    key = typed_key(c)
    scalars = jvp_scalars(
        "normalize_jvp", options, center=center, c=key, dtype=dtype, x_dtype=x_dtype
    )
    operands = (x, weight, bias, gate, mean, rstd)
    tangents = (x_tangent, weight_tangent, bias_tangent, gate_tangent)
    return dispatch(ROW_JVP, scalars, (*operands, *tangents, out, None))[0]


def rms_norm_jvp(
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    x_tangent: SupportsDLPack | None = None,
    weight_tangent: SupportsDLPack | None = None,
    bias_tangent: SupportsDLPack | None = None,
    gate_tangent: SupportsDLPack | None = None,
    rstd: SupportsDLPack,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    x_dtype: DTypeLike | None = None,
    dtype: DTypeLike | None = None,
    out: SupportsDLPack | None = None,
) -> ArrayT:
    """Return the tangent of y of `rms_norm`.

    The formulas without a gate follow; `normalize_jvp` has those with a gate::

        r = x * rstd
        r' = rstd * (x' - r * mean(r * x'))
        y' = r' * (weight + weight_offset) + r * weight' + bias'

    All else is as for `normalize_jvp`.

    Parameters
    ----------
    x, weight, bias, x_tangent, weight_tangent, bias_tangent, gate_tangent, rstd : array
    axis, groups, weight_offset, round_before_weight, gate, gate_activation : optional
    gate_position, x_dtype, dtype, out : optional
        As for `normalize_jvp`; weight, bias and tangents are optional.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, x_tangent = np.array([[1, 7]], dtype=np.float32), np.array([[1, 0]], dtype=np.float32)
    >>> saved = cunorm.rms_norm_forward(x)
    >>> cunorm.rms_norm_jvp(x, x_tangent=x_tangent, rstd=saved.rstd).round(4)
    array([[ 0.196, -0.028]], dtype=float32)
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = jvp_scalars("rms_norm_jvp", options, dtype=dtype, x_dtype=x_dtype)
    operands = (x, weight, bias, gate, None, rstd)
    tangents = (x_tangent, weight_tangent, bias_tangent, gate_tangent)
    return dispatch(ROW_JVP, scalars, (*operands, *tangents, out, None))[0]


def layer_norm_jvp(
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    x_tangent: SupportsDLPack | None = None,
    weight_tangent: SupportsDLPack | None = None,
    bias_tangent: SupportsDLPack | None = None,
    gate_tangent: SupportsDLPack | None = None,
    rstd: SupportsDLPack,
    mean: SupportsDLPack,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    x_dtype: DTypeLike | None = None,
    dtype: DTypeLike | None = None,
    out: SupportsDLPack | None = None,
) -> ArrayT:
    """Return the tangent of y of `layer_norm`.

    The formulas without a gate follow; `normalize_jvp` has those with a gate::

        r = (x - mean) * rstd
        r' = rstd * (x' - r * mean(r * x') - mean(x'))
        y' = r' * (weight + weight_offset) + r * weight' + bias'

    All else is as for `normalize_jvp`.

    Parameters
    ----------
    x, weight, bias, x_tangent, weight_tangent, bias_tangent, gate_tangent, rstd, mean : array
    axis, groups, weight_offset, round_before_weight, gate, gate_activation : optional
    gate_position, x_dtype, dtype, out : optional
        As for `normalize_jvp`; weight, bias and tangents are optional.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, x_tangent = np.float32([[1, 3, 8]]), np.float32([[1, 0, 0]])
    >>> saved = cunorm.layer_norm_forward(x)
    >>> statistics = {"mean": saved.mean, "rstd": saved.rstd}
    >>> cunorm.layer_norm_jvp(x, x_tangent=x_tangent, **statistics).round(4)
    array([[ 0.1089, -0.1524,  0.0435]], dtype=float32)
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = jvp_scalars("layer_norm_jvp", options, center=True, dtype=dtype, x_dtype=x_dtype)
    operands = (x, weight, bias, gate, mean, rstd)
    tangents = (x_tangent, weight_tangent, bias_tangent, gate_tangent)
    return dispatch(ROW_JVP, scalars, (*operands, *tangents, out, None))[0]


def l2_norm_jvp(
    x: ArrayT,
    *,
    x_tangent: SupportsDLPack,
    rstd: SupportsDLPack,
    axis: Axis = -1,
    groups: int = 1,
    dtype: DTypeLike | None = None,
    out: SupportsDLPack | None = None,
) -> ArrayT:
    """Return the tangent of y of `l2_norm`.

    d is the number of elements of a row::

        r = x * rstd
        y' = rstd * (x' - r * mean(r * x')) / sqrt(d)

    All else is as for `normalize_jvp`.

    Parameters
    ----------
    x, x_tangent, rstd : array
    axis, groups, dtype, out : optional
        As for `normalize_jvp`.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, x_tangent = np.float32([[3, 4]]), np.float32([[1, 0]])
    >>> saved = cunorm.l2_norm_forward(x)
    >>> cunorm.l2_norm_jvp(x, x_tangent=x_tangent, rstd=saved.rstd).round(4)
    array([[ 0.128, -0.096]], dtype=float32)
    """
    options = RowOptions(axis, groups)
    scalars = jvp_scalars("l2_norm_jvp", options, c=UNIT_LENGTH, dtype=dtype)
    operands = (x, None, None, None, None, rstd)
    return dispatch(ROW_JVP, scalars, (*operands, x_tangent, None, None, None, out, None))[0]
