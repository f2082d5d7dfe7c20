# SPDX-License-Identifier: MIT
"""Norms in jax.numpy, which JAX itself can transform."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def rms_norm(
    x: Any, weight: Any = None, *, axis: int = -1, gate: Any = None, eps: float = 1e-6
) -> Any:
    axes = tuple(range(axis % x.ndim, x.ndim))
    y = x / jnp.sqrt((x * x).mean(axes, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if gate is None else y * jax.nn.silu(gate)


def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return rms_norm(x - x.mean(-1, keepdims=True), weight, eps=1e-5) + bias


def add_rms_norm(x: Any, residual: Any, weight: Any = None) -> tuple[Any, Any]:
    stream = x + residual
    return rms_norm(stream, weight), stream


def add_layer_norm(x: Any, residual: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    stream = x + residual
    return layer_norm(stream, weight, bias), stream


def group_norm(
    x: Any,
    num_groups: int,
    weight: Any = None,
    *,
    activation: str | None = None,
    channel_axis: int = -1,
) -> Any:
    """Return y of a group norm; any `activation` means silu."""
    last = jnp.moveaxis(x, channel_axis, -1)
    groups = last.reshape(x.shape[0], -1, num_groups, last.shape[-1] // num_groups)
    q = groups - groups.mean((1, 3), keepdims=True)
    y = (q / jnp.sqrt((q * q).mean((1, 3), keepdims=True) + 1e-5)).reshape(last.shape)
    y = y if weight is None else y * weight
    return jnp.moveaxis(jax.nn.silu(y) if activation else y, -1, channel_axis)
