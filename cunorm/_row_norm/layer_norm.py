# SPDX-License-Identifier: MIT
"""LayerNorm: for inference, with the residual stream, and forward and backward for training."""

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


def layer_norm(
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    eps: float = 1e-5,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    mean: SupportsDLPack | None = None,
    rstd: SupportsDLPack | None = None,
    correction: SupportsDLPack | None = None,
    x_dtype: DTypeLike | None = None,
    dtype: DTypeLike | None = None,
    out: SupportsDLPack | None = None,
) -> ArrayT:
    """Shift and scale each row of x to mean 0 and variance 1.

    The formula without a gate follows; `normalize` has the formula with a gate::

        q = x - mean(x)
        y = q / sqrt(mean(q * q) + eps) * (weight + weight_offset) + bias

    Source: J. L. Ba, J. R. Kiros and G. E. Hinton, "Layer Normalization", arXiv:1607.06450.
    Result, errors, rounding, overflow and strides are as for `normalize`.

    Parameters
    ----------
    x, weight, bias : array
    eps, axis, groups, weight_offset, round_before_weight : optional
    gate, gate_activation, gate_position, mean, rstd, correction, x_dtype, dtype, out : optional
        As for `normalize`; weight and bias are optional.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 3], [10000, 10002]], dtype=np.float32)
    >>> cunorm.layer_norm(x, bias=np.array([0, 5], dtype=np.float32)).round(4)
    array([[-1.,  6.],
           [-1.,  6.]], dtype=float32)

    A gate as in gated linear attention, with each half of the last axis normalised separately:

    >>> x, gate = np.float32([[1, 3, 7, 5]]), np.float32([[0, 1, 2, 3]])
    >>> cunorm.layer_norm(x, gate=gate, gate_activation="sigmoid", groups=2).round(3)
    array([[-0.5  ,  0.731,  0.881, -0.953]], dtype=float32)

    The channels of an image (N, C, H, W) at each position, as in ConvNeXt's LayerNorm2d:

    >>> image = np.float32([1, 5, 3, 1, 7, 5]).reshape(1, 3, 1, 2)
    >>> cunorm.layer_norm(image, axis=(1,)).round(3)[0, :, 0]
    array([[-1.069,  0.707],
           [-0.267, -1.414],
           [ 1.336,  0.707]], dtype=float32)

    adaLN, with a scale and a shift for each sample, here for two samples of two rows:

    >>> x = np.float32([[[1, 3], [7, 5]], [[2, 6], [4, 0]]])
    >>> scale, shift = np.float32([[[0, 1]], [[0, 0]]]), np.float32([[[0, 0]], [[5, 5]]])
    >>> cunorm.layer_norm(x, scale, shift, weight_offset=1.0).round(3)
    array([[[-1.,  2.],
            [ 1., -2.]],
    <BLANKLINE>
           [[ 4.,  6.],
            [ 6.,  4.]]], dtype=float32)
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = forward_scalars("layer_norm", options, eps, dtype, center=True)
    if mean is not None or rstd is not None or correction is not None or x_dtype is not None:
        given = (x, weight, bias, gate, mean, rstd, correction, out)
        return given_norm(scalars, given, None, x_dtype)
    arrays = forward_arrays(x, weight=weight, bias=bias, gate=gate, y=out)
    return dispatch(ROW_FORWARD, scalars, arrays)[0]


def add_layer_norm(
    x: ArrayT,
    residual: SupportsDLPack | None,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    eps: float = 1e-5,
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
    """Add x to the residual stream, and apply `layer_norm` to the new stream.

    ::

        s = x + residual                        rounded to its dtype: the new stream
        y = layer_norm(s, weight, bias)         with the gate of `layer_norm`, if there is a gate

    Sources: `layer_norm` and `add_normalize`; results, errors and rounding are as for the latter.

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
    >>> x, stream = np.array([[1, 2]], dtype=np.float32), np.array([[4, 7]], dtype=np.float32)
    >>> result = cunorm.add_layer_norm(x, stream, out=cunorm.AddNorm(residual=stream))
    >>> result.y.round(4), stream
    (array([[-1.,  1.]], dtype=float32), array([[5., 9.]], dtype=float32))
    """
    validate.out_type("add_layer_norm", out, AddNorm)
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = forward_scalars(
        "add_layer_norm", options, eps, dtype, residual_dtype, center=True, streams=True
    )
    arrays = forward_arrays(
        x, weight=weight, bias=bias, gate=gate, residual=residual, out=out and NormForward(*out)
    )
    return AddNorm(*dispatch(ROW_FORWARD, scalars, arrays)[:2])


def layer_norm_forward(
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    residual: SupportsDLPack | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-5,
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
    """Run `layer_norm`, or `add_layer_norm`, and also return what `layer_norm_backward` needs.

    The formulas without a gate follow; `normalize_forward` has those with a gate::

        s = x + residual    rounded to its dtype: the new stream; without residual, s = x
        q = s - mean(s)
        rstd = 1 / sqrt(mean(q * q) + eps)
        y = q * rstd * (weight + weight_offset) + bias

    Sources: `layer_norm` and `add_normalize`. All else is as for `normalize_forward`.

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
    >>> saved = cunorm.layer_norm_forward(np.array([[3, 7]], dtype=np.float32))
    >>> saved.y.round(4), saved.mean, saved.rstd.round(4)
    (array([[-1.,  1.]], dtype=float32), array([5.], dtype=float32), array([0.5], dtype=float32))
    """
    validate.out_type("layer_norm_forward", out, NormForward)
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = forward_scalars(
        "layer_norm_forward", options, eps, dtype, residual_dtype, center=True, saves=True
    )
    arrays = forward_arrays(x, weight=weight, bias=bias, gate=gate, residual=residual, out=out)
    return NormForward(*dispatch(ROW_FORWARD, scalars, arrays))


def layer_norm_backward(
    dy: SupportsDLPack,
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    rstd: SupportsDLPack,
    mean: SupportsDLPack | None,
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
    correction: SupportsDLPack | None = None,
    count: int | None = None,
    out: NormGrads[SupportsDLPack | None] | None = None,
    workspace: SupportsDLPack | None = None,
    accumulate: bool = False,
) -> NormGrads[ArrayT]:
    """Return the gradients of `layer_norm` and of `add_layer_norm`.

    The formulas without a gate follow; `normalize_backward` has those with a gate::

        r = (x - mean) * rstd
        dr = dy * (weight + weight_offset)
        dx = rstd * (dr - r * mean(r * dr) - mean(dr)) + d_residual
        dweight = sum over rows of dy * r
        dbias = sum over rows of dy

    The source, results, errors and rounding are those of `normalize_backward`.

    Parameters
    ----------
    dy, x, weight, bias, rstd, mean, d_residual, branch : array
    axis, groups, weight_offset, round_before_weight, gate, gate_activation : optional
    gate_position, x_dtype, needs, sums, correction, count, out, workspace, accumulate : optional
        As for `normalize_backward`; weight, bias, d_residual and branch are optional.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, dy = np.array([[1, 2, 3]], dtype=np.float32), np.array([[1, 0, 0]], dtype=np.float32)
    >>> saved = cunorm.layer_norm_forward(x)
    >>> grads = cunorm.layer_norm_backward(dy, x, rstd=saved.rstd, mean=saved.mean)
    >>> grads.dx.round(3)
    array([[ 0.204, -0.408,  0.204]], dtype=float32)
    """
    validate.out_type("layer_norm_backward", out, NormGrads)
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = backward_scalars(
        "layer_norm_backward",
        options,
        center=True,
        x_dtype=x_dtype,
        needs=needs,
        accumulate=accumulate,
    )
    inputs = backward_inputs(
        dy,
        x,
        weight=weight,
        bias=bias,
        gate=gate,
        mean=mean,
        rstd=rstd,
        d_residual=d_residual,
        branch=branch,
    )
    outputs = (*(out or ROW_BACKWARD.no_outputs), workspace)
    if sums is not None or correction is not None or count is not None:
        return given_backward(scalars, inputs, (sums, correction, count), outputs)
    return NormGrads(*dispatch(ROW_BACKWARD, scalars, (*inputs, *outputs)))
