# SPDX-License-Identifier: MIT
"""JAX under jit: cunorm.jax, and the operators in jax.numpy, compiled by XLA."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench.timing import cases
from bench.timing.cases import Call, Operands, Operator
from bench.timing.providers.base import Provider


class Traced(Provider):
    """Functions of JAX arrays; the backward is the compiled pullback of a forward."""

    arrays = "jax"
    distribution = "jax"
    wait = staticmethod(jax.block_until_ready)

    def supports(self, operator: Operator, direction: str, dtype: str) -> bool:
        """Whether JAX has the memory order: its arrays lie in memory in the order of their axes."""
        return operator.memory != "NHWC"

    @abstractmethod
    def compute(self, operator: Operator, operands: Operands) -> Any:
        """Return y, or y and the new stream."""

    def calls(self, operator: Operator, direction: str, sets: Sequence[Operands]) -> list[Call]:
        """Return calls of the function under jit, or of its pullback."""

        def function(*leaves: Any) -> Any:
            return self.compute(operator, dict(zip(operator.leaves, leaves, strict=True)))

        forward = jax.jit(function)
        record = jax.jit(lambda *leaves: jax.vjp(function, *leaves)[1])
        pull_back = jax.jit(lambda pullback, gradients: pullback(gradients))

        def call(operands: Operands) -> Call:
            leaves = [operands[name] for name in operator.leaves]
            if direction == "forward":
                return lambda: forward(*leaves)
            pullback, dy = record(*leaves), operands["dy"]
            gradients = (dy, operands["d_residual"]) if operator.has_residual else dy
            return lambda: pull_back(pullback, gradients)

        return [call(operands) for operands in sets]


class CunormJax(Traced):
    """cunorm.jax."""

    name = "cunorm-jax"

    def compute(self, operator: Operator, operands: Operands) -> Any:
        """Return the results of cunorm.jax's function."""
        import cunorm.jax

        y = cases.forward(cunorm.jax, operator, operands)()
        return tuple(y) if operator.has_residual else y


class Jax(Traced):
    """The formulas in jax.numpy, computed in float32."""

    name = "jax"

    def supports(self, operator: Operator, direction: str, dtype: str) -> bool:
        """Whether `_formula` has the operator; of a row norm's options, it has only the gate."""
        others = {"groups", "weight_offset", "round_before_weight"} & operator.options.keys()
        plain = operator.base != "normalize" and (operator.of_channels or not others)
        return plain and super().supports(operator, direction, dtype)

    def compute(self, operator: Operator, operands: Operands) -> Any:
        """Return the formula's results in the dtype of x."""
        x = operands["x"]
        stream = x + operands["residual"] if operator.has_residual else x
        y = _formula(operator, stream.astype(jnp.float32), operands).astype(x.dtype)
        return (y, stream) if operator.has_residual else y


def _formula(operator: Operator, x: Any, operands: Operands) -> Any:
    """Return y of a float32 x."""
    if operator.gate_position == "pre":
        x = x * jax.nn.silu(operands["gate"].astype(jnp.float32))
    groups = operator.groups(x.shape[1]) if operator.of_channels else 1
    rows = x.reshape(x.shape[0], groups, -1)
    if operator.center:
        rows = rows - rows.mean(-1, keepdims=True)
    squares = jnp.square(rows)
    size = squares.sum if operator.base == "l2_norm" else squares.mean
    y = rows * jax.lax.rsqrt(size(-1, keepdims=True) + operator.eps)
    y = y.reshape(x.shape)
    of_channels = (-1, *(1,) * (x.ndim - 2)) if operator.of_channels else (-1,)
    if "weight" in operands:
        y = y * operands["weight"].astype(jnp.float32).reshape(of_channels)
    if "bias" in operands:
        y = y + operands["bias"].astype(jnp.float32).reshape(of_channels)
    if operator.gate_position == "post":
        y = y * jax.nn.silu(operands["gate"].astype(jnp.float32))
    return jax.nn.silu(y) if operator.options.get("activation") == "silu" else y
