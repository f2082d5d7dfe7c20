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
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
_PANEL = 2.35, 1.75  # inches, of the axes without labels
_MARGINS = 0.65, 1.0, 0.5, 1.1  # inches: left; between columns, and right; between lines; below
_FONT = 9.0  # points
_GAP = 0.105  # between the labels of two lines, as a fraction of a panel's height


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and write the picture."""
    parser = argparse.ArgumentParser(prog="python -m bench plot", description=__doc__)
    parser.add_argument("csv", type=Path, metavar="CSV", help="from `python -m bench`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg")
    parser.add_argument("--op", help="draw only these operators, with commas between them")
    parser.add_argument("--dtype", help="draw only these dtypes")
    options = parser.parse_args(argv)
    try:
        rows = load(options.csv)
        rows = _only(rows, "operator", options.op)
        rows = _only(rows, "dtype", options.dtype)
        write_svg(options.out, partial(_figure, rows))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def _only(rows: list[Row], column: str, names: str | None) -> list[Row]:
    if names is None:
        return rows
    wanted = names.split(",")
    if unknown := set(wanted) - {getattr(row, column) for row in rows}:
        raise ValueError(f"the CSV has no rows of the {column} {', '.join(sorted(unknown))}")
    return [row for row in rows if getattr(row, column) in wanted]


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
    """Shrink a picture: round to hundredths of a point, and remove text without effect."""
    svg = re.sub(r"<[^>]+>", _rounded, svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def _rounded(tag: re.Match[str]) -> str:
    """Return a tag with shorter numbers; text between tags may contain versions, so it stays."""
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", tag[0])


def _figure(rows: Sequence[Row]) -> Figure:
    names = list(dict.fromkeys(label(row.operator, row.memory) for row in rows))
    directions = [d for d in ("forward", "backward") if any(row.direction == d for row in rows)]
    columns = list(itertools.product(directions, dict.fromkeys(row.dtype for row in rows)))
    figure, panels = _empty_figure(rows, len(names), len(columns))
    for name, line_of_panels in zip(names, panels, strict=True):
        for (direction, dtype), panel in zip(columns, line_of_panels, strict=True):
            chosen = [
                row
                for row in rows
                if (label(row.operator, row.memory), row.direction, row.dtype)
                == (name, direction, dtype)
            ]
            panel.set_title(f"{name} {direction} {dtype}", loc="left", fontsize=_FONT)
            _draw(panel, chosen)
        line_of_panels[0].set_ylabel("GB/s")
    _size_axis(panels[-1], rows)
    for line_of_panels in panels:  # after all are drawn, because the panels of a line share limits
        line_of_panels[0].set_ylim(bottom=0)
        for panel in line_of_panels:
            _label_lines(panel)
    return figure


def _empty_figure(rows: Sequence[Row], lines: int, columns: int) -> tuple[Figure, Any]:
    """Return a figure with a note about the measurement, and its panels by line and column."""
    from matplotlib.figure import Figure

    left, between, above, below = _MARGINS
    width = left + columns * (_PANEL[0] + between)
    height = below + lines * (_PANEL[1] + above)
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(
        left=left / width,
        right=1 - between / width,
        bottom=below / height,
        top=1 - above / height,
        wspace=between / _PANEL[0],
        hspace=above / _PANEL[1],
    )
    lines_are = "Lines: geometric means of the shapes of a size. Thin lines: their range."
    # 15 characters of this size are about an inch.
    note = textwrap.fill(f"{measured(rows)} {lines_are}", width=int(15 * width))
    position = left / width, (below - 0.55) / height
    figure.text(*position, note, va="top", fontsize=7, color="#555555")
    return figure, figure.subplots(lines, columns, sharex=True, sharey="row", squeeze=False)


def _draw(panel: Axes, rows: Sequence[Row]) -> None:
    """Draw one operator, direction and dtype, with a line for each provider."""
    for provider in _providers(rows):
        by_size: dict[int, list[float]] = {}
        for row in rows:
            if row.provider == provider:
                by_size.setdefault(x_bytes(row.shape, row.dtype), []).append(row.gb_per_s)
        sizes = sorted(by_size)
        style = {"color": COLOURS.get(provider, "black"), "clip_on": False}
        spans = [
            (size, end)
            for size in sizes
            if len(rates := by_size[size]) > 1
            for end in (min(rates), max(rates), math.nan)  # NaN ends a span
        ]
        panel.plot(*zip(*spans, strict=True), linewidth=0.6, **style)
        means = [statistics.geometric_mean(by_size[size]) for size in sizes]
        dashes = "--" if provider == "copy" else "-"
        marker = "" if len(sizes) > 1 else "."  # markers on lines would make the file larger
        panel.plot(sizes, means, dashes, marker=marker, linewidth=1.2, label=provider, **style)
    panel.grid(axis="y", color="#e0e0e0", linewidth=0.6, clip_on=False)
    panel.patch.set_visible(False)
    panel.spines[["top", "left", "right"]].set_visible(False)
    panel.tick_params(left=False)


def _providers(rows: Iterable[Row]) -> list[str]:
    """Return the providers to draw, cunorm on top; not cunorm-ungated, which moves fewer bytes."""
    there = dict.fromkeys(row.provider for row in rows if row.provider != "cunorm-ungated")
    return sorted(there, key=lambda provider: (provider == "cunorm", provider))


def _size_axis(lowest: Sequence[Axes], rows: Iterable[Row]) -> None:
    """Make the axis of sizes logarithmic, with at most four powers of two as labels."""
    sizes = [x_bytes(row.shape, row.dtype) for row in rows]
    first, last = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    ticks = [2**power for power in range(first, last + 1, max(1, math.ceil((last - first) / 3)))]
    for panel in lowest:
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [_size(tick) for tick in ticks])
        panel.minorticks_off()
        panel.set_xlabel("size of x")


def _size(bytes_: int) -> str:
    power = min((bytes_.bit_length() - 1) // 10, 3)
    return f"{bytes_ >> 10 * power} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _label_lines(panel: Axes) -> None:
    """Write each provider's name at the end of its line, and move overlapping names apart."""
    lines = [line for line in panel.get_lines() if not line.get_label().startswith("_")]
    top = panel.get_ylim()[1]
    lines.sort(key=lambda line: line.get_ydata()[-1])
    heights = _spread([line.get_ydata()[-1] / top for line in lines])
    for line, height in zip(lines, heights, strict=True):
        panel.text(
            1.02,
            height,
            line.get_label(),
            color=line.get_color(),
            transform=panel.transAxes,
            va="center",
            fontsize=_FONT,
        )


def _spread(heights: Sequence[float]) -> list[float]:
    """Move ascending heights at least `_GAP` apart, but not below 0; clusters keep their centre."""
    clusters: list[tuple[float, int]] = []  # centre and number of labels, from below
    for height in heights:
        centre, count = height, 1
        while clusters and centre - clusters[-1][0] < _GAP * (count + clusters[-1][1]) / 2:
            other, more = clusters.pop()
            centre = (centre * count + other * more) / (count + more)
            count += more
        clusters.append((max(centre, _GAP * (count - 1) / 2), count))
    return [
        centre + _GAP * (index - (count - 1) / 2)
        for centre, count in clusters
        for index in range(count)
    ]


if __name__ == "__main__":
    sys.exit(main())
