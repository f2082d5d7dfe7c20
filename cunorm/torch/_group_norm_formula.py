# SPDX-License-Identifier: MIT
"""The gradients of group norms in torch's own operations, for who differentiates them again."""

from __future__ import annotations

from typing import Any

import torch

from cunorm.torch._row_norm_formula import ACTIVATIONS, recorded_gradients


def differentiable_gradients(
    num_groups: int | None, activation: str, channel_axis: int, eps: float, saved: Any, dy: Any
) -> list[Any]:
    """Return the gradients of x, weight and bias, which autograd may record."""
    x, _, _, weight, bias = saved

    def y(x: Any, weight: Any, bias: Any) -> Any:
        compute = torch.float64 if x.dtype == torch.float64 else torch.float32
        channels_first = x.to(compute).movedim(channel_axis, 1)
        samples, channels = channels_first.shape[:2]
        groups = channels_first.reshape(samples, num_groups or channels, -1)
        q = groups - groups.mean(-1, keepdim=True)
        r = q * (q.square().mean(-1, keepdim=True) + eps).rsqrt()
        n = r.reshape(samples, channels, -1)
        n = n if weight is None else n * weight.to(compute)[:, None]
        n = n if bias is None else n + bias.to(compute)[:, None]
        normalised = ACTIVATIONS[activation](n).reshape(channels_first.shape)
        return normalised.movedim(1, channel_axis).to(dy.dtype)

    return recorded_gradients(y, (x, weight, bias), dy)
