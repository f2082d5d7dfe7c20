# SPDX-License-Identifier: MIT
"""Train a one-step generator of points in JAX by the loss of MeanFlow, whose norms are cunorm's.

A model u(z, r, t) learns the mean velocity of a flow between the times r and t, from noise at 1 to
data at 0 (Geng et al., "Mean Flows for One-step Generative Modeling", arXiv:2505.13447). With
z = (1 - t) * x + t * noise and v = noise - x, the target of u is v - (t - r) * du/dt, where du/dt
is the jvp of u with the tangents (v, 0, 1), without a gradient. So each step of training
differentiates the norms twice: forwards for du/dt, and backwards for the gradient. Times scale and
shift each RMS norm and gate each branch (adaLN-Zero), so modulated weights and gates have tangents,
too. A new point is noise - u(noise, 0, 1). The script prints and draws how new points compare with
data, and exits with 1 if their distance is not much smaller than that of noise.

Usage: ``python examples/jax_meanflow.py --output jax_meanflow.png``
"""

from __future__ import annotations

import math
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax_adam
import numpy as np
from devices import jax_device
from jax import Array
from jax_adam import Parameters, State
from meanflow.report import COMPARED, QUICK, batch, command_line, report, weights
from options import parse

import cunorm.jax


def drawn(width: int, blocks: int, seed: int) -> dict[str, np.ndarray]:
    """Return the parameters before training; layers of modulation and the last begin with zeros."""
    rng = np.random.default_rng(seed)
    shapes = {"points": (2, width), "times": (width, width)}
    for block in range(blocks):
        shapes |= {f"{block}.up": (width, 4 * width), f"{block}.down": (4 * width, width)}
    found = {name: rng.standard_normal(size) / size[0] ** 0.5 for name, size in shapes.items()}
    found |= {f"{block}.modulation": np.zeros((width, 3 * width)) for block in range(blocks)}
    found["shift"] = rng.standard_normal(width)
    return found | {"modulation": np.zeros((width, 2 * width)), "last": np.zeros((width, 2))}


def model(of: Parameters, z: Array, r: Array, t: Array) -> Array:
    """Return u; z and it have the shape (batch, 2), r and t (batch,)."""
    width = of["times"].shape[0]
    frequencies = jnp.logspace(-0.5, 0.5, width // 4)
    waves = jnp.concatenate([t[:, None] * frequencies, (t - r)[:, None] * frequencies], axis=-1)
    waves = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=-1)
    to = jax.nn.silu(waves @ of["times"])
    branch, gate, x = None, None, z @ of["points"] + of["shift"]
    for block in range(len(of) // 3 - 1):
        shift, scale, next_gate = jnp.split(to @ of[f"{block}.modulation"], 3, axis=-1)
        y, x = add_norm(branch, gate, x, scale, shift)
        branch, gate = jax.nn.silu(y @ of[f"{block}.up"]) @ of[f"{block}.down"], next_gate
    shift, scale = jnp.split(to @ of["modulation"], 2, axis=-1)
    y, _ = add_norm(branch, gate, x, scale, shift)
    return y @ of["last"]


def add_norm(
    branch: Array | None, gate: Array | None, x: Array, scale: Array, shift: Array
) -> tuple[Array, Array]:
    """Add a gated branch, and normalise and modulate the sum, in one call; return also the sum."""
    options: dict[str, Any] = {"bias": shift, "weight_offset": 1.0}
    if branch is None:
        return cunorm.jax.rms_norm(x, scale, **options), x
    options |= {"gate": gate, "gate_activation": "identity", "gate_position": "branch"}
    return cunorm.jax.add_rms_norm(branch, x, scale, **options)


def loss(of: Parameters, data: Array, noise: Array, times: Array) -> Array:
    """Return the loss of MeanFlow; times are r and t, of shape (batch, 2)."""
    r, t = times.T
    z, v = (1 - t)[:, None] * data + t[:, None] * noise, noise - data
    tangents = (v, jnp.zeros_like(r), jnp.ones_like(t))
    u, change = jax.jvp(partial(model, of), (z, r, t), tangents)
    target = jax.lax.stop_gradient(v - (t - r)[:, None] * change)
    square = ((u - target) ** 2).sum(-1)
    return (square * jax.lax.stop_gradient(weights(square))).mean()


@partial(jax.jit, static_argnames=("peak", "steps"))
def step(
    state: State, data: Array, noise: Array, times: Array, peak: float, steps: int
) -> tuple[State, Array]:
    """Return the state after a step, and the loss before it; the rate falls from its peak to 0."""
    value, grads = jax.value_and_grad(loss)(state.parameters, data, noise, times)
    falling = 0.5 * peak * (1 + jnp.cos(math.pi * state.step / steps))
    return jax_adam.updated(state, grads, falling), value


def main(argv: list[str] | None = None) -> int:
    """Train, draw new points, and compare them with data; return the exit status."""
    parser = command_line(__doc__.partition("\n")[0], steps=1500)
    options = parse(parser, argv, picture="jax_meanflow.png", quick=QUICK)
    if options.width % 4:
        parser.error(f"--width is {options.width}, expected a multiple of 4")
    rng = np.random.default_rng(options.seed)
    with jax.default_device(jax_device(parser, options.device)):
        state, losses = jax_adam.initial(drawn(options.width, options.blocks, options.seed)), []
        start = time.perf_counter()
        for _ in range(options.steps):
            given = batch(rng, options.batch)
            state, value = step(state, *given, peak=options.rate, steps=options.steps)
            losses.append(value)
        losses = [*map(float, losses)]
        print(f"{time.perf_counter() - start:.1f} s for {options.steps} steps, with compilation")
        noise = rng.standard_normal((COMPARED, 2)).astype(np.float32)
        r, t = np.zeros(COMPARED, np.float32), np.ones(COMPARED, np.float32)
        points = noise - np.asarray(jax.jit(model)(state.parameters, noise, r, t))
    return report(points, noise, losses, options)


if __name__ == "__main__":
    sys.exit(main())
