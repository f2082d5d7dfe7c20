# SPDX-License-Identifier: MIT
"""The errors of results in ulp, and the CSV of the accuracy report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.accuracy.data import rows_of
from bench.timing.cases import Operator
from cunorm.reference.tolerance import ulp

RESULTS = ("y", "dx", "dweight", "dbias")


@dataclass(frozen=True)
class Row:
    """A provider's largest and root mean square error in ulp; "" for results that a norm lacks."""

    date: str
    commit: str
    device: str
    versions: str
    operator: str  # with the order of a group norm's axes in memory
    data: str
    dtype: str
    shape: str
    provider: str
    y_worst: str
    y_rms: str
    dx_worst: str
    dx_rms: str
    dweight_worst: str
    dweight_rms: str
    dbias_worst: str
    dbias_rms: str

    def value(self, column: str) -> float | None:
        """Return the number in a column, None if the cell is empty."""
        text = getattr(self, column)
        return float(text) if text else None


def errors(
    operator: Operator, name: str, result: Any, exact: Any, dtype: str
) -> tuple[float, float]:
    """Return the worst error of a result and the root mean square of its errors, in ulp.

    For y and dx, an ulp is the spacing of the numbers of `dtype` at the largest exact value of the
    row (for a group norm, of the sample's group); for dweight and dbias, at their largest exact
    value. The spacing at the element itself would turn any error of an element near zero into many
    ulps. Rounding to nearest costs at most half an ulp. A result that is not finite has an infinite
    error.
    """
    exact = np.asarray(exact, np.float64)
    error = np.abs(np.asarray(result).astype(np.float64) - exact)
    rows = exact.reshape(1, -1) if name in ("dweight", "dbias") else rows_of(operator, exact)
    size = np.abs(rows).max(axis=-1, keepdims=True)
    units = error.reshape(len(size), -1) / ulp(size, dtype)
    units = np.where(np.isfinite(units), units, math.inf)
    return float(units.max()), float(np.sqrt(np.mean(units * units)))


def cells(found: dict[str, tuple[float, float]]) -> dict[str, str]:
    """Return the cells of a Row, given the errors of each result."""
    texts = {}
    for name in RESULTS:
        pair = [f"{value:.3g}" for value in found[name]] if name in found else ["", ""]
        texts |= dict(zip((f"{name}_worst", f"{name}_rms"), pair, strict=True))
    return texts


def table(rows: Sequence[Row], dtype: str = "float32") -> Iterator[str]:
    """Yield the lines of a Markdown table: the worst errors of y and dx for a dtype."""
    chosen = [row for row in rows if row.dtype == dtype]
    providers = list(dict.fromkeys(row.provider for row in chosen))
    points: dict[str, dict[str, str]] = {}
    for row in chosen:
        cell = f"{_short(row.y_worst)} / {_short(row.dx_worst)}"
        points.setdefault(f"{row.operator} {row.shape}, {row.data}", {})[row.provider] = cell
    yield f"| {dtype}, y / dx | {' | '.join(providers)} |"
    yield "|---" * (1 + len(providers)) + "|"
    for point, by_provider in points.items():
        yield f"| {point} | {' | '.join(by_provider.get(name, '–') for name in providers)} |"


def _short(text: str) -> str:
    """Return a number with two significant digits; from 10 on, rounded to an integer."""
    value = float(text)
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"
