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

    Rounding is that of `cunorm.normalize`. ``torch.autocast`` changes y as for `RMSNorm`.

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, bias, device, dtype : optional but the first
        As for `torch.nn.LayerNorm`, whose parameters and state_dict this subclass has.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `layer_norm`; ValueError also if normalized_shape is empty or not x's last axes.

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

    For g, the activation, and means over all positions and channels of a group of a sample::

        y = g((x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps) * weight + bias)

    x has shape (N, C, ...). y has its memory format, and neither is copied. Rounding is that of
    `cunorm.group_norm`. ``torch.autocast`` changes y as for `RMSNorm`.

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
    TypeError, ValueError, ImportError, RuntimeError
        As `group_norm`; ValueError also if num_groups does not divide num_channels, or x's axis 1
        is not of num_channels. An unknown activation is an error in forward.

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

    _cunorm_options: tuple[str, ...] = ("activation",)
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
        return f"{super().extra_repr()}{changed(self)}"


def check_row_shape(module: Any) -> None:
    """Raise ValueError if a module's rows have no axis."""
    if not module.normalized_shape:
        kind = type(module).__name__
        raise ValueError(f"{kind}: normalized_shape is (), expected one axis or more")


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


def changed(module: Any) -> str:
    """Return, for an extra_repr, the options beyond torch's that differ from their defaults."""
    kind, options = type(module), {name: getattr(module, name) for name in module._cunorm_options}
    return "".join(f", {name}={v!r}" for name, v in options.items() if v != getattr(kind, name))
