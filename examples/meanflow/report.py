# SPDX-License-Identifier: MIT
"""The data of the examples of mean flows, and how far new points are from them."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from options import rate, seed, size
from pictures import CUNORM, OTHER, save_picture

Points = NDArray[np.float32]  # of shape (number of points, 2)

CLUSTERS, RADIUS, SPREAD = 8, 2.0, 0.1
COMPARED = 4096  # points of each set
ENOUGH = 0.5  # of the distance between noise and data
QUICK = {"steps": 150, "batch": 256}


def command_line(description: str, steps: int) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=size, default=steps)
    parser.add_argument("--width", type=size, default=32)
    parser.add_argument("--blocks", type=size, default=1)
    parser.add_argument("--batch", type=size, default=512, help="points of a step")
    parser.add_argument("--rate", type=rate, default=1e-2, help="largest learning rate")
    parser.add_argument("--seed", type=seed, default=0)
    return parser


def ring(rng: np.random.Generator, count: int) -> Points:
    """Draw points of a ring of Gaussians."""
    angles = rng.integers(CLUSTERS, size=count) * (2 * np.pi / CLUSTERS)
    centres = RADIUS * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    return (centres + SPREAD * rng.standard_normal((count, 2))).astype(np.float32)


def batch(rng: np.random.Generator, count: int) -> tuple[Points, Points, NDArray[np.float32]]:
    """Draw data, noise, and the times r and t of each point; in half of them both are equal."""
    times = np.sort(rng.random((count, 2)), axis=-1)
    times[: count // 2, 0] = times[: count // 2, 1]
    noise = rng.standard_normal((count, 2))
    return ring(rng, count), noise.astype(np.float32), times.astype(np.float32)


def weights(square: Any) -> Any:
    """Return the weights of points in the loss, from the squares of their errors.

    As in the paper, they keep a few large errors from ruling the gradient.
    """
    return (square + 0.01) ** -0.75


def distance(first: Points, second: Points, directions: int = 32) -> float:
    """Return the sliced Wasserstein distance of two sets of equally many points.

    The points are projected on lines through the origin. On a line, the nth point of one set
    belongs to the nth of the other; the distance is the mean over all points and lines.
    """
    angles = np.pi * np.arange(directions) / directions
    lines = np.stack([np.cos(angles), np.sin(angles)])
    along = [np.sort(points.astype(np.float64) @ lines, axis=0) for points in (first, second)]
    return float(abs(along[0] - along[1]).mean())


def report(points: Points, noise: Points, losses: Any, options: argparse.Namespace) -> int:
    """Print and draw how the new points compare with data; return the exit status."""
    rng = np.random.default_rng(options.seed + 1)
    data, others = ring(rng, len(points)), ring(rng, len(points))
    before, after = distance(noise, data), distance(points, data)
    print(f"sliced Wasserstein distance to data: {before:.3f} of noise, {after:.3f} of new points,")
    print(f"{distance(others, data):.3f} of other data")
    save_picture(draw(points, data, losses), options.output)
    learned = after <= ENOUGH * before
    print(
        f"With one evaluation for each point, the model {'draws' if learned else 'does not draw'} "
        f"the data: {options.steps} steps of training reduce the distance from {before:.3f} to "
        f"{after:.3f} (tolerance {ENOUGH * before:.3f})."
    )
    return 0 if learned else 1


def draw(points: Points, data: Points, losses: Any) -> Figure:
    """Draw data, new points and the loss."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    *places, training = figure.subplots(1, 3)
    pairs = (("data", data, OTHER), ("one step from noise", points, CUNORM))
    for axes, (title, drawn, colour) in zip(places, pairs, strict=True):
        axes.plot(*drawn[:2000].T, ".", color=colour, markersize=1.5)
        axes.set(title=title, aspect="equal", xlim=(-2.5, 2.5), ylim=(-2.5, 2.5))
    training.plot(losses, color=CUNORM, lw=0.5)
    training.set(title="weighted loss", xlabel="step")
    for axes in (*places, training):
        axes.grid(alpha=0.3)
    return figure
