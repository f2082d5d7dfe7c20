# SPDX-License-Identifier: MIT
"""The picture of the accuracy report: the worst errors for each kind of data.

Each operator has a line of panels, each result and dtype a column, each provider a colour. A curve
joins the rows of several means of x; other kinds of data are single marks. For each operator, the
panels show the widest shape, and a trained model's activations, which have only one width.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.accuracy.data import ACTIVATIONS, KINDS, MEANS, TAILS
from bench.accuracy.errors import Row
from bench.report.plot import COLOURS, write_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = (("y", "float32"), ("dx", "float32"), ("dweight", "float32"), ("dx", "bfloat16"))
_DODGE = 0.13  # distance of two providers' marks, if that of two kinds of data is 1
_TICKS = {TAILS: "tails", ACTIVATIONS: "act."} | {kind: kind.split()[1] for kind in MEANS}


def write(path: Path, rows: Sequence[Row]) -> None:
    """Draw the rows as an SVG."""
    write_svg(path, partial(_figure, rows))


def _figure(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    operators = list(dict.fromkeys(row.operator for row in rows))
    columns = [column for column in _COLUMNS if any(row.dtype == column[1] for row in rows)]
    providers = list(dict.fromkeys(row.provider for row in rows))
    width, height = 0.5 + 3 * len(columns), 1.2 + 2 * len(operators)
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.65 / height, 1, 1 - 1 / height), wspace=0.06)
    panels = figure.subplots(len(operators), len(columns), sharey="col", squeeze=False)
    for operator, line in zip(operators, panels, strict=True):
        for (result, dtype), panel in zip(columns, line, strict=True):
            chosen = [row for row in rows if (row.operator, row.dtype) == (operator, dtype)]
            _draw(panel, _widest(chosen), f"{result}_worst", providers)
            panel.set_title(f"{operator} {result} {dtype}", loc="left", fontsize=9)
        line[0].set_ylabel("ulp")
    for first, last in zip(panels[0], panels[-1], strict=True):
        last.set_xlabel("mean of x, or its kind")
        _ulp_axis(first)  # the panels of a column share their axis
    handles, labels = panels[0][0].get_legend_handles_labels()
    legend_options = {"loc": "upper left", "bbox_to_anchor": (0.02, 1), "ncols": len(labels)}
    figure.legend(handles, labels, frameon=False, markerscale=1.6, **legend_options)
    text = (
        "Worst errors against float64, in ulp of the dtype at the largest value of the row, or of "
        "dweight; 0.5 is the rounding of the result. 0 to 1e6: rows of this mean and deviation 1; "
        "tails: Student's t with 2 degrees of freedom; act.: activations of a trained model. "
        f"{rows[0].device}; {rows[0].versions}; commit {rows[0].commit}, {rows[0].date}."
    )
    note = textwrap.fill(text, width=int(15 * width))  # 15 of its characters are about an inch
    figure.text(0.65 / width, 0.6 / height, note, va="top", fontsize=7, color="#555555")
    return figure


def _widest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the widest shape, and those of activations."""
    shapes = dict.fromkeys(row.shape for row in rows if row.data != ACTIVATIONS)
    largest = max(shapes, key=lambda shape: int(shape.split("x")[1]), default="")
    return [row for row in rows if row.data == ACTIVATIONS or row.shape == largest]


def _draw(panel: Axes, rows: Sequence[Row], column: str, providers: Sequence[str]) -> None:
    """Draw the marks of all providers side by side, with those of cunorm on top."""
    for number, provider in enumerate(providers):
        shift = _DODGE * (number - (len(providers) - 1) / 2)
        by_kind = {row.data: row.value(column) for row in rows if row.provider == provider}
        kinds = [kind for kind in KINDS if kind in by_kind]
        xs = [KINDS.index(kind) + shift for kind in kinds]
        values = [by_kind[kind] for kind in kinds]
        style: dict[str, Any] = {"color": COLOURS.get(provider, "black"), "clip_on": False}
        style["zorder"] = 4 if provider.startswith("cunorm") else 3
        means = sum(kind in MEANS for kind in kinds)
        panel.plot(xs[:means], values[:means], linewidth=1.0, alpha=0.6, **style)
        size = 4.5 if provider == "cunorm" else 3.5
        panel.plot(xs, values, "o", markersize=size, mew=0, label=provider, **style)
    panel.set_yscale("log")
    panel.grid(axis="y", color="#e0e0e0", linewidth=0.6)
    panel.axvline(len(MEANS) - 0.5, color="#c0c0c0", linewidth=0.6)
    panel.set_xlim(-0.5, len(KINDS) - 0.5)
    panel.set_xticks(range(len(KINDS)), [_TICKS[kind] for kind in KINDS])
    panel.spines[["top", "left", "right"]].set_visible(False)
    panel.tick_params(left=False, which="both")


def _ulp_axis(panel: Axes) -> None:
    """Set the limits and labels of a panel's logarithmic axis of errors."""
    top = max(panel.get_ylim()[1], 5)
    few, many = ("0.5", "1", "2", "5", "10", "20", "50"), ("1", "100", "1e4", "1e6", "1e8")
    labels = [label for label in (many if top > 100 else few) if float(label) <= top]
    panel.set_yticks([float(label) for label in labels], labels)
    panel.set_ylim(0.3, top)
    panel.minorticks_off()
