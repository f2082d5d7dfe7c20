# SPDX-License-Identifier: MIT
"""`python -m bench plot`: GB/s over the size of x, as an SVG, from a CSV of timings.

Each operator, direction and dtype has a panel, each provider a colour. If several shapes have the
same size, the line goes through their geometric mean, and a thin vertical line spans their range.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report.ratios import label, load, measured, x_bytes
from bench.timing.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which most colour-blind people can tell apart; cunorm has the reds.
COLOURS = {
    "cunorm": "#d55e00",
    "cunorm-numpy": "#8c2d04",
    "cunorm-cupy": "#a50f15",
    "cunorm-softgpu": "#a50f15",
    "cunorm-jax": "#e31a8c",
    "torch": "#0072b2",
    "torch.compile": "#56b4e9",
    "liger": "#009e73",
    "fla": "#cc79a7",
    "quack": "#e69f00",
    "jax": "#6a51a3",
    "copy": "#777777",
}
_FONT = 9.0  # points


def main(argv: Sequence[str]) -> int:
    """Read the command line and write the picture."""
    parser = argparse.ArgumentParser(prog="python -m bench plot", description=__doc__)
    parser.add_argument("csv", type=Path, metavar="CSV", help="from `python -m bench`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg")
    parser.add_argument("--dtype", help="draw only these dtypes, with commas between them")
    options = parser.parse_args(argv)
    try:
        rows = load(options.csv)
        there = dict.fromkeys(row.dtype for row in rows)
        wanted = options.dtype.split(",") if options.dtype else list(there)
        if unknown := set(wanted) - set(there):
            raise ValueError(f"the CSV has no rows of the dtype {', '.join(sorted(unknown))}")
        write_svg(options.out, partial(_figure, [row for row in rows if row.dtype in wanted]))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def write_svg(path: Path, draw: Callable[[], Figure]) -> None:
    """Write a figure; its bytes do not depend on the user's matplotlibrc."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit('plots need matplotlib: pip install "cunorm[bench]"') from error
    text = io.StringIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.hashsalt": "cunorm",
                "svg.fonttype": "none",
                "font.sans-serif": "DejaVu Sans",
                "font.size": _FONT,
            }
        )
        nothing = {"Date": None, "Creator": None}
        draw().savefig(text, format="svg", metadata=nothing)
    path.write_text(_smaller(text.getvalue()), encoding="utf-8")


def _smaller(svg: str) -> str:
    """Shrink a picture: round to hundredths of a point, and remove text without effect.

    Text between tags may contain versions, so it stays.
    """

    def rounded(tag: re.Match[str]) -> str:
        return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", tag[0])

    svg = re.sub(r"<[^>]+>", rounded, svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def _figure(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(label(row.operator, row.memory) for row in rows))
    directions = [d for d in ("forward", "backward") if any(row.direction == d for row in rows)]
    columns = list(itertools.product(directions, dict.fromkeys(row.dtype for row in rows)))
    width, height = 0.6 + 3.0 * len(columns), 1.0 + 2.1 * len(names)
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(len(names), len(columns), sharex=True, sharey="row", squeeze=False)
    for name, line_of_panels in zip(names, panels, strict=True):
        for (direction, dtype), panel in zip(columns, line_of_panels, strict=True):
            point = (name, direction, dtype)
            chosen = [
                r for r in rows if (label(r.operator, r.memory), r.direction, r.dtype) == point
            ]
            panel.set_title(" ".join(point), loc="left", fontsize=_FONT)
            _draw(panel, chosen)
        line_of_panels[0].set(ylabel="GB/s", ylim=(0, None))
    sizes = [x_bytes(row.shape, row.dtype) for row in rows]
    first, last = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    ticks = [2**power for power in range(first, last + 1, max(1, math.ceil((last - first) / 3)))]
    for panel in panels[-1]:
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [_size(tick) for tick in ticks])
        panel.minorticks_off()
        panel.set_xlabel("size of x")
    legends = [panel.get_legend_handles_labels() for panel in panels.flat]
    lines = {name: line for pair in legends for line, name in zip(*pair, strict=True)}
    place = {"loc": "outside upper right", "ncols": len(lines), "frameon": False}
    figure.legend(lines.values(), lines.keys(), **place)
    lines_are = "Lines: geometric means of the shapes of a size. Thin lines: their range."
    note = textwrap.fill(f"{measured(rows)} {lines_are}", width=int(14 * width))
    figure.supxlabel(note, x=0.01, ha="left", fontsize=7, color="#555555")
    return figure


def _draw(panel: Axes, rows: Sequence[Row]) -> None:
    """Draw one operator, direction and dtype, with a line for each provider.

    cunorm is on top; cunorm-ungated is left out, because it moves fewer bytes.
    """
    there = dict.fromkeys(row.provider for row in rows if row.provider != "cunorm-ungated")
    for provider in sorted(there, key=lambda name: (name == "cunorm", name)):
        by_size: dict[int, list[float]] = {}
        for row in rows:
            if row.provider == provider:
                by_size.setdefault(x_bytes(row.shape, row.dtype), []).append(row.gb_per_s)
        sizes, rates = zip(*sorted(by_size.items()), strict=True)
        style = {"color": COLOURS.get(provider, "black"), "clip_on": False}
        ends = [end for some in rates for end in (min(some), max(some), math.nan)]  # NaN: a gap
        panel.plot([size for size in sizes for _ in range(3)], ends, linewidth=0.6, **style)
        means = list(map(statistics.geometric_mean, rates))
        dashes, marker = "--" if provider == "copy" else "-", "" if len(sizes) > 1 else "."
        panel.plot(sizes, means, dashes, marker=marker, linewidth=1.2, label=provider, **style)
    panel.grid(axis="y", color="#e0e0e0", linewidth=0.6, clip_on=False)
    panel.patch.set_visible(False)
    panel.spines[["top", "left", "right"]].set_visible(False)
    panel.tick_params(left=False)


def _size(bytes_: int) -> str:
    power = min((bytes_.bit_length() - 1) // 10, 3)
    return f"{bytes_ >> 10 * power} {('B', 'KiB', 'MiB', 'GiB')[power]}"
