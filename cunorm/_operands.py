# SPDX-License-Identifier: MIT
"""Operands on their way into and out of a call of the kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cunorm._arrays import Form, Operand, in_c_order
from cunorm._dtypes import DType
from cunorm._layout import SINGLE_ROW, RowLayout, RowsOf


def forms(operands: Iterable[Operand | None]) -> tuple[Form | None, ...]:
    """Return the form of each operand."""
    return tuple([None if operand is None else operand.form for operand in operands])


def optional_dtype(form: Form | None) -> DType | None:
    """Return the dtype of an operand that may be absent."""
    return None if form is None else form.dtype


def to_copy(inputs: Mapping[str, Form | None], rows: Mapping[str, RowsOf]) -> tuple[str, ...]:
    """Name the inputs whose strides the kernels cannot follow; `rows` says where theirs begin."""
    return tuple(name for name, of in rows.items() if _must_be_copied(inputs[name], of))


def _must_be_copied(form: Form | None, rows: RowsOf) -> bool:
    return form is not None and rows.layout(form) is None


def input_layout(form: Form | None, rows: RowsOf) -> RowLayout:
    """Return where an input's rows are; where it must be copied, in the copy."""
    if form is not None and _must_be_copied(form, rows):
        form = in_c_order(form)
    return output_layout(form, rows)


def output_layout(form: Form | None, rows: RowsOf) -> RowLayout:
    """Return where an output's rows are, which `_outputs.check_form` made sure of."""
    if form is None:
        return SINGLE_ROW
    layout = rows.layout(form)
    assert layout is not None, "nobody checked that the kernels can follow this array's strides"
    return layout


def copied(names: Iterable[str], operands: Iterable[Any], to_copy: tuple[str, ...]) -> list[Any]:
    """Return the operands, those that are named in C order."""
    return [
        operand.framework.contiguous(operand) if name in to_copy else operand
        for name, operand in zip(names, operands, strict=True)
    ]


def allocate(function: str, x: Operand, form: Form, like: Operand | None = None) -> Operand:
    """Make an array of the framework of x; one that it cannot have is an error.

    `like` is an operand whose form it probably has, by default x.
    """
    if like is None or like.framework is not x.framework:
        like = x
    if form == like.form:
        return x.framework.allocate_like(like)
    try:
        return x.framework.allocate(form)
    except TypeError as error:
        raise TypeError(f"{function}: a result of dtype {form.dtype}: {error}") from None


def pointers(operands: Iterable[Operand | None]) -> tuple[int, ...]:
    """Return where operands lie, 0 for one that is absent."""
    return tuple([0 if operand is None else operand.pointer for operand in operands])


def exported(operands: Iterable[Operand | None]) -> list[Any]:
    """Return the arrays that the user gets for results."""
    return [None if operand is None else operand.framework.export(operand) for operand in operands]
