# SPDX-License-Identifier: MIT
"""Ratios of two providers' times at the same points, from the rows of a CSV."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report.records import read_csv
from bench.timing.rows import Row

_OF_A_RUN = ("device", "driver", "threads", "versions", "commit")
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Ratio:
    """The time of one provider divided by the time of another, at one point."""

    operator: str
    memory: str
    direction: str
    dtype: str
    shape: str
    value: float

    @property
    def label(self) -> str:
        """The operator and, for a group norm, the order of its axes in memory."""
        return label(self.operator, self.memory)

    @property
    def point(self) -> str:
        """The point as text."""
        return f"{self.label} {self.direction} {self.dtype} {self.shape}"

    @property
    def elements(self) -> int:
        """The elements of x."""
        return math.prod(map(int, self.shape.split("x")))


def label(operator: str, memory: str) -> str:
    """Return the operator's name with the order of its axes in memory, if there is one."""
    return f"{operator} {memory}".rstrip()


def x_bytes(shape: str, dtype: str) -> int:
    """Return the size of x, whose shape is written as in a CSV: 4096x4096."""
    return math.prod(map(int, shape.split("x"))) * _ITEMSIZE[dtype]


def load(path: Path) -> list[Row]:
    """Read the rows of one run; ValueError if they cannot be compared with each other."""
    rows = read_csv(path, Row)
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
    """Return a sentence about the measurement: points, device, versions, dates."""
    first = rows[0]  # `load` checks that all are of one run
    dates = sorted({row.date for row in rows})
    return (
        f"Medians at {len({row.point for row in rows})} points; {first.device}, "
        f"{first.threads} threads; {first.versions}; commit {first.commit}, "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    )


def ratios(
    rows: Iterable[Row], numerator: str, denominator: str, column: str = "p50_us"
) -> list[Ratio]:
    """Return the ratios of a column, by default the median, at all points with both providers."""
    points: dict[tuple[str, str, str, str, str], dict[str, float]] = {}
    for row in rows:
        points.setdefault(row.point, {})[row.provider] = getattr(row, column)
    return [
        Ratio(*point, value=times[numerator] / times[denominator])
        for point, times in points.items()
        if numerator in times and denominator in times
    ]


def grouped(found: Iterable[Ratio]) -> dict[tuple[str, str, str], list[Ratio]]:
    """Return ratios by operator, direction and dtype."""
    groups: dict[tuple[str, str, str], list[Ratio]] = {}
    for one in found:
        groups.setdefault((one.label, one.direction, one.dtype), []).append(one)
    return groups


def large(found: Iterable[Ratio]) -> list[Ratio]:
    """Return the ratios of points whose x has 1 MiB or more; smaller calls are mostly host time."""
    return [ratio for ratio in found if x_bytes(ratio.shape, ratio.dtype) >= 1 << 20]


def points_without(rows: Sequence[Row], provider: str) -> list[str]:
    """Return the points without a row of a provider."""
    has = {row.point for row in rows if row.provider == provider}
    return list(dict.fromkeys(" ".join(filter(None, r.point)) for r in rows if r.point not in has))


def geometric_mean(chosen: Iterable[Ratio]) -> float:
    """Return the geometric mean of some ratios."""
    return statistics.geometric_mean(ratio.value for ratio in chosen)
