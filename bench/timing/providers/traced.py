# SPDX-License-Identifier: MIT
"""JAX under jit: cunorm.jax, and the operators in jax.numpy, compiled by XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench.timing import cases
from bench.timing.cases import OPERATORS, Call, Operands, Operator
from bench.timing.providers.base import Provider

# JAX's arrays lie in memory in the order of their axes.
_OPERATORS = [operator for operator in OPERATORS if operator.memory != "NHWC"]
_NOT_PLAIN = {"c", "groups", "weight_offset", "round_before_weight"}  # options of row norms


class Traced(Provider):
    """Functions of JAX arrays; the backward is the compiled pullback of a forward."""

    arrays = "jax"
    distribution = "jax"
    wait = staticmethod(jax.block_until_ready)

    def __init__(
        self,
        name: str,
        compute: Callable[[Operator, Operands], Any],
        operators: Sequence[Operator] = _OPERATORS,
    ) -> None:
        """Make a provider of some operators; `compute` returns y, or y and the new stream."""
        self.name, self._compute, self._operators = name, compute, operators

    def supports(self, operator: Operator) -> bool:
        """Whether it is one of the operators."""
        return operator in self._operators

    def calls(self, operator: Operator, direction: str, sets: Sequence[Operands]) -> list[Call]:
        """Return calls of the function under jit, or of its pullback."""

        def function(*leaves: Any) -> Any:
            return self._compute(operator, dict(zip(operator.leaves, leaves, strict=True)))

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


def ours() -> Provider:
    """Return cunorm.jax."""
    import cunorm.jax

    def compute(operator: Operator, operands: Operands) -> Any:
        y = cases.forward(cunorm.jax, operator, operands)()
        return tuple(y) if operator.has_residual else y

    return Traced("cunorm-jax", compute)


def jax_numpy() -> Provider:
    """Return the formulas in jax.numpy, computed in float32."""
    has = [one for one in _OPERATORS if one.of_channels or not _NOT_PLAIN & one.options.keys()]
    return Traced("jax", _in_float32, has)


def _in_float32(operator: Operator, operands: Operands) -> Any:
    x = operands["x"]
    stream = x + operands["residual"] if operator.has_residual else x
    others = {name: array.astype(jnp.float32) for name, array in operands.items()}
    y = _formula(operator, stream.astype(jnp.float32), **others).astype(x.dtype)
    return (y, stream) if operator.has_residual else y


def _formula(
    operator: Operator, stream: Any, weight: Any = 1, bias: Any = 0, gate: Any = 0, **_: Any
) -> Any:
    """Return y, given float32 operands."""
    x = stream * jax.nn.silu(gate) if operator.gate_position == "pre" else stream
    groups = operator.groups(x.shape[1]) if operator.of_channels else 1
    rows = x.reshape(x.shape[0], groups, -1)
    if operator.center:
        rows = rows - rows.mean(-1, keepdims=True)
    squares = jnp.square(rows)
    size = squares.sum if operator.base == "l2_norm" else squares.mean
    y = (rows * jax.lax.rsqrt(size(-1, keepdims=True) + operator.eps)).reshape(x.shape)
    of_channels = (-1, *(1,) * (x.ndim - 2))
    y = y * jnp.reshape(weight, of_channels) + jnp.reshape(bias, of_channels)
    if operator.gate_position == "post":
        y = y * jax.nn.silu(gate)
    return jax.nn.silu(y) if operator.options.get("activation") == "silu" else y
