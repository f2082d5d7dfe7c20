# SPDX-License-Identifier: MIT
"""The generic row norm, differentiable."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cunorm.results import AddNorm
from cunorm.row_norm._forward import Arrays, Norm
from cunorm.row_norm._variant import Variant
from cunorm.torch._row_norm import row_norm


def normalize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    gate: Tensor | None = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
    dtype: Any = None,
) -> Tensor:
    """Normalise each row of x to the length c, by default the square root of its width.

    Without a gate, as `cunorm.normalize`, whose sources, rounding and memory rules are the same::

        q = x - mean(x)     if center, else x
        y = c / sqrt(d) * q / sqrt(mean(q * q) + eps) * (weight + weight_offset) + bias

    Parameters
    ----------
    x : Tensor
        Of at least one axis; float16, bfloat16, float32 or float64, on the CPU or on CUDA.
    weight, bias, gate : Tensor, optional
        weight and bias of the row's shape, ``x.shape[axis:]``; gate of x's shape. Each of its own
        dtype of the four, and differentiable as x is.
    c, center, eps, axis, groups, weight_offset, round_before_weight : optional
        As for `cunorm.normalize`.
    gate_activation, gate_position, dtype : optional
        As for `cunorm.normalize`.

    Returns
    -------
    Tensor
        y, contiguous, of x's shape and device.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `cunorm.normalize` does, and if an argument is no tensor.

    Notes
    -----
    For the backward x, rstd, mean (if centred), gate and the parameters are kept, and nothing else.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> x = torch.tensor([[3.0, 4.0]], requires_grad=True)
    >>> y = cunorm.torch.normalize(x, c=1)
    >>> y[0, 0].backward()
    >>> y.detach(), x.grad
    (tensor([[0.6000, 0.8000]]), tensor([[ 0.1280, -0.0960]]))
    """
    variant = Variant(center, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("normalize", variant, eps, c, weight_offset=weight_offset)
    arrays = Arrays(x, None, gate, weight, bias)
    return row_norm(norm, arrays, dtype).y


def add_normalize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
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
    """Add x to the residual stream, and apply `normalize` to the new stream.

    As `cunorm.add_normalize`, whose sources, rounding and memory rules are the same::

        s = x + residual                        rounded to residual's dtype: the new stream
        y = normalize(s, weight, bias)

    Parameters
    ----------
    x, residual : Tensor, and Tensor or None
        What is added to the stream, and the stream, of x's shape and its own dtype; None where it
        begins: then x is the new stream.
    weight, bias, c, center, eps, axis, groups, weight_offset, round_before_weight : optional
        As for `normalize`.
    gate, gate_activation, gate_position, dtype : optional
        As for `normalize`; the new stream is ungated.
    residual_dtype : dtype, optional
        As for `cunorm.add_normalize`.

    Returns
    -------
    AddNorm
        ``y`` and ``residual``, the new stream, both differentiable.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `normalize` does.

    Notes
    -----
    For the backward the new stream, rstd, mean (if centred), gate and the parameters are kept, and
    nothing else; the gradient that reaches the stream is added in the same pass.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> x = torch.tensor([[1.0, 7.0]], requires_grad=True)
    >>> y, stream = cunorm.torch.add_normalize(x, torch.zeros(1, 2))
    >>> (y.sum() + stream.sum()).backward()
    >>> x.grad
    tensor([[1.1680, 0.9760]])
    """
    variant = Variant(center, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("add_normalize", variant, eps, c, weight_offset=weight_offset)
    arrays = Arrays(x, residual, gate, weight, bias)
    return row_norm(norm, arrays, dtype, residual_dtype, streams=True)
