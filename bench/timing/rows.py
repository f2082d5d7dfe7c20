# SPDX-License-Identifier: MIT
"""The CSV of the timings: one line for each point and provider."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One provider's times at one point, and the environment; None is an empty cell."""

    date: str
    commit: str  # with a plus if the tree had changes
    device: str  # the CPU's model and the number of cores in use, or the GPU
    driver: str  # the CUDA driver's version; empty on a CPU
    versions: str  # "cunorm 0.1.0; torch 2.13.0; ..."
    threads: int
    operator: str
    memory: str  # for a group norm, NHWC or NCHW
    direction: str
    dtype: str
    shape: str  # "4096x4096"
    provider: str
    bytes: int  # necessary reads and writes
    p20_us: float
    p50_us: float
    p80_us: float
    gb_per_s: float
    # Bytes per second relative to those of the copy. For all providers but cunorm-ungated, which
    # moves fewer bytes, this is the copy's p50 divided by the provider's.
    of_copy: float
    host_us: float | None  # host cost of a call
    error: float | None  # against the oracle, relative to the largest value; None for copies

    @property
    def point(self) -> tuple[str, str, str, str, str]:
        """The columns that identify the point."""
        return self.operator, self.memory, self.direction, self.dtype, self.shape

    @property
    def by_host_clock(self) -> bool:
        """Whether the times include host time, unlike those of other providers."""
        return bool(self.driver) and self.provider in _ON_OWN_STREAMS


_ON_OWN_STREAMS = ("jax", "cunorm-jax")  # on a GPU, events time all other providers
COLUMNS = tuple(field.name for field in fields(Row))
_DIGITS = {"p20_us": 7, "p50_us": 7, "p80_us": 7, "gb_per_s": 5, "of_copy": 4, "host_us": 7}
_READ = {"threads": int, "bytes": int, **dict.fromkeys([*_DIGITS, "error"], float)}


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write one line for each row, after the names of the columns."""
    path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    append_csv(path, rows)


def append_csv(path: Path, rows: Iterable[Row]) -> None:
    """Add one line for each row."""
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for row in rows:
            writer.writerow([_cell(name, getattr(row, name)) for name in COLUMNS])


def read_csv(path: Path) -> list[Row]:
    """Read a file of `write_csv`; ValueError if the columns differ."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: columns {reader.fieldnames}, expected {list(COLUMNS)}")
        return [Row(**{name: _value(name, cell) for name, cell in line.items()}) for line in reader]


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "error":
        return f"{value:.1e}"
    return f"{value:.{_DIGITS[name]}g}" if name in _DIGITS else str(value)


def _value(name: str, cell: str) -> Any:
    if name not in _READ:
        return cell
    return _READ[name](cell) if cell else None
