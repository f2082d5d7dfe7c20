# SPDX-License-Identifier: MIT
"""The norms as functions that torch differentiates, compiles and transforms."""

from __future__ import annotations  # keeps the names of type aliases in help()

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cunorm._arrays.torch import PLAIN_TYPES
from cunorm._core.memo import typed_key
from cunorm._core.types import Activation, Axis, DTypeLike, GatePosition
from cunorm._group_norm.kernels import forward_inputs as group_inputs
from cunorm._group_norm.spec import EACH_CHANNEL
from cunorm._group_norm.spec import forward_scalars as group_scalars
from cunorm._row_norm.kernels import forward_inputs
from cunorm._row_norm.spec import forward_scalars, l2_scalars
from cunorm.results import AddNorm
from cunorm.torch._autograd import call, specialized
from cunorm.torch._dtensor import dtensor_call, is_dtensor
from cunorm.torch._pair import GROUP, ROW
from cunorm.torch._split import grouped_call

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Tensor | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    process_group: ProcessGroup | None = None,
    parameter_group: ProcessGroup | None = None,
) -> Tensor:
    """Divide each row of x by its root mean square, as `cunorm.rms_norm` does.

    `cunorm.torch` explains process_group and parameter_group.

    >>> import torch, cunorm.torch
    >>> x = torch.tensor([[1.0, 7.0]], requires_grad=True)
    >>> cunorm.torch.rms_norm(x)[0, 0].backward()
    >>> x.grad
    tensor([[ 0.1960, -0.0280]])
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = forward_scalars("rms_norm", options, eps, dtype)
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate)
    return _call(scalars, inputs, process_group, parameter_group)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Tensor | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    residual_dtype: DTypeLike | None = None,
    process_group: ProcessGroup | None = None,
    parameter_group: ProcessGroup | None = None,
) -> AddNorm[Tensor]:
    """Add x to the residual stream, and apply `rms_norm`, as `cunorm.add_rms_norm` does.

    `cunorm.torch` explains process_group and parameter_group.

    The backward also adds the gradient of the stream, in one pass.

    >>> import torch, cunorm.torch
    >>> x = torch.tensor([[1.0, 7.0]], requires_grad=True)
    >>> y, stream = cunorm.torch.add_rms_norm(x, torch.zeros(1, 2))
    >>> (y.sum() + stream.sum()).backward()
    >>> x.grad
    tensor([[1.1680, 0.9760]])
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    scalars = forward_scalars("add_rms_norm", options, eps, dtype, residual_dtype, streams=True)
    return _add_norm(scalars, inputs, process_group, parameter_group)


def l2_norm(
    x: Tensor,
    *,
    eps: float = 1e-12,
    axis: Axis = -1,
    groups: int = 1,
    dtype: DTypeLike | None = None,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Scale each row of x to length 1, as `cunorm.l2_norm` does.

    `cunorm.torch` explains process_group.

    ``torch.nn.functional.normalize`` instead divides by max(sqrt(sum(x * x)), eps). Its ``dim`` is
    the only axis of a row: ``dim=1`` is ``axis=(1,)``.

    >>> import torch, cunorm.torch
    >>> cunorm.torch.l2_norm(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """
    scalars = l2_scalars("l2_norm", axis, groups, eps=eps, dtype=dtype)
    return _call(scalars, forward_inputs(x), process_group, None)[0]


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Tensor | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    process_group: ProcessGroup | None = None,
    parameter_group: ProcessGroup | None = None,
) -> Tensor:
    """Shift and scale each row of x to mean 0 and variance 1, as `cunorm.layer_norm` does.

    `cunorm.torch` explains process_group and parameter_group.

    >>> import torch, cunorm.torch
    >>> bias = torch.zeros(2, requires_grad=True)
    >>> y = cunorm.torch.layer_norm(torch.tensor([[1.0, 3.0]]), bias=bias)
    >>> y.sum().backward()
    >>> y.detach(), bias.grad
    (tensor([[-1.0000,  1.0000]]), tensor([1., 1.]))
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = forward_scalars("layer_norm", options, eps, dtype, center=True)
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate)
    return _call(scalars, inputs, process_group, parameter_group)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Tensor | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    residual_dtype: DTypeLike | None = None,
    process_group: ProcessGroup | None = None,
    parameter_group: ProcessGroup | None = None,
) -> AddNorm[Tensor]:
    """Add x to the residual stream, and apply `layer_norm`, as `cunorm.add_layer_norm` does.

    `cunorm.torch` explains process_group and parameter_group.

    >>> import torch, cunorm.torch
    >>> x = torch.tensor([[1.0, 7.0]], requires_grad=True)
    >>> y, stream = cunorm.torch.add_layer_norm(x, torch.zeros(1, 2))
    >>> (y.sum() + stream.sum()).backward()
    >>> x.grad
    tensor([[1., 1.]])
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    scalars = forward_scalars(
        "add_layer_norm", options, eps, dtype, residual_dtype, center=True, streams=True
    )
    return _add_norm(scalars, inputs, process_group, parameter_group)


def normalize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Tensor | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    process_group: ProcessGroup | None = None,
    parameter_group: ProcessGroup | None = None,
) -> Tensor:
    """Scale each row of x to the length c, as `cunorm.normalize` does.

    `cunorm.torch` explains process_group and parameter_group.

    >>> import torch, cunorm.torch
    >>> x = torch.tensor([[3.0, 4.0]], requires_grad=True)
    >>> y = cunorm.torch.normalize(x, c=1)
    >>> y[0, 0].backward()
    >>> y.detach(), x.grad
    (tensor([[0.6000, 0.8000]]), tensor([[ 0.1280, -0.0960]]))
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    scalars = forward_scalars(
        "normalize", options, eps, dtype, center=center, c=typed_key(specialized(c))
    )
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate)
    return _call(scalars, inputs, process_group, parameter_group)[0]


