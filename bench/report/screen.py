# SPDX-License-Identifier: MIT
"""The timings on the screen: a line for each point, and geometric means."""

from __future__ import annotations

from collections.abc import Sequence

from bench.report.ratios import geometric_mean, grouped, ratios
from bench.timing.rows import Row


def line(rows: Sequence[Row]) -> str:
    """Return the times of all providers at a point, and the bytes per second of each."""
    times = (f"{row.provider} {row.p50_us:.4g} µs {row.gb_per_s:.4g} GB/s" for row in rows)
    return f"{' '.join(filter(None, rows[0].point))}: {', '.join(times)}"


def means(rows: Sequence[Row]) -> str:
    """Return the times of others divided by those of cunorm, by operator, direction and dtype."""
    providers = list(dict.fromkeys(row.provider for row in rows))
    base = min((name for name in providers if name.startswith("cunorm")), key=len, default="")
    cells: dict[tuple[str, str, str], list[str]] = {}
    for name in providers:
        for group, found in grouped(ratios(rows, name, base)).items() if name != base else ():
            worst = min(found, key=lambda ratio: ratio.value)
            text = f"× {name} {geometric_mean(found):.2f} ({worst.value:.2f} at {worst.shape})"
            cells.setdefault(group, []).append(text)
    if not cells:
        return "no point of cunorm's was timed"
    lines = [f"times divided by {base}'s: geometric means, and in brackets the smallest ratio"]
    lines += [f"{' '.join(group):44} {'; '.join(texts)}" for group, texts in cells.items()]
    if late := list(dict.fromkeys(row.provider for row in rows if row.by_host_clock)):
        lines.append(f"The times of {' and '.join(late)} include host time, other times do not.")
    return "\n".join(lines)
