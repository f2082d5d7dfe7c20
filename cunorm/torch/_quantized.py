# SPDX-License-Identifier: MIT
"""Row norms with a quantised result as functions that torch compiles and transforms."""

from __future__ import annotations  # keeps the names of type aliases in help()

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cunorm._arrays._torch_private import is_transforming, transforms
from cunorm._arrays.torch import no_gradients, no_tangents
from cunorm._core.memo import typed_key
from cunorm._core.types import Activation, DTypeLike, GatePosition, QuantizedDType, ScaleDType
from cunorm._dispatch import dispatch
from cunorm._row_norm.kernels import forward_inputs
from cunorm._row_norm.quantized_plan import ROW_QUANTIZED
from cunorm._row_norm.quantized_spec import array_or_none, quantized_scalars
from cunorm._row_norm.spec import Scalars, forward_scalars
from cunorm.results import QuantizedNorm
from cunorm.torch._autograd import (
    DispatchMode,
    check_tensors,
    dispatch_mode,
    refuse_tangents,
    specialized,
)
from cunorm.torch._library import QUANTIZED, Run, present, quantized_text
from cunorm.torch._pair import Context, Operand, Tensors
from cunorm.torch._tensors import needs_operator


def rms_norm_quantized(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-6,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Tensor | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: QuantizedDType = "float8_e4m3fn",
    scale: Tensor | float | None = None,
    block: int | None = None,
    scale_dtype: ScaleDType = "float32",
    absmax_bound: float | None = None,
    return_y: bool = False,
) -> QuantizedNorm[Tensor]:
    """Apply `rms_norm`, and quantise the result, as `cunorm.rms_norm_quantized` does.

    >>> import torch, cunorm.torch
    >>> found = cunorm.torch.rms_norm_quantized(torch.tensor([[3.0, 4.0]]), return_y=True)
    >>> found.q.float(), found.y
    (tensor([[320., 448.]]), tensor([[0.8485, 1.1314]]))
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    quantized = (dtype, scale, block, scale_dtype, absmax_bound, return_y)
    forward = forward_scalars("rms_norm_quantized", options, eps, None, residual_dtype)
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    return _quantized(forward, quantized, inputs, residual_dtype)


def layer_norm_quantized(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    residual_dtype: DTypeLike | None = None,
    eps: float = 1e-5,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Tensor | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: QuantizedDType = "float8_e4m3fn",
    scale: Tensor | float | None = None,
    block: int | None = None,
    scale_dtype: ScaleDType = "float32",
    absmax_bound: float | None = None,
    return_y: bool = False,
) -> QuantizedNorm[Tensor]:
    """Apply `layer_norm`, and quantise the result, as `cunorm.layer_norm_quantized` does.

    >>> import torch, cunorm.torch
    >>> x = torch.tensor([[1.0, 3.0]])
    >>> cunorm.torch.layer_norm_quantized(x, dtype=torch.int8, scale=0.01).q
    tensor([[-100,  100]], dtype=torch.int8)
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    quantized = (dtype, scale, block, scale_dtype, absmax_bound, return_y)
    forward = forward_scalars(
        "layer_norm_quantized", options, eps, None, residual_dtype, center=True
    )
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    return _quantized(forward, quantized, inputs, residual_dtype)


