# SPDX-License-Identifier: MIT
"""Calls of the row-norm kernels: their operands, and the argument structs made of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from cunorm import _plan
from cunorm._arrays import Operand
from cunorm._builds import BackwardTypes, ForwardTypes, Launch, ParamGradTypes
from cunorm._checks import Geometry
from cunorm._layout import RowLayout

# The kernels' argument structs: all fields are of eight bytes. Rows: a pointer and a layout.
_FORWARD = struct.Struct("<" + 5 * "Q5q" + "4Q3q3d")
_BACKWARD = struct.Struct("<" + 7 * "Q5q" + "6Q3q2d")
_PARAM_GRAD = struct.Struct("<4Q3q")


@dataclass(frozen=True, slots=True, eq=False)  # a key that is compared by identity
class ForwardForm:
    """All of a call of row_norm_forward but its numbers and where its arrays lie."""

    where: Geometry
    types: ForwardTypes
    layouts: tuple[RowLayout, ...]  # of the operands with rows, in the order of `row_operands`


@dataclass(slots=True)
class Forward:
    """A call of row_norm_forward."""

    form: ForwardForm
    k: float
    eps: float
    weight_offset: float
    x: Operand
    residual: Operand | None
    gate: Operand | None
    weight: Operand | None
    bias: Operand | None
    y: Operand
    new_residual: Operand | None
    mean: Operand | None
    rstd: Operand | None

    def row_operands(self) -> tuple[Operand | None, ...]:
        """Return the operands that have a row for each row of x."""
        return (self.x, self.residual, self.gate, self.y, self.new_residual)

    def arguments(self) -> bytes:
        """Return `struct Arguments` of row_norm_forward.cu."""
        parameters = (self.weight, self.bias, self.mean, self.rstd)
        pointers = tuple(map(_pointer, (*self.row_operands(), *parameters)))
        return _forward_arguments(self.form, pointers, self.k, self.eps, self.weight_offset)

    def operands(self) -> list[Operand]:
        """Return every array of the call."""
        return _present(*self.row_operands(), self.weight, self.bias, self.mean, self.rstd)

    def access(self) -> int:
        """Return how many elements alignment lets a GPU's thread move at once."""
        return _access(self.form, self.row_operands(), (self.weight, self.bias))


@dataclass(frozen=True, slots=True, eq=False)
class BackwardForm:
    """As ForwardForm, of row_norm_backward and param_grad."""

    where: Geometry
    types: BackwardTypes
    param_types: ParamGradTypes
    layouts: tuple[RowLayout, ...]  # of the operands with rows, in the order of `row_operands`


@dataclass(slots=True)
class Backward:
    """A call of row_norm_backward, and of param_grad where a parameter's gradient is wanted.

    Its results belong to the framework and the device of x, which need not be among what is read.
    """

    form: BackwardForm
    k: float
    weight_offset: float
    dy: Operand
    x: Operand
    d_residual: Operand | None
    gate: Operand | None
    dx: Operand | None
    dresidual: Operand | None
    dgate: Operand | None
    weight: Operand | None
    bias: Operand | None
    mean: Operand | None
    rstd: Operand | None
    dweight: Operand | None
    dbias: Operand | None
    sums: Operand | None = None  # partial sums: for dweight, then for dbias

    def row_operands(self) -> tuple[Operand | None, ...]:
        """Return the operands that have a row for each row of x."""
        x = self.x if self.form.types.x is not None else None
        inputs = (self.dy, x, self.d_residual, self.gate)
        return (*inputs, self.dx, self.dresidual, self.dgate)

    def sum_pointers(self, launch: Launch) -> tuple[int, int]:
        """Return where the partial sums for dweight and for dbias begin."""
        if self.sums is None:
            return (0, 0)
        first = self.sums.pointer
        if self.dweight is None:
            return (0, first)
        size = launch.sums_size * self.form.types.compute.itemsize
        return (first, 0 if self.dbias is None else first + size)

    def arguments(self, launch: Launch) -> bytes:
        """Return `struct Arguments` of row_norm_backward.cu."""
        parameters = (self.weight, self.bias, self.mean, self.rstd)
        pointers = tuple(map(_pointer, (*self.row_operands(), *parameters)))
        pointers += self.sum_pointers(launch)
        return _backward_arguments(self.form, pointers, self.k, self.weight_offset)

    def param_arguments(self, launch: Launch) -> bytes:
        """Return `struct Arguments` of param_grad.cu; `launch` is row_norm_backward's."""
        rows, width, groups = self.form.where.walk
        return _PARAM_GRAD.pack(
            *self.sum_pointers(launch),
            *map(_pointer, (self.dweight, self.dbias)),
            launch.parts if rows else 0,
            launch.sums_pitch,
            width * groups,
        )

    def operands(self) -> list[Operand]:
        """Return every array of the call."""
        others = (self.weight, self.bias, self.mean, self.rstd)
        return _present(*self.row_operands(), *others, self.dweight, self.dbias, self.sums)

    def access(self) -> int:
        """Return how many elements alignment lets a GPU's thread move at once."""
        return _access(self.form, self.row_operands(), (self.weight, self.bias))


# Programs call again with the arrays of before: packing what comes again is what takes time.
@lru_cache(maxsize=1024)
def _forward_arguments(form: ForwardForm, pointers: tuple[int, ...], *numbers: float) -> bytes:
    rows, width, groups = form.where.walk
    return _FORWARD.pack(
        *_rows(pointers, form.layouts), *pointers[5:], rows, groups, width, *numbers
    )


@lru_cache(maxsize=1024)
def _backward_arguments(form: BackwardForm, pointers: tuple[int, ...], *numbers: float) -> bytes:
    rows, width, groups = form.where.walk
    return _BACKWARD.pack(
        *_rows(pointers, form.layouts), *pointers[7:], rows, groups, width, *numbers
    )


def _rows(pointers: tuple[int, ...], layouts: tuple[RowLayout, ...]) -> Iterator[int]:
    """Return the fields of `struct Rows` for each layout, with the pointers in front."""
    for pointer, layout in zip(pointers, layouts, strict=False):
        yield pointer
        yield from layout


def _pointer(operand: Operand | None) -> int:
    return 0 if operand is None else operand.pointer


def _present(*operands: Operand | None) -> list[Operand]:
    return [operand for operand in operands if operand is not None]


def _access(
    form: ForwardForm | BackwardForm,
    rows: tuple[Operand | None, ...],
    parameters: tuple[Operand | None, ...],
) -> int:
    places: list[tuple[int, int, tuple[int, ...]]] = [
        (operand.pointer, operand.dtype.itemsize, layout.strides)
        for operand, layout in zip(rows, form.layouts, strict=True)
        if operand is not None
    ]
    places += [(p.pointer, p.dtype.itemsize, ()) for p in _present(*parameters)]
    return _plan.common_access(form.where.walk.width, places)
