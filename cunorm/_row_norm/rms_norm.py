# SPDX-License-Identifier: MIT
"""RMSNorm: for inference, with the residual stream, and forward and backward for training."""

from __future__ import annotations  # keeps the names of type aliases in help()

from cunorm._core import validate
from cunorm._core.types import (
    Activation,
    ArrayT,
    Axis,
    DTypeLike,
    GatePosition,
    Needs,
    SupportsDLPack,
)
from cunorm._dispatch import dispatch
from cunorm._row_norm.kernels import backward_inputs, forward_arrays
from cunorm._row_norm.plan import ROW_BACKWARD, ROW_FORWARD
from cunorm._row_norm.spec import NEEDS, backward_scalars, forward_scalars
from cunorm._row_norm.split import given_backward, given_norm
from cunorm.results import AddNorm, NormForward, NormGrads, Sums


def rms_norm(
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    rstd: SupportsDLPack | None = None,
    x_dtype: DTypeLike | None = None,
    dtype: DTypeLike | None = None,
    out: SupportsDLPack | None = None,
) -> ArrayT:
    """Divide each row of x by its root mean square.

    The formula without a gate follows; `normalize` has the formula with a gate::

        y = x / sqrt(mean(x * x) + eps) * (weight + weight_offset) + bias

    Source: B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    Result, errors, rounding, overflow and strides are as for `normalize`.

    Parameters
    ----------
    x, weight, bias : array
    axis, groups, weight_offset, round_before_weight : optional
    gate, gate_activation, gate_position, rstd, x_dtype, dtype, out : optional
        As for `normalize`; weight and bias are optional, and bias is given by keyword.
    eps : float, optional
        As for `normalize`. PyTorch's default is the machine epsilon of the type in which it
        computes; for half precision this is float32.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 7], [10, -70]], dtype=np.float32)
    >>> weight = np.array([1, 10], dtype=np.float16)
    >>> cunorm.rms_norm(x, weight).round(4)
    array([[  0.2,  14. ],
           [  0.2, -14. ]], dtype=float32)

    The norms of Gemma, and of Llama, which rounds to x's dtype (here float16) before weight:

    >>> cunorm.rms_norm(x, weight, weight_offset=1.0).round(4)
    array([[  0.4,  15.4],
           [  0.4, -15.4]], dtype=float32)
    >>> cunorm.rms_norm(x.astype("float16"), weight.astype("float32"), round_before_weight=True)
    array([[  0.19995117,  14.003906  ],
           [  0.19995117, -14.003906  ]], dtype=float32)

    The gated norm of Mamba-2, here with two groups:

    >>> x, z = np.float32([[1, 7, 3, 4]]), np.float32([[0, 7, -1, -1]])
    >>> cunorm.rms_norm(x, gate=z, gate_position="pre", groups=2).round(3)
    array([[ 0.   ,  1.414, -0.849, -1.131]], dtype=float32)

    The heads of the queries in a fused qkv, each with the same weight, normalised in place:

    >>> qkv = np.full((1, 3, 2, 2), 5, dtype=np.float32)  # tokens, q and k and v, heads, width
    >>> q = qkv[:, 0]
    >>> cunorm.rms_norm(q, weight, out=q)[0, 1].round(3), qkv[0, 1, 1]
    (array([ 1., 10.], dtype=float32), array([5., 5.], dtype=float32))
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = forward_scalars("rms_norm", options, eps, dtype)
    if rstd is not None or x_dtype is not None:
        given = (x, weight, bias, gate, None, rstd, None, out)
        return given_norm(scalars, given, None, x_dtype)
    arrays = forward_arrays(x, weight=weight, bias=bias, gate=gate, y=out)
    return dispatch(ROW_FORWARD, scalars, arrays)[0]


def add_rms_norm(
    x: ArrayT,
    residual: SupportsDLPack | None,
    weight: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    residual_dtype: DTypeLike | None = None,
    out: AddNorm[SupportsDLPack | None] | None = None,
) -> AddNorm[ArrayT]:
    """Add x to the residual stream, and apply `rms_norm` to the new stream.

    ::

        s = x + residual                        rounded to its dtype: the new stream
        y = rms_norm(s, weight, bias=bias)      with the gate of `rms_norm`, if there is a gate

    Sources: `rms_norm` and `add_normalize`; results, errors and rounding are as for the latter.

    Parameters
    ----------
    x, residual, weight, bias : array
    eps, axis, groups, weight_offset, round_before_weight : optional
    gate, gate_activation, gate_position, dtype, residual_dtype, out : optional
        As for `add_normalize`; weight and bias are optional, and residual may be None.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 7]], dtype=np.float32)
    >>> y, stream = cunorm.add_rms_norm(x, None)
    >>> stream is x, y.round(4)
    (True, array([[0.2, 1.4]], dtype=float32))
    """
    validate.out_type("add_rms_norm", out, AddNorm)
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = forward_scalars("add_rms_norm", options, eps, dtype, residual_dtype, streams=True)
    arrays = forward_arrays(
        x, weight=weight, bias=bias, gate=gate, residual=residual, out=out and NormForward(*out)
    )
    return AddNorm(*dispatch(ROW_FORWARD, scalars, arrays)[:2])


def rms_norm_forward(
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    residual: SupportsDLPack | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    out: NormForward[SupportsDLPack | None] | None = None,
) -> NormForward[ArrayT]:
    """Run `rms_norm`, or `add_rms_norm`, and also return what `rms_norm_backward` needs.

    The formulas without a gate follow; `normalize_forward` has those with a gate::

        s = x + residual    rounded to its dtype: the new stream; without residual, s = x
        rstd = 1 / sqrt(mean(s * s) + eps)
        y = s * rstd * (weight + weight_offset) + bias

    Sources: `rms_norm` and `add_normalize`. All else is as for `normalize_forward`; mean is None.

    Parameters
    ----------
    x, weight, bias, residual : array
    residual_dtype, eps, axis, groups, weight_offset, round_before_weight : optional
    gate, gate_activation, gate_position, dtype, out : optional
        As for `normalize_forward`; weight, bias and residual are optional.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> saved = cunorm.rms_norm_forward(np.array([[1, 7]], dtype=np.float32))
    >>> saved.y.round(4), saved.rstd.round(4)
    (array([[0.2, 1.4]], dtype=float32), array([0.2], dtype=float32))
    """
    validate.out_type("rms_norm_forward", out, NormForward)
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = forward_scalars("rms_norm_forward", options, eps, dtype, residual_dtype, saves=True)
    arrays = forward_arrays(x, weight=weight, bias=bias, gate=gate, residual=residual, out=out)
    return NormForward(*dispatch(ROW_FORWARD, scalars, arrays))


def rms_norm_backward(
    dy: SupportsDLPack,
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    rstd: SupportsDLPack,
    d_residual: SupportsDLPack | None = None,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    branch: SupportsDLPack | None = None,
    x_dtype: DTypeLike | None = None,
    needs: Needs = NEEDS,
    sums: Sums[SupportsDLPack | None] | None = None,
    count: int | None = None,
    out: NormGrads[SupportsDLPack | None] | None = None,
    workspace: SupportsDLPack | None = None,
    accumulate: bool = False,
) -> NormGrads[ArrayT]:
    """Return the gradients of `rms_norm` and of `add_rms_norm`.

    The formulas without a gate follow; `normalize_backward` has those with a gate::

        r = x * rstd
        dr = dy * (weight + weight_offset)
        dx = rstd * (dr - r * mean(r * dr)) + d_residual
        dweight = sum over rows of dy * r
        dbias = sum over rows of dy

    The source, results, errors and rounding are those of `normalize_backward`.

    Parameters
    ----------
    dy, x, weight, bias, rstd, d_residual, branch : array
    axis, groups, weight_offset, round_before_weight, gate, gate_activation : optional
    gate_position, x_dtype, needs, sums, count, out, workspace, accumulate : optional
        As for `normalize_backward`; weight, bias, d_residual and branch are optional.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, dy = np.array([[1, 7]], dtype=np.float32), np.array([[1, 0]], dtype=np.float32)
    >>> saved = cunorm.rms_norm_forward(x)
    >>> cunorm.rms_norm_backward(dy, x, rstd=saved.rstd).dx.round(4)
    array([[ 0.196, -0.028]], dtype=float32)
    """
    validate.out_type("rms_norm_backward", out, NormGrads)
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = backward_scalars(
        "rms_norm_backward", options, x_dtype=x_dtype, needs=needs, accumulate=accumulate
    )
    inputs = backward_inputs(
        dy,
        x,
        weight=weight,
        bias=bias,
        gate=gate,
        rstd=rstd,
        d_residual=d_residual,
        branch=branch,
    )
    outputs = (*(out or ROW_BACKWARD.no_outputs), workspace)
    if sums is not None or count is not None:
        return given_backward(scalars, inputs, (sums, None, count), outputs)
    return NormGrads(*dispatch(ROW_BACKWARD, scalars, (*inputs, *outputs)))