def normalize_quantized(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    residual_dtype: DTypeLike | None = None,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Tensor | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    dtype: QuantizedDType = "float8_e4m3fn",
    scale: Tensor | float | None = None,
    block: int | None = None,
    scale_dtype: ScaleDType = "float32",
    absmax_bound: float | None = None,
    return_y: bool = False,
) -> QuantizedNorm[Tensor]:
    """Apply `normalize`, and quantise the result, as `cunorm.normalize_quantized` does.

    >>> import torch, cunorm.torch
    >>> found = cunorm.torch.normalize_quantized(torch.tensor([[3.0, 4.0]]), c=1, dtype=torch.int8)
    >>> found.q, found.q * found.scale
    (tensor([[ 95, 127]], dtype=torch.int8), tensor([[0.5984, 0.8000]]))
    """
    options = (axis, groups, weight_offset, round_before_weight, gate_activation, gate_position)
    quantized = (dtype, scale, block, scale_dtype, absmax_bound, return_y)
    forward = forward_scalars(
        "normalize_quantized",
        options,
        eps,
        None,
        residual_dtype,
        center=center,
        c=typed_key(specialized(c)),
    )
    inputs = forward_inputs(x, weight=weight, bias=bias, gate=gate, residual=residual)
    return _quantized(forward, quantized, inputs, residual_dtype)


def _quantized(
    forward: Scalars, options: tuple[Any, ...], inputs: Tensors, residual_dtype: object
) -> QuantizedNorm[Tensor]:
    """Make a call; `options` are from dtype to return_y, as the caller gives them."""
    dtype, given, block, scale_dtype, bound, return_y = options
    scale = given if isinstance(given, Tensor) else specialized(given)
    options = (dtype, scale, block, scale_dtype, bound, return_y)
    arrays: tuple[Any, ...] = (*inputs, array_or_none(scale))
    q, found, y, residual = _call(quantized_scalars(forward, options), arrays)
    if residual is None and residual_dtype is not None:
        residual = inputs[ROW_QUANTIZED.x]
    return QuantizedNorm(q, found if given is None else given, y, residual)


def _call(scalars: Scalars, arrays: Tensors) -> Sequence[Any]:
    """Return the results of a call, None for those that are absent; x as the stream may be None."""
    function, names = scalars[0], ROW_QUANTIZED.inputs
    mode = dispatch_mode(function, names, arrays)
    if mode in (DispatchMode.PLAIN, DispatchMode.AUTOGRAD):
        try:  # the plain call refuses tensors that need a derivative
            return dispatch(ROW_QUANTIZED, scalars, (*arrays, *ROW_QUANTIZED.no_outputs, None))
        except (TypeError, ValueError):
            if not any(map(needs_operator, arrays)):
                raise
        check_tensors(function, names, arrays)
    run: Run = QUANTIZED
    if mode is DispatchMode.TRANSFORMED and is_transforming() and transforms() & {"Grad", "Jvp"}:
        run = partial(_Underived.apply, function, torch.is_grad_enabled())
    else:
        _refuse_gradients(function, names, arrays)
        refuse_tangents(function, names, arrays)
    return present(run(*arrays, quantized_text(*map(specialized, scalars))))


def _refuse_gradients(function: str, names: Sequence[str], arrays: Tensors) -> None:
    """Raise an error for a tensor whose gradient autograd would record."""
    for name, array in zip(names, arrays, strict=True) if torch.is_grad_enabled() else ():
        if isinstance(array, Tensor) and array.requires_grad:
            raise no_gradients(function, name)


class _Underived(torch.autograd.Function):
    """The operator as a Function, which raises an error where torch.func differentiates it."""

    generate_vmap_rule = True  # uses the vmap rule of the operator

    @staticmethod
    def forward(function: str, is_recorded: bool, *arguments: Any) -> tuple[Tensor, ...]:
        return QUANTIZED(*arguments)

    @staticmethod
    def setup_context(ctx: Context, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
        ctx.function, is_recorded, *_ = inputs  # grad mode is off here
        for name, is_wanted in zip(ROW_QUANTIZED.inputs, ctx.needs_input_grad[2:-1], strict=True):
            if is_wanted and is_recorded:
                raise no_gradients(ctx.function, name)

    @staticmethod
    def jvp(ctx: Context, *tangents: Operand) -> None:
        for name, tangent in zip(ROW_QUANTIZED.inputs, tangents[2:-1], strict=True):
            if tangent is not None:
                raise no_tangents(ctx.function, name)
