# SPDX-License-Identifier: MIT
"""RMSNorm and L2 norm, differentiable."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cunorm.results import AddNorm
from cunorm.row_norm._forward import Arrays, Norm
from cunorm.row_norm._variant import Variant
from cunorm.torch._row_norm import row_norm


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
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
    """Divide each row of x by its root mean square.

    Without a gate, as `cunorm.rms_norm`, whose sources, rounding and memory rules are the same::

        y = x / sqrt(mean(x * x) + eps) * (weight + weight_offset)

    Parameters
    ----------
    x : Tensor
        Of at least one axis; float16, bfloat16, float32 or float64, on the CPU or on CUDA.
    weight, gate : Tensor, optional
        weight of the row's shape, ``x.shape[axis:]``; gate of x's shape. Each of its own dtype of
        the four, and differentiable as x is.
    eps, axis, groups, weight_offset, round_before_weight : optional
        As for `cunorm.rms_norm`.
    gate_activation, gate_position, dtype : optional
        As for `cunorm.rms_norm`.

    Returns
    -------
    Tensor
        y, contiguous, of x's shape and device.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `cunorm.rms_norm` does, and if an argument is no tensor.

    Notes
    -----
    For the backward x, rstd, gate and the parameters are kept, and nothing else.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> x = torch.tensor([[1.0, 7.0]], requires_grad=True)
    >>> cunorm.torch.rms_norm(x)[0, 0].backward()
    >>> x.grad
    tensor([[ 0.1960, -0.0280]])
    """
    variant = Variant(False, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("rms_norm", variant, eps, weight_offset=weight_offset)
    arrays = Arrays(x, None, gate, weight, None)
    return row_norm(norm, arrays, dtype).y


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    *,
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
    """Add x to the residual stream, and apply `rms_norm` to the new stream.

    As `cunorm.add_rms_norm`, whose sources, rounding and memory rules are the same::

        s = x + residual                        rounded to residual's dtype: the new stream
        y = rms_norm(s, weight)

    Parameters
    ----------
    x, residual : Tensor, and Tensor or None
        What is added to the stream, and the stream, of x's shape and its own dtype; None where it
        begins: then x is the new stream.
    weight, eps, axis, groups, weight_offset, round_before_weight : optional
        As for `rms_norm`.
    gate, gate_activation, gate_position, dtype : optional
        As for `rms_norm`; the new stream is ungated.
    residual_dtype : dtype, optional
        As for `cunorm.add_rms_norm`.

    Returns
    -------
    AddNorm
        ``y`` and ``residual``, the new stream, both differentiable.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `rms_norm` does.

    Notes
    -----
    For the backward the new stream, rstd, gate and the parameters are kept, and
    nothing else; the gradient that reaches the stream is added in the same pass.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> x = torch.tensor([[1.0, 7.0]], requires_grad=True)
    >>> y, stream = cunorm.torch.add_rms_norm(x, torch.zeros(1, 2))
    >>> (y.sum() + stream.sum()).backward()
    >>> x.grad
    tensor([[1.1680, 0.9760]])
    """
    variant = Variant(False, axis, groups, round_before_weight, gate_activation, gate_position)
    norm = Norm("add_rms_norm", variant, eps, weight_offset=weight_offset)
    arrays = Arrays(x, residual, gate, weight, None)
    return row_norm(norm, arrays, dtype, residual_dtype, streams=True)


def l2_norm(
    x: Tensor, *, eps: float = 1e-12, axis: int = -1, groups: int = 1, dtype: Any = None
) -> Tensor:
    """Scale each row of x to length 1.

    As `cunorm.l2_norm`, whose source, rounding and memory rules are the same::

        y = x / sqrt(sum(x * x) + eps)

    Parameters
    ----------
    x : Tensor
        As for `rms_norm`.
    eps, axis, groups, dtype : optional
        As for `cunorm.l2_norm`. ``torch.nn.functional.normalize`` divides by
        max(sqrt(sum(x * x)), eps) instead, and its ``dim`` is one axis alone.

    Returns
    -------
    Tensor
        y, contiguous, of x's shape and device.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `rms_norm` does.

    Notes
    -----
    For the backward x and rstd are kept, and nothing else.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> cunorm.torch.l2_norm(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """
    norm = Norm("l2_norm", Variant(axis=axis, groups=groups), eps, 1.0, eps_of_sum=True)
    return row_norm(norm, Arrays(x), dtype).y
