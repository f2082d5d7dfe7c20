# SPDX-License-Identifier: MIT
"""Compare the results of a split layer with those of the whole layer: in numbers and a picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from options import seed, size
from pictures import CUNORM, OTHER, save_picture

# Relative to the norm of each result, in float32. Sums of some hundred products in another order
# differ by about 1e-6.
TOLERANCE = 1e-5
QUICK = {"width": 64, "tokens": 16}
NAMES = ("y", "dx", "dq", "dk", "dv", "dq_norm", "dk_norm", "dout")
Results = Mapping[str, Any]  # y and the gradients, by their names


def command_line(description: str) -> argparse.ArgumentParser:
    """Return the parser of the command line, without the number of parts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--width", type=size, default=256)
    parser.add_argument("--heads", type=size, default=8)
    parser.add_argument("--tokens", type=size, default=64)
    parser.add_argument("--seed", type=seed, default=0)
    return parser


def check_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace, parts: int) -> None:
    """Check that heads have equal widths, and that parts have equally many heads."""
    for name, divisor, of in (("width", options.heads, "--heads"), ("heads", parts, "the parts")):
        if getattr(options, name) % divisor:
            got = getattr(options, name)
            parser.error(f"--{name} is {got}, expected a multiple of {of}, {divisor}")


def drawn(options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Return the parameters of the layer, its input x, and the gradient dy of its output."""
    rng, width = np.random.default_rng(options.seed), options.width

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    found = {name: normal(width, width) / width**0.5 for name in ("q", "k", "v", "out")}
    found |= {name: 1 + normal(width) / 4 for name in ("q_norm", "k_norm")}
    return found | {name: normal(2, options.tokens, width) for name in ("x", "dy")}


def errors(found: Results, right: Results) -> dict[str, float]:
    """Return the errors of results, relative to the norms of the right ones."""
    pairs = {name: (np.asarray(found[name]), np.asarray(right[name])) for name in NAMES}
    norm: Callable[[np.ndarray], Any] = np.linalg.norm
    return {name: float(norm(one - other) / norm(other)) for name, (one, other) in pairs.items()}


def report(what: str, right: Results, split: Results, own: Results, options: Any) -> int:
    """Print and draw the errors of norms of split rows and of parts; return the exit status."""
    of_split, of_own = errors(split, right), errors(own, right)
    print(f"{'':>7}  norm of the row  norms of the parts   relative error")
    for name, error in of_split.items():
        print(f"{name:>7}  {error:15.1e}  {of_own[name]:18.1e}")
    save_picture(draw({"norm of the row": of_split, "norms of the parts": of_own}), options.output)
    worst = max(of_split.values())
    print(
        f"Split over {what}, the layer {'gives' if worst <= TOLERANCE else 'does not give'} the "
        f"results and gradients of one that is whole: they differ by at most {worst:.1e} "
        f"(tolerance {TOLERANCE}). With norms of the parts, y would be off by "
        f"{100 * of_own['y']:.0f} %."
    )
    return 0 if worst <= TOLERANCE else 1


def draw(found: dict[str, dict[str, float]]) -> Figure:
    """Draw the errors of each result as bars."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for number, (label, of_results) in enumerate(found.items()):
        places, colour = np.arange(len(NAMES)) + (-0.2, 0.2)[number], (CUNORM, OTHER)[number]
        axes.bar(places, [*of_results.values()], 0.4, color=colour, label=label)
    axes.set_xticks(range(len(NAMES)), NAMES)
    axes.axhline(TOLERANCE, color="black", linestyle="--", label=f"tolerance: {TOLERANCE}")
    axes.set(yscale="log", ylim=(1e-8, 10), ylabel="relative error")
    axes.legend(loc="upper right", ncols=3)
    return figure
