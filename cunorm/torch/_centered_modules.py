# SPDX-License-Identifier: MIT
"""LayerNorm and GroupNorm, the modules of `torch.nn`, and what all modules share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cunorm.torch._group_norm import group_norm
from cunorm.torch._row_norm import layer_norm


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, run by `cunorm.torch.layer_norm`.

    Over the last axes of x, those of normalized_shape::

        q = x - mean(x)
        y = q / sqrt(mean(q * q) + eps) * weight + bias

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, bias, device, dtype : optional but the first
        As for `torch.nn.LayerNorm`, whose parameters and state_dict this subclass has.

    Raises
    ------
    ValueError
        If normalized_shape is empty, or x's last axes are not normalized_shape.
    TypeError, ValueError, ImportError, RuntimeError
        As `layer_norm` does.

    Notes
    -----
    Rounding is that of `RMSNorm`. The mean is corrected by the mean of what it leaves, so a
    constant row gives y = bias exactly.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> norm = cunorm.torch.LayerNorm(2)
    >>> norm(torch.tensor([[1.0, 3.0]]))
    tensor([[-1.0000,  1.0000]], grad_fn=<...>)
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        check_row_shape(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        axis, dtype = row_axis(self, x), autocast_dtype(x)
        return layer_norm(x, self.weight, self.bias, eps=self.eps, axis=axis, dtype=dtype)


class GroupNorm(torch.nn.GroupNorm):
    """`torch.nn.GroupNorm` with an activation, run by `cunorm.torch.group_norm`.

    The mean is over all positions and the channels of one group of one sample, weight and bias are
    those of the channel, g is the activation, in the same kernel::

        y = g((x - mean) / sqrt(mean((x - mean) ** 2) + eps) * weight + bias)

    Parameters
    ----------
    num_groups, num_channels, eps, affine, device, dtype : optional but the first two
        As for `torch.nn.GroupNorm`, whose parameters and state_dict this subclass has.
    activation : str, optional
        g: one of the activations of `cunorm.normalize`, or None.
    **options : optional
        Further arguments of the installed PyTorch's module, as ``bias=False``.

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
        options = {"eps": self.eps, "activation": self.activation, "dtype": autocast_dtype(x)}
        return group_norm(x, self.num_groups, self.weight, self.bias, channel_axis=1, **options)

    def extra_repr(self) -> str:
        """Return the options of `torch.nn.GroupNorm`, and the activation if it is set."""
        return f"{super().extra_repr()}{changed(self, GroupNorm)}"


def check_row_shape(module: Any) -> None:
    """Raise ValueError if a module's rows have no axis."""
    if not module.normalized_shape:
        raise ValueError(
            f"{type(module).__name__}: normalized_shape is (), expected one axis or more"
        )


def row_axis(module: Any, x: Tensor) -> int:
    """Return the first axis of x's rows, after checking that they have normalized_shape."""
    shape: tuple[int, ...] = module.normalized_shape
    if x.shape[-len(shape) :] != shape:
        raise ValueError(
            f"{type(module).__name__}: x has shape {tuple(x.shape)}, expected its last axes to be "
            f"normalized_shape, {shape}"
        )
    return -len(shape)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return float32 where torch.autocast computes norms in it and x is narrower, else None."""
    half = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and torch.is_autocast_enabled("cuda") else None


def changed(module: Any, base: type) -> str:
    """Return, for an extra_repr, the options that base adds and that differ from its defaults."""
    options = {name: getattr(module, name) for name in base.__annotations__}
    return "".join(f", {name}={v!r}" for name, v in options.items() if v != getattr(base, name))
