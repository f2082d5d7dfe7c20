# SPDX-License-Identifier: MIT
"""Solve the heat equation with a network in JAX that has layer norms (a PINN).

A network u(x, t) learns du/dt = K * d²u/dx² from the equation alone (Raissi et al.,
arXiv:1711.10561). The loss is the mean square of the equation's residual at random points. A jvp
gives du/dt, a jvp of a jvp gives d²u/dx², and the gradient of the loss is one more derivative of
both: all of them go through ``cunorm.jax.layer_norm``. Initial and boundary values are right by
construction. The script prints the error against the exact solution, draws both, and exits with 1
if the error does not become small.

Usage: ``python examples/jax_pinn.py --output jax_pinn.png``
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import jax_adam
import numpy as np
from devices import jax_device
from jax import Array
from jax_adam import Parameters, State
from matplotlib.figure import Figure
from options import parse, rate, seed, size
from pictures import CUNORM, OTHER, save_picture

import cunorm.jax

K = 0.1  # the diffusivity; x and t go from 0 to 1
WAVES = {1: 1.0, 2: 0.5}  # u(x, 0) is the sum of amplitude * sin(number * pi * x)
TOLERANCE = 0.02  # of u, whose largest value is 1.1
QUICK = {"steps": 300}


def exact(x: Any, t: Any) -> Any:
    """Return the solution: each wave decays at a rate of its own."""
    waves = ((a * jnp.sin(n * math.pi * x), K * (n * math.pi) ** 2) for n, a in WAVES.items())
    return sum(wave * jnp.exp(-decay * t) for wave, decay in waves)


def drawn(width: int, layers: int, seed: int) -> dict[str, np.ndarray]:
    """Return the parameters before training."""
    rng, sizes = np.random.default_rng(seed), [2, *[width] * layers, 1]
    found = {}
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        found[f"{layer}.matrix"] = rng.standard_normal((inputs, outputs)) / inputs**0.5
        found[f"{layer}.shift"] = rng.standard_normal(outputs) / 2
    for layer in range(layers):
        found |= {f"{layer}.weight": np.ones(width), f"{layer}.bias": np.zeros(width)}
    return found


def network(of: Parameters, x: Array, t: Array) -> Array:
    """Return u at a point, whose initial and boundary values are right for all parameters."""
    h, layers = jnp.stack([x, t]), len(of) // 4
    for layer in range(layers):
        h = h @ of[f"{layer}.matrix"] + of[f"{layer}.shift"]
        h = jnp.tanh(cunorm.jax.layer_norm(h, of[f"{layer}.weight"], of[f"{layer}.bias"]))
    (free,) = h @ of[f"{layers}.matrix"] + of[f"{layers}.shift"]
    return exact(x, 0) + t * x * (1 - x) * free


def residual(of: Parameters, x: Array, t: Array) -> Array:
    """Return du/dt - K * d²u/dx² at a point."""
    one = jnp.ones_like(x)

    def slope(x: Array) -> Array:
        return jax.jvp(lambda x: network(of, x, t), (x,), (one,))[1]

    _, curvature = jax.jvp(slope, (x,), (one,))
    _, change = jax.jvp(lambda t: network(of, x, t), (t,), (one,))
    return change - K * curvature


@partial(jax.jit, static_argnames=("steps", "points", "peak"))
def train(state: State, key: Array, steps: int, points: int, peak: float) -> tuple[State, Array]:
    """Return the state after some steps, and the losses; the rate falls from its peak to 0."""

    def loss(of: Parameters, key: Array) -> Array:
        x, t = jax.random.uniform(key, (2, points))
        return (jax.vmap(partial(residual, of))(x, t) ** 2).mean()

    def step(state: State, key: Array) -> tuple[State, Array]:
        value, grads = jax.value_and_grad(loss)(state.parameters, key)
        falling = 0.5 * peak * (1 + jnp.cos(math.pi * state.step / steps))
        return jax_adam.updated(state, grads, falling), value

    return jax.lax.scan(step, state, jax.random.split(key, steps))


@jax.jit
def on_grid(of: Parameters) -> tuple[Array, Array]:
    """Return u of the network and of the exact solution at 51 times and 101 places."""
    t, x = jnp.meshgrid(jnp.linspace(0, 1, 51), jnp.linspace(0, 1, 101), indexing="ij")
    return jnp.vectorize(partial(network, of))(x, t), exact(x, t)


def draw(found: Array, right: Array, losses: Array) -> Figure:
    """Draw u at some times, and the loss."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    solution, training = figure.subplots(1, 2)
    x = np.linspace(0, 1, right.shape[1])
    for number in (0, 5, 15, 50):
        solution.plot(x, right[number], color=OTHER, lw=4, alpha=0.4)
        solution.plot(x, found[number], color=CUNORM, lw=1)
        highest = int(right[number].argmax())
        place = (x[highest], float(right[number, highest]) + 0.02)
        solution.annotate(f"t = {number / 50:.1f}", place, ha="center")
    solution.set(title="u: exact (wide) and by the network", xlabel="x", ylim=(0, 1.4))
    training.semilogy(losses, color=CUNORM)
    training.set(title="mean square of the residual", xlabel="step")
    for axes in (solution, training):
        axes.grid(alpha=0.3)
    return figure


def main(argv: list[str] | None = None) -> int:
    """Train, compare, and draw; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=size, default=1000)
    parser.add_argument("--width", type=size, default=32)
    parser.add_argument("--layers", type=size, default=2)
    parser.add_argument("--points", type=size, default=128, help="points of a step")
    parser.add_argument("--rate", type=rate, default=2e-2, help="largest learning rate")
    parser.add_argument("--seed", type=seed, default=0)
    options = parse(parser, argv, picture="jax_pinn.png", quick=QUICK)
    with jax.default_device(jax_device(parser, options.device)):
        state = jax_adam.initial(drawn(options.width, options.layers, options.seed))
        found, right = on_grid(state.parameters)
        before = float(abs(found - right).max())
        given = (options.steps, options.points, options.rate)
        start = time.perf_counter()
        state, losses = jax.block_until_ready(train(state, jax.random.key(options.seed), *given))
        seconds = time.perf_counter() - start
        found, right = on_grid(state.parameters)
        after = float(abs(found - right).max())
    print(f"{seconds:.1f} s for {options.steps} steps, with compilation")
    print(f"residual: mean square {losses[0]:.1e} at first, {losses[-1]:.1e} at last")
    save_picture(draw(found, right, losses), options.output)
    learned = after <= TOLERANCE
    print(
        f"The network {'solves' if learned else 'does not solve'} the heat equation: in "
        f"{options.steps} steps the largest error of u falls from {before:.1e} to {after:.1e} "
        f"(tolerance {TOLERANCE})."
    )
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
