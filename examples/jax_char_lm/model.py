# SPDX-License-Identifier: MIT
"""The model, its loss and a step of Adam, as pure functions of JAX arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax_adam
import numpy as np
from jax_adam import Parameters, State

from jax_char_lm.norms import Norms


class Shape(NamedTuple):
    """The sizes of a model."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int


def initial(shape: Shape, seed: int) -> State:
    """Draw the parameters; return the state before the first step."""
    width, hidden = shape.width, 4 * shape.width
    shapes = {"embedding": (shape.vocabulary, width), "positions": (shape.context, width)}
    for layer in range(shape.layers):
        shapes |= {f"{layer}.qkv": (width, 3 * width), f"{layer}.out": (width, width)}
        shapes |= {f"{layer}.up": (width, hidden), f"{layer}.down": (hidden, width)}
    rng = np.random.default_rng(seed)
    drawn = {
        name: rng.standard_normal(size) * (size[0] if "." in name else 50) ** -0.5
        for name, size in shapes.items()
    }
    norms = [f"{layer}.{name}" for layer in range(shape.layers) for name in ("norm", "mlp_norm")]
    norms += ["norm", *(f"{i}.{name}" for i in range(shape.layers) for name in ("q", "k"))]
    for name in norms:
        of_head = name.endswith((".q", ".k"))
        drawn[name] = np.ones(width // shape.heads if of_head else width)
    return jax_adam.initial(drawn)


def loss(norms: Norms, shape: Shape, parameters: Parameters, inputs: Any, targets: Any) -> Any:
    """Return the mean cross-entropy, in nats per character."""
    branch = parameters["embedding"][inputs] + parameters["positions"][: inputs.shape[1]]
    stream = None
    for layer in range(shape.layers):
        own = {name: parameters[f"{layer}.{name}"] for name in _LAYER}
        y, stream = norms.add_rms_norm(branch, stream, own["norm"])
        branch = attention(norms, shape, own, y)
        y, stream = norms.add_rms_norm(branch, stream, own["mlp_norm"])
        branch = jax.nn.gelu(y @ own["up"]) @ own["down"]
    y, _ = norms.add_rms_norm(branch, stream, parameters["norm"])
    scores = jax.nn.log_softmax(y @ parameters["embedding"].T)
    return -jnp.mean(jnp.take_along_axis(scores, targets[..., None], axis=-1))


_LAYER = ("norm", "qkv", "q", "k", "out", "mlp_norm", "up", "down")


def attention(norms: Norms, shape: Shape, own: Parameters, y: Any) -> Any:
    """Return causal attention with queries and keys normalised head by head."""
    batch, length, width = y.shape
    heads = (batch, length, shape.heads, width // shape.heads)
    q, k, v = (part.reshape(heads) for part in jnp.split(y @ own["qkv"], 3, axis=-1))
    q, k = norms.rms_norm(q, own["q"]), norms.rms_norm(k, own["k"])
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(batch, length, width) @ own["out"]


def step(
    norms: Norms, shape: Shape, rate: float, state: State, inputs: Any, targets: Any
) -> tuple[State, Any]:
    """Return the state after a step of Adam, and the loss before the step."""
    value, grads = jax.value_and_grad(loss, argnums=2)(
        norms, shape, state.parameters, inputs, targets
    )
    return jax_adam.updated(state, grads, rate), value
