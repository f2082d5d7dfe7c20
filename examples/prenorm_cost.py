# SPDX-License-Identifier: MIT
"""The cost of norms and additions in the two variants of `prenorm_stack`.

Bytes are counted, and times are measured; both are printed as tables and drawn as bars.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import numpy as np
from devices import wait
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pictures import CUNORM, OTHER

import cunorm

Array = Any
Costs = dict[str, tuple[float, float]]  # for each variant the costs of forward and backward
DIRECTIONS = ("forward", "backward", "both")


class Recorded(NamedTuple):
    """A layer whose results are recorded, so that only norms and additions take time."""

    weight: Array
    branch: Array
    d_y: Array

    def forward(self, y: Array) -> Array:
        """Return the recorded branch."""
        return self.branch

    def backward(self, d_branch: Array, y: Array) -> tuple[Array, None]:
        """Return the recorded gradient."""
        return self.d_y, None


def bytes_moved(depth: int, elements: int, size: int) -> Costs:
    """Count the bytes of rows that norms and additions read and write, forward and backward.

    An element of the stream has `stream` bytes; an element of a branch, y or dy has `size` bytes.
    Weights and rstd are small compared to the rows, and are not counted. Each sum is bytes read +
    bytes written in one pass over the rows.
    """
    stream = 4
    plain_norm = stream + size
    addition = (size + stream) + stream
    fused_norm = (size + stream) + (stream + size)
    norm_backward = (size + stream) + stream  # reads dy and the stream, writes dx
    fused_backward = (size + 2 * stream) + stream  # also reads d_residual
    d_addition = 2 * stream + stream
    rounding = stream + size if size < stream else 0  # d_stream is rounded to the branch's dtype
    rounded = size if size < stream else 0  # a fused backward also writes the rounded gradient
    per_element = {
        "naive": (
            depth * (plain_norm + addition),
            depth * (rounding + norm_backward + d_addition),
        ),
        "fused": (
            plain_norm + (depth - 1) * fused_norm + addition,
            rounding + depth * fused_backward + (depth - 1) * rounded,
        ),
    }
    return {
        name: (forward * elements, backward * elements)
        for name, (forward, backward) in per_element.items()
    }


def median_seconds(
    xp: Any,
    variants: dict[str, Any],
    layers: list[Recorded],
    x: Array,
    d_output: Array,
    repeats: int,
) -> Costs:
    """Time norms and additions, forward and backward; the variants take turns.

    On a CPU everything runs on one thread, because NumPy's additions use only one.
    """
    cunorm.set_num_threads(1)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(repeats + 1):
        for name, variant in variants.items():
            start = now(xp)
            saved = variant.forward(layers, x, layers[0].branch.dtype)
            middle = now(xp)
            gradients = variant.backward(layers, saved, d_output)
            times[name].append((middle - start, now(xp) - middle))
            del saved, gradients  # otherwise the next variant's time would include freeing them
    cunorm.set_num_threads(None)
    medians = {}
    for name, runs in times.items():
        forward, backward = zip(*runs[1:], strict=True)  # the first run warms up
        medians[name] = statistics.median(forward), statistics.median(backward)
    return medians


def now(xp: Any) -> float:
    """Wait for all work on the device, and return the time."""
    wait(xp)
    return time.perf_counter()


def with_sums(costs: Costs) -> dict[str, tuple[float, float, float]]:
    """Return the costs of each variant: forward, backward, and the sum of both."""
    return {name: (*pair, sum(pair)) for name, pair in costs.items()}


def saved_percent(costs: Costs) -> list[float]:
    """Return the savings of the fused variant in percent: forward, backward and both together."""
    pairs = zip(*with_sums(costs).values(), strict=True)
    return [100 * (1 - fused / naive) for naive, fused in pairs]


def print_table(title: str, unit: str, scale: float, costs: Costs) -> None:
    """Print a line for each variant, and the savings of the fused variant."""
    print(f"\n{title}:\n" + " " * 8 + "".join(f"{name:>12}" for name in DIRECTIONS))
    for name, numbers in with_sums(costs).items():
        print(f"{name:8}" + "".join(f"{scale * number:9.1f} {unit}" for number in numbers))
    print(f"{'saved':8}" + "".join(f"{saved:9.1f} % " for saved in saved_percent(costs)))


def draw_costs(title: str, moved: Costs, seconds: Costs) -> Figure:
    """Draw bytes and time as bars."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    draw_bars(left, "bytes moved by norms and additions (MB)", 1e-6, moved)
    draw_bars(right, "time of norms and additions (ms)", 1e3, seconds)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def draw_bars(axes: Axes, label: str, scale: float, costs: Costs) -> None:
    """Draw a pair of bars for each direction; above the fused bar is its change in percent."""
    xs, width = np.arange(len(DIRECTIONS)), 0.38
    for side, colour, (name, numbers) in zip(
        (-0.5, 0.5), (OTHER, CUNORM), with_sums(costs).items(), strict=True
    ):
        heights = scale * np.array(numbers)
        bars = axes.bar(xs + side * width, heights, width, color=colour, label=name)
        texts = [f"{height:.0f}" if height >= 100 else f"{height:#.3g}" for height in heights]
        if name == "fused":
            changes = (f"{-saved:+.0f} %".replace("-", "−") for saved in saved_percent(costs))
            texts = [f"{text}\n{change}" for text, change in zip(texts, changes, strict=True)]
        axes.bar_label(bars, texts, fontsize=9, padding=2)
    axes.set_xticks(xs, DIRECTIONS)
    axes.set_ylabel(label)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
