# SPDX-License-Identifier: MIT
"""LayerNorm, differentiable."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cunorm.results import AddNorm
from cunorm.row_norm._forward import Arrays, Norm
from cunorm.row_norm._variant import Variant
from cunorm.torch._row_norm import row_norm


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Tensor | None = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
) -> Tensor:
    """Shift and scale each row of x to mean 0 and variance 1.

    Without a gate, as `cunorm.layer_norm`, whose sources, rounding and memory rules are the same::

        y = (x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps) * (weight + weight_offset) + bias

    Parameters
    ----------
    x : Tensor
        Of at least one axis; float16, bfloat16, float32 or float64, on the CPU or on CUDA.
    weight, bias, gate : Tensor, optional
        weight and bias of the row's shape, ``x.shape[axis:]``; gate of x's shape. Each of its own
        dtype of the four, and differentiable as x is.
    eps, axis, groups, weight_offset, round_before_weight : optional
        As for `cunorm.layer_norm`.
    gate_activation, gate_position, dtype : optional
        As for `cunorm.layer_norm`.

    Returns
    -------
    Tensor
        y, contiguous, of x's shape and device.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `cunorm.layer_norm` does, and if an argument is no tensor.

    Notes
    -----
    For the backward x, rstd, mean, gate and the parameters are kept, and nothing else.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> bias = torch.zeros(2, requires_grad=True)
    >>> y = cunorm.torch.layer_norm(torch.tensor([[1.0, 3.0]]), bias=bias)
    >>> y.sum().backward()
    >>> y.detach(), bias.grad
    (tensor([[-1.0000,  1.0000]]), tensor([1., 1.]))
    """
    variant = Variant(True, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("layer_norm", variant, eps, weight_offset=weight_offset)
    arrays = Arrays(x, None, gate, weight, bias)
    return row_norm(norm, arrays, dtype).y


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Tensor | None = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
    residual_dtype: Any = None,
) -> AddNorm:
    """Add x to the residual stream, and apply `layer_norm` to the new stream.

    As `cunorm.add_layer_norm`, whose sources, rounding and memory rules are the same::

        s = x + residual                        rounded to residual's dtype: the new stream
        y = layer_norm(s, weight, bias)

    Parameters
    ----------
    x, residual : Tensor, and Tensor or None
        What is added to the stream, and the stream, of x's shape and its own dtype; None where it
        begins: then x is the new stream.
    weight, bias, eps, axis, groups, weight_offset, round_before_weight : optional
        As for `layer_norm`.
    gate, gate_activation, gate_position, dtype : optional
        As for `layer_norm`; the new stream is ungated.
    residual_dtype : dtype, optional
        As for `cunorm.add_layer_norm`.

    Returns
    -------
    AddNorm
        ``y`` and ``residual``, the new stream, both differentiable.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `layer_norm` does.

    Notes
    -----
    For the backward the new stream, rstd, mean, gate and the parameters are kept, and
    nothing else; the gradient that reaches the stream is added in the same pass.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> x = torch.tensor([[1.0, 7.0]], requires_grad=True)
    >>> y, stream = cunorm.torch.add_layer_norm(x, torch.zeros(1, 2))
    >>> (y.sum() + stream.sum()).backward()
    >>> x.grad
    tensor([[1., 1.]])
    """
    variant = Variant(True, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("add_layer_norm", variant, eps, weight_offset=weight_offset)
    arrays = Arrays(x, residual, gate, weight, bias)
    return row_norm(norm, arrays, dtype, residual_dtype, streams=True)
