# SPDX-License-Identifier: MIT
"""Group norm and instance norm with an activation, differentiable."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cunorm.torch._group_norm_function import group_norm_of


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
    channel_axis: int = -1,
    dtype: Any = None,
) -> Tensor:
    """Shift and scale each group of channels of each sample to mean 0 and variance 1.

    As `cunorm.group_norm`, whose sources, rounding and memory layouts are the same; g is the
    activation::

        y = g((x - mean) / sqrt(mean((x - mean) ** 2) + eps) * weight + bias)

    Parameters
    ----------
    x : Tensor
        Of shape ``(N, ..., C)`` or, with channel_axis 1, ``(N, C, ...)``; float16, bfloat16,
        float32 or float64, on the CPU or on CUDA.
    num_groups : int
        Into how many groups of neighbours the channels fall; a divisor of C.
    weight, bias : Tensor, optional
        Of shape ``(C,)``, each of its own dtype of the four.
    eps, activation, dtype : optional
        As for `cunorm.group_norm`.
    channel_axis : int, optional
        -1 or 1: which axis of x is that of the channels; for x as torch's own norms have it 1,
        in ``torch.channels_last`` too.

    Returns
    -------
    Tensor
        y, of x's shape, memory layout and device.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `cunorm.group_norm` does, and if an argument is no tensor.

    Notes
    -----
    For the backward x, mean, rstd and the parameters are kept, and nothing else: what the
    activation was given is computed again.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> weight = torch.ones(4, requires_grad=True)
    >>> x = torch.arange(8.0).reshape(1, 2, 4)
    >>> cunorm.torch.group_norm(x, 2, weight, activation="relu").sum().backward()
    >>> weight.grad
    tensor([0.7276, 1.2127, 0.7276, 1.2127])
    """
    if num_groups is None:  # which means to `group_norm_of` as many as there are channels
        raise TypeError("group_norm: num_groups is None, expected an int")
    said = (num_groups, activation, channel_axis)
    return group_norm_of("group_norm", (x, weight, bias), said, eps, dtype)


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
    channel_axis: int = -1,
    dtype: Any = None,
) -> Tensor:
    """Apply `group_norm` with each channel a group of its own.

    As `cunorm.instance_norm`, whose source, rounding and memory layouts are the same.

    Parameters
    ----------
    x, weight, bias : Tensor
        As for `group_norm`.
    eps, activation, channel_axis, dtype : optional
        As for `group_norm`.

    Returns
    -------
    Tensor
        y, as from `group_norm`.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `group_norm` does.

    Notes
    -----
    For the backward x, mean, rstd and the parameters are kept, and nothing else.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> cunorm.torch.instance_norm(torch.tensor([[[1.0, 10.0], [3.0, 70.0]]]))
    tensor([[[-1.0000, -1.0000],
             [ 1.0000,  1.0000]]])
    """
    said = (None, activation, channel_axis)
    return group_norm_of("instance_norm", (x, weight, bias), said, eps, dtype)
