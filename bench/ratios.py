# SPDX-License-Identifier: MIT
"""Ratios of the times of two providers at the same points, from the rows of a CSV."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rows import Row, read_csv

_OF_A_RUN = ("device", "driver", "threads", "versions", "commit")
_ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Ratio:
    """The time of one provider over another's at one point."""

    operator: str
    memory: str
    direction: str
    dtype: str
    shape: str
    value: float

    @property
    def label(self) -> str:
        """The operator and, of a group norm, the order of its axes in memory."""
        return label(self.operator, self.memory)

    @property
    def point(self) -> str:
        """All that says which point it is, for a line of text."""
        return f"{self.label} {self.direction} {self.dtype} {self.shape}"

    @property
    def kind(self) -> str:
        """Which norms it is of: "group norms", "gated norms" or "ungated norms"."""
        if self.operator.startswith("group_norm"):
            return "group norms"
        return "gated norms" if self.operator.endswith("_gate") else "ungated norms"

    @property
    def elements(self) -> int:
        """The elements of x."""
        return math.prod(map(int, self.shape.split("x")))

    @property
    def x_bytes(self) -> int:
        """The size of x."""
        return x_bytes(self.shape, self.dtype)


def label(operator: str, memory: str) -> str:
    """Return the operator's name with the order of its axes in memory, if there is one."""
    return f"{operator} {memory}".rstrip()


def x_bytes(shape: str, dtype: str) -> int:
    """Return the size of x, whose shape is written as in a CSV: 4096x4096."""
    return math.prod(map(int, shape.split("x"))) * _ITEMSIZE[dtype]


def load(path: Path) -> list[Row]:
    """Read the rows of one run; ValueError where they cannot be compared with each other."""
    rows = read_csv(path)
    if not rows:
        raise ValueError(f"{path} has no rows")
    for name in _OF_A_RUN:
        found = dict.fromkeys(getattr(row, name) for row in rows)
        if len(found) > 1:
            raise ValueError(f"{path} has rows of more than one {name}: {list(found)}")
    seen = set()
    for row in rows:
        if (key := (row.point, row.provider)) in seen:
            raise ValueError(f"{path} has two rows of {row.provider} at {' '.join(row.point)}")
        seen.add(key)
    return rows


def measured(rows: Sequence[Row]) -> str:
    """Return a sentence that says what was measured, on what and when."""
    of = rows[0]  # as `load` has it, the others are of the same run
    dates = sorted({row.date for row in rows})
    return (
        f"Medians at {len({row.point for row in rows})} points; {of.device}, "
        f"{of.threads} threads; {of.versions}; commit {of.commit}, "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    )


def ratios(
    rows: Iterable[Row], numerator: str, denominator: str, column: str = "p50_us"
) -> list[Ratio]:
    """Return the medians, or another column, of one provider over those of another.

    At all points that have both.
    """
    points: dict[tuple[str, str, str, str, str], dict[str, float]] = {}
    for row in rows:
        points.setdefault(row.point, {})[row.provider] = getattr(row, column)
    return [
        Ratio(*point, value=times[numerator] / times[denominator])
        for point, times in points.items()
        if numerator in times and denominator in times
    ]


def points_without(rows: Sequence[Row], provider: str) -> list[str]:
    """Return the points that others have and a provider has not."""
    has = {row.point for row in rows if row.provider == provider}
    return list(dict.fromkeys(" ".join(filter(None, r.point)) for r in rows if r.point not in has))


def geometric_mean(chosen: Iterable[Ratio]) -> float:
    """Return the geometric mean of some ratios."""
    return statistics.geometric_mean(ratio.value for ratio in chosen)
