# SPDX-License-Identifier: MIT
"""The norms as formulas of jax.numpy, which JAX itself differentiates, and calls of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.operands import draw

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

ACTIVATIONS = {
    "identity": lambda x: x,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def normalize(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    gate: Any = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
) -> Any:
    """Return what `cunorm.normalize` says of itself."""
    shape, leading = x.shape, x.shape[: axis % x.ndim]
    factor = None if gate is None else ACTIVATIONS[gate_activation](gate)
    p = x * factor if factor is not None and gate_position == "pre" else x
    rows = p.reshape(*leading, groups, -1)
    q = rows - rows.mean(-1, keepdims=True) if center else rows
    d = rows.shape[-1]
    k = 1.0 if c is None else c / d**0.5
    n = (k * q / jnp.sqrt((q * q).mean(-1, keepdims=True) + eps)).reshape(shape)
    n = n if weight is None else n * (weight + weight_offset)
    n = n if bias is None else n + bias
    return n * factor if factor is not None and gate_position == "post" else n


def rms_norm(x: Any, weight: Any = None, **more: Any) -> Any:
    return normalize(x, weight, **more)


def layer_norm(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5, **more: Any):
    return normalize(x, weight, bias, center=True, eps=eps, **more)


def l2_norm(x: Any, *, eps: float = 1e-12, groups: int = 1) -> Any:
    rows = x.reshape(*x.shape[:-1], groups, -1)
    return (rows / jnp.sqrt((rows * rows).sum(-1, keepdims=True) + eps)).reshape(x.shape)


def adding(norm: Any) -> Any:
    """Return the norm of the stream to which x is added; both are returned."""

    def add(x: Any, residual: Any, *parameters: Any, **more: Any) -> tuple[Any, Any]:
        stream = x if residual is None else x + residual
        return norm(stream, *parameters, **more), stream

    return add


def group_norm(
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
    channel_axis: int = -1,
) -> Any:
    """Return what `cunorm.group_norm` says of itself."""
    last = jnp.moveaxis(x, channel_axis, -1)
    groups = last.reshape(x.shape[0], -1, num_groups, last.shape[-1] // num_groups)
    q = groups - groups.mean((1, 3), keepdims=True)
    n = (q / jnp.sqrt((q * q).mean((1, 3), keepdims=True) + eps)).reshape(last.shape)
    n = n if weight is None else n * weight
    n = n if bias is None else n + bias
    return jnp.moveaxis(ACTIVATIONS[activation or "identity"](n), -1, channel_axis)


def instance_norm(x: Any, *parameters: Any, channel_axis: int = -1, **more: Any) -> Any:
    channels = x.shape[channel_axis]
    return group_norm(x, channels, *parameters, channel_axis=channel_axis, **more)


FORMULAS = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "l2_norm": l2_norm,
    "normalize": normalize,
    "add_rms_norm": adding(rms_norm),
    "add_layer_norm": adding(layer_norm),
    "add_normalize": adding(normalize),
    "group_norm": group_norm,
    "instance_norm": instance_norm,
}

SHAPES = dict.fromkeys(("x", "residual", "gate"), (2, 3, 4))


class Case(NamedTuple):
    """A call: its function, the arrays that it gets, and what else it is told."""

    function: str
    arrays: tuple[str, ...]
    said: dict[str, Any]

    def __str__(self) -> str:
        said = (f"{name}={value}" for name, value in self.said.items())
        return "-".join((self.function, *self.arrays[1:], *said))

    def draw(self) -> dict[str, Any]:
        """Return the arrays, in float64; parameters are of a row, or of the channels."""
        shape, axis = SHAPES["x"], self.said.get("channel_axis")
        parameter = shape[self.said.get("axis", -1) :] if axis is None else (shape[axis],)
        shapes = SHAPES | dict.fromkeys(("weight", "bias"), parameter)
        return {name: jnp.asarray(draw(name, shapes[name], "float64")) for name in self.arrays}

    def call(self, functions: Any, arrays: dict[str, Any]) -> Any:
        """Call cunorm.jax, or the formulas."""
        named = functions if isinstance(functions, dict) else vars(functions)
        streams = {"residual": None} if self.function.startswith("add_") else {}
        return named[self.function](**streams | arrays, **self.said)


def case(function: str, *arrays: str, **said: Any) -> Case:
    return Case(function, ("x", *arrays), said)


def leaves(result: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result)]
