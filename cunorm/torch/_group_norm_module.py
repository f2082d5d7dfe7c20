# SPDX-License-Identifier: MIT
"""GroupNorm: the module of `torch.nn`, with cunorm's forward and an activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cunorm.torch._group_norm import group_norm
from cunorm.torch._modules import autocast_dtype, changed


class GroupNorm(torch.nn.GroupNorm):
    """`torch.nn.GroupNorm` with an activation, run by `cunorm.torch.group_norm`.

    The mean is over all positions and the channels of one group of one sample, weight and bias are
    those of the channel, g is the activation, in the same kernel::

        y = g((x - mean) / sqrt(mean((x - mean) ** 2) + eps) * weight + bias)

    Parameters, their names, the state_dict and `isinstance` are those of `torch.nn.GroupNorm`.

    Parameters
    ----------
    num_groups, num_channels : int
        Into how many groups the channels, axis 1 of x, fall; and how many channels there are.
    eps : float, optional
        Added to the variance.
    affine : bool, optional
        Whether there are weight and bias.
    device, dtype : optional
        Those of the parameters.
    activation : str, optional
        g: None or "identity", "relu", "silu", "gelu", "gelu_tanh", "sigmoid" or "tanh".
    **options : optional
        What else the installed PyTorch's module takes, as ``bias=False``.

    Raises
    ------
    ValueError
        If num_groups does not divide num_channels, or x's axis 1 is not of num_channels.
    TypeError, ValueError, ImportError, RuntimeError
        As `group_norm` does, and for an unknown activation, when it is run.

    Notes
    -----
    x is of shape (N, C, ...), in any memory format; y has the same, so that ``channels_last`` stays
    ``channels_last``, and neither is copied. Rounding is that of `RMSNorm`.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> norm = cunorm.torch.GroupNorm(2, 4, activation="silu")
    >>> norm
    GroupNorm(2, 4, eps=1e-05, affine=True, ...activation='silu')
    >>> norm(torch.ones(1, 4, 3, 3).to(memory_format=torch.channels_last)).sum()
    tensor(0., grad_fn=<...>)
    """

    activation: str | None = None

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **options)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        if x.dim() < 2 or x.shape[1] != self.num_channels:
            raise ValueError(
                f"{type(self).__name__}: x has shape {tuple(x.shape)}, expected (N, "
                f"{self.num_channels}, ...), as num_channels is {self.num_channels}"
            )
        return group_norm(
            x,
            self.num_groups,
            self.weight,
            self.bias,
            eps=self.eps,
            activation=self.activation,
            channel_axis=1,
            dtype=autocast_dtype(x),
        )

    def extra_repr(self) -> str:
        """Return what `torch.nn.GroupNorm` does, and the activation."""
        return f"{super().extra_repr()}{changed(self, GroupNorm, 'activation')}"
