# SPDX-License-Identifier: MIT
"""The tables of predictions for GPUs in the documentation, from the static table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from statistics import median

from bench.model import GPUS
from bench.static_rows import Row
from bench.static_summary import limit, passes, share

LOW = 0.85  # of copy speed; plans below it are named
_SMALL = ("4096", "320x64x64")

Column = tuple[str, str]  # GPU and dtype


def page(rows: list[Row]) -> str:
    """Return what a page says of the calls that the default plans make."""
    calls = [row for row in rows if row.call_prediction and not row.features]
    large = [row for row in calls if not row.count and passes(row) is not None]
    small = [row for row in calls if row.count and row.shape in _SMALL]
    parts = (
        predictions(large),
        f"Of the calls below {LOW}: what bounds them, how many there are, and the least share:",
        _table(large, _low_cell),
        f"Small work, in µs with launches: 1, 8, 64 and 512 rows of {_SMALL[0]} columns, "
        f"and 1 and 2\nsamples of {_SMALL[1]}:",
        _table(small, _small_cell),
    )
    return "\n\n".join(parts)


def predictions(rows: list[Row]) -> str:
    """Return the median share of copy speed and the worst, by norm, GPU and dtype."""
    return _table(rows, _prediction_cell)


def _table(rows: list[Row], cell: Callable[[list[Row]], str]) -> str:
    """Return a Markdown table of norms by GPU and dtype; lines of empty cells are left out."""
    columns = list(product(GPUS, dict.fromkeys(row.dtype for row in rows)))
    found: dict[str, dict[Column, list[Row]]] = {}
    for row in rows:
        name = " ".join(filter(None, (row.operator, row.memory, row.direction)))
        found.setdefault(name, {}).setdefault((row.gpu, row.dtype), []).append(row)
    heads = [f"{gpu}, {dtype}" for gpu, dtype in columns]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for name, by_column in found.items():
        cells = [cell(by_column.get(column, [])) for column in columns]
        if any(text != "–" for text in cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _prediction_cell(rows: list[Row]) -> str:
    return f"{median(map(share, rows)):.2f} ({_worst(rows)})" if rows else "–"


def _low_cell(rows: list[Row]) -> str:
    by_limit: dict[str, list[Row]] = {}
    for row in rows:
        if share(row) < LOW:
            by_limit.setdefault(limit(row), []).append(row)
    return "; ".join(f"{name} {_named(found)}" for name, found in by_limit.items()) or "–"


def _named(rows: list[Row]) -> str:
    """Return the first and last shape of several, as the grid has them in order, and the worst."""
    several = f"{len(rows)} of {rows[0].shape} to {rows[-1].shape}: " if len(rows) > 1 else ""
    return f"{several}{_worst(rows)}"


def _small_cell(rows: Iterable[Row]) -> str:
    return " / ".join(row.microseconds for row in rows) or "–"


def _worst(rows: list[Row]) -> str:
    worst = min(rows, key=share)
    return f"{share(worst):.2f} at {worst.shape}"
