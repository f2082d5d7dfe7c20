# SPDX-License-Identifier: MIT
"""CSV files of dataclasses whose fields are str, int, float or `float | None`."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def write_csv(
    path: Path, kind: type[DataclassInstance], records: Iterable[DataclassInstance]
) -> None:
    """Write one line for each record of a dataclass, after the names of the fields."""
    path.write_text(",".join(field.name for field in fields(kind)) + "\n", encoding="utf-8")
    append_csv(path, records)


def append_csv(path: Path, records: Iterable[DataclassInstance]) -> None:
    """Add one line for each record."""
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for one in records:
            writer.writerow(_cell(getattr(one, field.name)) for field in fields(one))


def read_csv(path: Path, kind: type[T]) -> list[T]:
    """Read a file of `write_csv`; ValueError if the columns differ."""
    types = {field.name: str(field.type) for field in fields(kind)}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if (reader.fieldnames or []) != list(types):
            raise ValueError(f"{path}: columns {reader.fieldnames}, expected {list(types)}")
        return [
            kind(**{name: _value(types[name], cell) for name, cell in line.items()})
            for line in reader
        ]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _value(type_: str, cell: str) -> Any:
    if type_ == "str":
        return cell
    if not cell and "None" in type_:
        return None
    return (int if type_ == "int" else float)(cell)
