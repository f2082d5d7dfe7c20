# SPDX-License-Identifier: MIT
"""The tables of predictions for GPUs in the documentation, from the static table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median

from bench.plans.model import GPUS
from bench.plans.rows import Row
from bench.plans.summary import limit, passes, share

LOW = 0.85  # of copy speed; plans below it are named
_SMALL = ("4096", "320x64x64")


def page(rows: list[Row]) -> str:
    """Return a page's text about the calls of the default plans."""
    calls = [row for row in rows if row.call_prediction and not row.features]
    large = [row for row in calls if not row.count and passes(row) is not None]
    small = [row for row in calls if row.count and row.shape in _SMALL]
    parts = (
        predictions(large),
        f"The limits of the calls below {LOW}, and for how many widths or shapes each applies:",
        _table(large, _low_cell),
        "The times of small work, in µs and including launches: 1, 8, 64 and 512 rows of "
        f"{_SMALL[0]} columns, and\n1 and 2 samples of {_SMALL[1]}:",
        _table(small, _small_cell),
    )
    return "\n\n".join(parts)


def predictions(rows: list[Row]) -> str:
    """Return the median share of copy speed and the worst, by norm, GPU and dtype."""
    return _table(rows, _prediction_cell)


def _table(rows: list[Row], cell: Callable[[list[Row]], str]) -> str:
    """Return a Markdown table of norms by GPU; lines of empty cells are left out."""
    found: dict[str, dict[str, list[Row]]] = {}
    for dtype in dict.fromkeys(row.dtype for row in rows):
        for row in rows:
            if row.dtype == dtype:
                parts = (row.operator, row.memory, row.direction, dtype)
                name = " ".join(filter(None, parts))
                found.setdefault(name, {}).setdefault(row.gpu, []).append(row)
    lines = [f"| | {' | '.join(GPUS)} |", f"|---|{'---|' * len(GPUS)}"]
    for name, by_gpu in found.items():
        cells = [cell(by_gpu.get(gpu, [])) for gpu in GPUS]
        if any(text != "–" for text in cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _prediction_cell(rows: list[Row]) -> str:
    return f"{median(map(share, rows)):.2f} ({_worst(rows)})" if rows else "–"


def _low_cell(rows: list[Row]) -> str:
    limits = Counter(limit(row) for row in rows if share(row) < LOW)
    named = ", ".join(f"{count} {name}" for name, count in limits.most_common())
    return f"{named}, of {len(rows)}" if limits else "–"


def _small_cell(rows: Iterable[Row]) -> str:
    return " / ".join(row.microseconds for row in rows) or "–"


def _worst(rows: list[Row]) -> str:
    worst = min(rows, key=share)
    return f"{share(worst):.2f} at {worst.shape}"
