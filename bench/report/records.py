# SPDX-License-Identifier: MIT
"""CSV files of dataclasses whose fields are str and int."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def write_csv(
    path: Path, kind: type[DataclassInstance], records: Iterable[DataclassInstance]
) -> None:
    """Write one line for each record of a dataclass."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(kind)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(record) for record in records)


def read_csv(path: Path, kind: type[T]) -> list[T]:
    """Read a file of `write_csv`."""
    numbers = {field.name for field in fields(kind) if field.type == "int"}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            kind(**{name: int(text) if name in numbers else text for name, text in line.items()})
            for line in csv.DictReader(file)
        ]
