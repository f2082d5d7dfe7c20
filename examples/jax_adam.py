# SPDX-License-Identifier: MIT
"""The optimizer Adam as a pure function of JAX arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BETAS, TINY = (0.9, 0.99), 1e-8

Parameters = dict[str, Any]


class State(NamedTuple):
    """The state that a step of training updates."""

    parameters: Parameters
    means: Parameters  # of the gradients
    squares: Parameters  # means of the gradients' squares
    step: Any


def initial(drawn: dict[str, np.ndarray]) -> State:
    """Return the state before the first step, in float32."""
    zeros = {name: np.zeros_like(array) for name, array in drawn.items()}
    parameters, means, squares = (
        {name: jnp.asarray(array.astype(np.float32)) for name, array in arrays.items()}
        for arrays in (drawn, zeros, zeros)
    )
    return State(parameters, means, squares, jnp.asarray(np.int32(0)))


def updated(state: State, grads: Parameters, rate: Any) -> State:
    """Return the state after a step of Adam (Kingma and Ba, arXiv:1412.6980)."""
    count = state.step + 1
    first, second = BETAS
    means = jax.tree.map(lambda m, g: first * m + (1 - first) * g, state.means, grads)
    squares = jax.tree.map(lambda s, g: second * s + (1 - second) * g * g, state.squares, grads)

    def moved(parameter: Any, mean: Any, square: Any) -> Any:
        root = jnp.sqrt(square / (1 - second**count))
        return parameter - rate * (mean / (1 - first**count)) / (root + TINY)

    parameters = jax.tree.map(moved, state.parameters, means, squares)
    return State(parameters, means, squares, count)
