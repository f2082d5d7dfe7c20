# SPDX-License-Identifier: MIT
"""The losses of a training run, and their plot."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.figure import Figure


class Losses(NamedTuple):
    """Losses in nats per character: one for each training batch; `validation` is keyed by step."""

    training: list[float]
    validation: dict[int, float]


def draw_curve(losses: Losses, baseline: float) -> Figure:
    """Draw the losses and the bigram baseline."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(losses.training, color="tab:blue", alpha=0.5, linewidth=1, label="training batch")
    steps, values = zip(*losses.validation.items(), strict=True)
    axes.plot(steps, values, color="tab:orange", marker="o", label="validation")
    axes.axhline(baseline, color="black", linestyle="--", label=f"bigram model: {baseline:.3f}")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats per character)")
    axes.set_title("Character model with every norm by cunorm")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
