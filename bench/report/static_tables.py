# SPDX-License-Identifier: MIT
"""The tables of predictions for GPUs in the documentation, from the static table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import median

from bench.plans.model import GPUS
from bench.plans.plan import PARAM_GRAD
from bench.plans.rows import Row
from bench.report.ratios import label

LOW = 0.85  # of copy speed; plans below it are named
_SMALL = ("4096", "320x64x64")


def page(rows: list[Row]) -> str:
    """Return a page's text about the calls of the default plans."""
    calls = [row for row in rows if row.call_prediction and not row.features]
    large = [row for row in calls if not row.count]
    small = [row for row in calls if row.count and row.shape in _SMALL]
    parts = (
        _table(large, _prediction_cell),
        f"The limits of the calls below {LOW}, and for how many widths or shapes each applies:",
        _table(large, _low_cell),
        "The times of small work, in µs and including launches: 1, 8, 64 and 512 rows of "
        f"{_SMALL[0]} columns, and\n1 and 2 samples of {_SMALL[1]}:",
        _table(small, lambda rows: " / ".join(row.microseconds for row in rows)),
    )
    return "\n\n".join(parts)


def _table(rows: list[Row], cell: Callable[[list[Row]], str]) -> str:
    """Return a Markdown table of norms by GPU; lines of empty cells are left out."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: row.dtype, reverse=True):  # float32 first
        name = f"{label(row.operator, row.memory)} {row.direction} {row.dtype}"
        found.setdefault(name, {}).setdefault(row.gpu, []).append(row)
    lines = [f"| | {' | '.join(GPUS)} |", f"|---|{'---|' * len(GPUS)}"]
    for name, by_gpu in found.items():
        cells = [cell(by_gpu[gpu]) for gpu in GPUS]
        if any(text != "–" for text in cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _prediction_cell(rows: list[Row]) -> str:
    worst = min(rows, key=_share)
    return f"{median(map(_share, rows)):.2f} ({_share(worst):.2f} at {worst.shape})"


def _low_cell(rows: list[Row]) -> str:
    limits = Counter(_limit(row) for row in rows if _share(row) < LOW)
    named = ", ".join(f"{count} {name}" for name, count in limits.most_common())
    return f"{named}, of {len(rows)}" if limits else "–"


def _share(row: Row) -> float:
    return float(row.call_prediction)


def _limit(row: Row) -> str:
    """Return what limits a call: its last launch, another launch, or both."""
    if _share(row) >= 0.95 * float(row.prediction):
        return row.limit
    other = "launches" if row.step else PARAM_GRAD
    return other if row.limit == "copy" else f"{row.limit} and {other}"
