# SPDX-License-Identifier: MIT
"""Operands on their way into and out of a call of the kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cunorm import _checks
from cunorm._arrays import Form, Operand
from cunorm._backend import Rows
from cunorm._checks import Geometry
from cunorm._dtypes import DType
from cunorm._layout import row_layout


def forms(operands: Iterable[Operand | None]) -> tuple[Form | None, ...]:
    """Return the form of each operand."""
    return tuple([None if operand is None else operand.form for operand in operands])


def input_rows(operand: Operand | None, where: Geometry) -> Rows | None:
    """Return an input and where its rows are; it is copied if the kernels cannot follow them."""
    return None if operand is None else _checks.layout_of(operand, where)


def output_rows(operand: Operand | None, where: Geometry) -> Any:
    """Return an output and where its rows are, which `_outputs.given` made sure of."""
    if operand is None:
        return None
    return operand, row_layout(operand.shape, operand.strides, where.leading_axes)


def contiguous(operand: Operand | None) -> Operand | None:
    """Return an operand in C order, copied if it is not."""
    if operand is None or row_layout(operand.shape, operand.strides, 0) is not None:
        return operand
    return operand.framework.contiguous(operand)


def allocate(function: str, x: Operand, shape: tuple[int, ...], dtype: DType) -> Operand:
    """Make an array of the framework of x, where x is; one that it cannot have is an error."""
    try:
        return x.framework.allocate(shape, dtype, x.device)
    except TypeError as error:
        raise TypeError(f"{function}: a result of dtype {dtype}: {error}") from None


def export(operand: Operand | None) -> Any:
    """Return the array that the user gets for a result."""
    return None if operand is None else operand.framework.export(operand)
