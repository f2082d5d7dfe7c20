# SPDX-License-Identifier: MIT
"""`python -m bench overview`: the README's picture, speed and accuracy, from the committed CSVs."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.accuracy.data import MEANS
from bench.accuracy.errors import Row as Accuracy
from bench.report.plot import COLOURS, write_svg
from bench.report.ratios import Ratio, geometric_mean, load, ratios
from bench.report.records import read_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[1] / "results"
_NORMS = {
    "RMSNorm": "rms_norm",
    "RMSNorm, gated": "rms_norm+post_gate",
    "RMSNorm + residual": "add_rms_norm",
    "LayerNorm": "layer_norm",
    "LayerNorm + residual": "add_layer_norm",
    "L2 norm": "l2_norm",
    "GroupNorm + SiLU, NHWC": "group_norm+silu NHWC",
    "GroupNorm + SiLU, NCHW": "group_norm+silu NCHW",
}
_SHADES = {"forward": COLOURS["cunorm"], "backward": "#f0a877"}
_BAR = 0.36  # height for a direction's bar, if two norms are 1 apart
_FONT = 9.0  # points


def main(argv: Sequence[str]) -> int:
    """Read the command line and write the picture."""
    parser = argparse.ArgumentParser(prog="python -m bench overview", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg")
    options = parser.parse_args(argv)
    accuracy = read_csv(RESULTS / "accuracy.csv", Accuracy)
    speeds = ratios(load(RESULTS / "cpu.csv"), "torch", "cunorm")
    write_svg(options.out, partial(_figure, speeds, accuracy))
    return 0


def _figure(speeds: Sequence[Ratio], accuracy: Sequence[Accuracy]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.9))
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.19, right=0.9, bottom=0.24, top=0.9, wspace=0.25)
    _draw_speeds(left, [speed for speed in speeds if speed.dtype == "float32"])
    _draw_errors(right, accuracy)
    note = (
        "Left: geometric means over the shapes of bench/results/cpu.csv, PyTorch's backward "
        "through autograd. Right: bench/results/accuracy.csv, in units in the last place of the "
        f"row's largest value. {accuracy[0].device}; {accuracy[0].versions}."
    )
    figure.text(0.01, 0.1, textwrap.fill(note, 150), va="top", fontsize=7, color="#555555")
    return figure


def _draw_speeds(panel: Axes, speeds: Sequence[Ratio]) -> None:
    for number, (direction, colour) in enumerate(_SHADES.items()):
        for index, norm in enumerate(_NORMS.values()):
            chosen = [s for s in speeds if (s.label, s.direction) == (norm, direction)]
            mean, height = geometric_mean(chosen), index + _BAR * (number - 0.5)
            label = direction if index == 0 else None
            panel.barh(height, mean, 0.9 * _BAR, color=colour, label=label)
            panel.text(mean + 0.08, height, f"{mean:.1f}", va="center", fontsize=7)
    panel.axvline(1, color=COLOURS["torch"], linewidth=1)
    panel.set_yticks(range(len(_NORMS)), _NORMS)
    panel.invert_yaxis()
    panel.set_title("Times as fast as PyTorch, CPU, float32", loc="left", fontsize=_FONT)
    panel.legend(frameon=False, loc="lower right")
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(axis="y", left=False)


def _draw_errors(panel: Axes, accuracy: Sequence[Accuracy]) -> None:
    rows = [
        row
        for row in accuracy
        if (row.operator, row.dtype, row.shape) == ("layer_norm", "float32", "64x4096")
    ]
    for provider, lift in {"torch.compile": 1.6, "torch": 1.0, "jax": 0.5, "cunorm": 0.8}.items():
        errors = {row.data: row.value("y_worst") for row in rows if row.provider == provider}
        values, colour = [errors[kind] for kind in MEANS], COLOURS[provider]
        panel.plot(range(len(MEANS)), values, marker="o", markersize=4, color=colour)
        panel.text(len(MEANS) - 0.9, values[-1] * lift, provider, color=colour, va="center")
    panel.set_yscale("log")
    panel.set_xticks(range(len(MEANS)), [kind.split()[1] for kind in MEANS])
    panel.set_xlabel("mean of x, whose deviation is 1")
    title = "Worst error of LayerNorm's y in ulp, float32"
    panel.set_title(title, loc="left", fontsize=_FONT)
    panel.grid(axis="y", color="#e0e0e0", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
