# SPDX-License-Identifier: MIT
"""Group norms that torch differentiates, compiles and transforms."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cunorm._group_norm.spec import EACH_CHANNEL
from cunorm.torch._autograd import call
from cunorm.torch._pair import GROUP


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

    As `cunorm.group_norm`, but differentiable, and without `out` and `workspace`; g is the
    activation. For the backward x, mean, rstd and the parameters are kept, and nothing else::

        y = g((x - mean) / sqrt(mean((x - mean) ** 2) + eps) * weight + bias)

    Parameters
    ----------
    x, weight, bias : Tensor
        On the CPU or on CUDA; all arguments are as for `cunorm.group_norm`.

    Returns
    -------
    Tensor
        y, of x's shape, memory layout and device.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `cunorm.group_norm` does, and if an operand is no tensor.

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
    params = ("group_norm", num_groups, activation, channel_axis, eps, dtype)
    return call(GROUP, params, (x, weight, bias))[0]


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

    As `cunorm.instance_norm`, but differentiable, and without `out` and `workspace`.

    Parameters
    ----------
    x, weight, bias : Tensor
        As for `group_norm`.

    Returns
    -------
    Tensor
        y, as from `group_norm`.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `group_norm` does.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> cunorm.torch.instance_norm(torch.tensor([[[1.0, 10.0], [3.0, 70.0]]]))
    tensor([[[-1.0000, -1.0000],
             [ 1.0000,  1.0000]]])
    """
    params = ("instance_norm", EACH_CHANNEL, activation, channel_axis, eps, dtype)
    return call(GROUP, params, (x, weight, bias))[0]
