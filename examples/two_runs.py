# SPDX-License-Identifier: MIT
"""Print and draw two training runs of one model with different norms."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure, FigureBase
from pictures import CUNORM, OTHER

REPORTS = 10  # lines of the printed curves


class Run(NamedTuple):
    """The loss of each step, and the seconds without the first step.

    The first step compiles.
    """

    losses: list[float]
    seconds: float


def report(runs: dict[str, Run]) -> float:
    """Print both curves; return their largest difference."""
    first, second = (run.losses for run in runs.values())
    steps = len(first)
    print(f"{'step':>6}" + "".join(f"{name:>14}" for name in runs) + f"{'difference':>14}")
    for number in range(0, steps, max(1, steps // REPORTS)):
        losses = (first[number], second[number])
        values = "".join(f"{loss:14.5f}" for loss in losses)
        print(f"{number:6}{values}{abs(losses[0] - losses[1]):14.1e}")
    for name, run in runs.items():
        print(f"{name}: {run.seconds / max(1, steps - 1) * 1e3:.1f} ms a step")
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def draw(runs: dict[str, Run], tolerance: float) -> Figure:
    """Draw both curves in one plot, and their difference in a plot below it."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    draw_curves(figure, runs, tolerance, "cross-entropy (nats per character)")
    return figure


def draw_curves(figure: FigureBase, runs: dict[str, Run], tolerance: float, label: str) -> None:
    """Draw both plots into a figure; the label is that of the losses."""
    curves, differences = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    styles = ({"color": OTHER, "linewidth": 4, "alpha": 0.4}, {"color": CUNORM, "linewidth": 1})
    for (name, run), style in zip(runs.items(), styles, strict=True):
        curves.plot(run.losses, label=name, **style)
    curves.set_title("One model, trained with the norms of " + " and of ".join(runs))
    curves.set_ylabel(label)
    curves.legend()
    first, second = (np.array(run.losses) for run in runs.values())
    difference = abs(first - second)
    steps = np.flatnonzero(difference)  # a logarithmic axis has no place for 0
    differences.semilogy(steps, difference[steps], ".", color="black", markersize=3)
    heights = [tolerance, *difference[steps]]
    differences.set_ylim(min(heights) / 3, max(heights) * 3)
    differences.axhline(tolerance, color="black", linestyle="--", label=f"tolerance: {tolerance}")
    differences.set_xlabel("step")
    differences.set_ylabel("difference")
    differences.set_title("their difference; no dot where both losses are the same", fontsize=10)
    differences.legend(loc="center right")
    for axes in (curves, differences):
        axes.grid(alpha=0.3)
