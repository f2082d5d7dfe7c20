# SPDX-License-Identifier: MIT
"""What the demo runs: each operator, and the operands that it takes of the input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cunorm._demo._group_operators import group_operators_of
from cunorm._demo._operators import Operands, operators_of
from cunorm._core.dtypes import DType

Inputs = dict[DType, Operands]
Case = tuple[Any, Operands]  # an Operator or a GroupOperator, which have the same methods


def cases_of(dtype: DType, rows: Operands) -> Iterator[Case]:
    """Yield the operators that are run on a dtype, with their operands in host memory."""
    for operator in operators_of(dtype):
        yield operator, rows
    for group_operator in group_operators_of(dtype):
        yield group_operator, group_operator.taken(rows)