def add_normalize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: Axis = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Tensor | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: DTypeLike | None = None,
    residual_dtype: DTypeLike | None = None,
    process_group: ProcessGroup | None = None,
    parameter_group: ProcessGroup | None = None,
) -> AddNorm[Tensor]:
    """Add x to the residual stream, and apply `normalize`, as `cunorm.add_normalize` does.

    `cunorm.torch` explains process_group and parameter_group.

    >>> import torch, cunorm.torch
    >>> x = torch.tensor([[1.0, 7.0]], requires_grad=True)
    >>> y, stream = cunorm.torch.add_normalize(x, torch.zeros(1, 2))
    >>> (y.sum() + stream.sum()).backward()
    >>> x.grad
    tensor([[1.1680, 0.9760]])
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    key = typed_key(specialized(c))
    scalars = forward_scalars(
        "add_normalize", options, eps, dtype, residual_dtype, center=center, c=key, streams=True
    )
    return _add_norm(scalars, inputs, process_group, parameter_group)


def _call(
    scalars: tuple[Any, ...], inputs: tuple[Any, ...], process_group: Any, parameter_group: Any
) -> Sequence[Any]:
    """Return the results of a row norm, of which groups of processes may share the rows."""
    kind = type(inputs[0])
    if kind not in PLAIN_TYPES and is_dtensor(kind):
        return dtensor_call(scalars, inputs, process_group, parameter_group)
    if process_group is parameter_group is None:
        return call(ROW, scalars, inputs)
    return grouped_call(scalars, inputs, process_group, parameter_group)


def _add_norm(
    scalars: tuple[Any, ...], inputs: tuple[Any, ...], *groups: ProcessGroup | None
) -> AddNorm[Tensor]:
    y, stream, *_ = _call(scalars, inputs, *groups)
    return AddNorm(y, inputs[0] if stream is None else stream)


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: Activation | None = None,
    channel_axis: int = 1,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Shift and scale each group of channels of each sample, as `cunorm.group_norm` does.

    The channels are axis 1 by default, as in PyTorch; in `cunorm` they are axis -1.

    >>> import torch, cunorm.torch
    >>> weight = torch.ones(4, requires_grad=True)
    >>> x = torch.arange(8.0).reshape(1, 2, 4).mT  # (N, C, positions)
    >>> cunorm.torch.group_norm(x, 2, weight, activation="relu").sum().backward()
    >>> weight.grad
    tensor([0.7276, 1.2127, 0.7276, 1.2127])
    """
    scalars = group_scalars("group_norm", num_groups, activation, channel_axis, eps, dtype)
    return call(GROUP, scalars, group_inputs(x, weight=weight, bias=bias))[0]


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: Activation | None = None,
    channel_axis: int = 1,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Apply `group_norm` with each channel as a separate group.

    If x has one position or the shape (N, C), y is ``activation(bias)``; PyTorch raises an error.

    >>> import torch, cunorm.torch
    >>> cunorm.torch.instance_norm(torch.tensor([[[1.0, 3.0], [10.0, 70.0]]]))
    tensor([[[-1.0000,  1.0000],
             [-1.0000,  1.0000]]])
    """
    scalars = group_scalars("instance_norm", EACH_CHANNEL, activation, channel_axis, eps, dtype)
    return call(GROUP, scalars, group_inputs(x, weight=weight, bias=bias))[0]
