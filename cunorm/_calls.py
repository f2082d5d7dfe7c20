# SPDX-License-Identifier: MIT
"""Calls of the row-norm kernels: their operands, and the argument structs made of them."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from cunorm import _plan
from cunorm._arrays import Operand
from cunorm._builds import BackwardTypes, ForwardTypes, Launch, ParamGradTypes
from cunorm._checks import Geometry
from cunorm._cpu import Pointers
from cunorm._dtypes import FLOAT64
from cunorm._layout import RowLayout

# The kernels' argument structs: all fields are of eight bytes. Rows: a pointer and a layout.
_FORWARD = struct.Struct("<" + 5 * "Q5q" + "4Q3q")
_BACKWARD = struct.Struct("<" + 7 * "Q5q" + "6Q3q")
_PARAM_GRAD = struct.Struct("<4Q3q")
BACKWARD_SIZE = _BACKWARD.size + 2 * 8  # bytes, with the numbers

_FORWARD_ROWS = ("x", "residual", "gate", "y", "new_residual")
_FORWARD_OTHERS = ("weight", "bias", "mean", "rstd")
_BACKWARD_ROWS = ("dy", "x", "d_residual", "gate", "dx", "dresidual", "dgate")
_BACKWARD_OTHERS = ("weight", "bias", "mean", "rstd")
# The fields of a call that come before its arrays: form and numbers.
_BEFORE_FORWARD: Final = 4
_BEFORE_BACKWARD: Final = 3


@dataclass(frozen=True, slots=True, eq=False)  # a key that is compared by identity
class ForwardForm:
    """All of a call of row_norm_forward but its numbers and where its arrays lie."""

    where: Geometry
    types: ForwardTypes
    layouts: tuple[RowLayout, ...]  # of the operands with rows, in the kernel's order


class Forward(NamedTuple):
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

    def numbers(self) -> bytes:
        """Return the end of the arguments, as bits: 0.0 is not -0.0."""
        return _numbers(self.form, self.k, self.eps, self.weight_offset)

    def pointers(self) -> tuple[int, ...]:
        """Return where the arrays lie, 0 for none, in the order of the fields."""
        return tuple([0 if array is None else array.pointer for array in self[_BEFORE_FORWARD:]])

    def arguments(self) -> bytes:
        """Return `struct Arguments` of row_norm_forward.cu."""
        return forward_arguments(self.form, self.pointers(), self.numbers())

    def operands(self) -> list[Operand]:
        """Return every array of the call."""
        return [operand for operand in self[_BEFORE_FORWARD:] if operand is not None]

    def access(self) -> int:
        """Return how many elements alignment lets a GPU's thread move at once."""
        return _access(self, _FORWARD_ROWS)


FORWARD_ARRAYS = len(Forward._fields) - _BEFORE_FORWARD  # of a call, absent ones too


def forward_arguments(form: ForwardForm, pointers: Pointers, numbers: bytes) -> bytes:
    """Return `struct Arguments` of row_norm_forward.cu; `pointers` as Forward has them."""
    at = dict(zip(Forward._fields[_BEFORE_FORWARD:], pointers, strict=True))
    others = [at[name] for name in _FORWARD_OTHERS]
    rows = _rows([at[name] for name in _FORWARD_ROWS], form.layouts)
    return _FORWARD.pack(*rows, *others, *_sizes(form.where)) + numbers


@dataclass(frozen=True, slots=True, eq=False)
class BackwardForm:
    """As ForwardForm, of row_norm_backward and param_grad."""

    where: Geometry
    types: BackwardTypes
    param_types: ParamGradTypes
    layouts: tuple[RowLayout, ...]  # of the operands with rows, in the kernel's order

    @property
    def parameters(self) -> int:
        """Return for how many parameters a gradient is wanted."""
        return self.types.dweight + self.types.dbias


class Backward(NamedTuple):
    """A call of row_norm_backward, and of param_grad where a parameter's gradient is wanted.

    Its results belong to the framework and the device of x. Whether an input is read is for the
    types of the form to say.
    """

    form: BackwardForm
    k: float
    weight_offset: float
    dy: Operand
    x: Operand
    rstd: Operand | None
    mean: Operand | None
    d_residual: Operand | None
    gate: Operand | None
    weight: Operand | None
    bias: Operand | None
    dx: Operand | None
    dweight: Operand | None
    dbias: Operand | None
    dgate: Operand | None
    dresidual: Operand | None
    sums: Operand | None = None  # partial sums: for dweight, then for dbias

    def numbers(self) -> bytes:
        """Return the end of the arguments, as bits: 0.0 is not -0.0."""
        return _numbers(self.form, self.k, self.weight_offset)

    def pointers(self) -> tuple[int, ...]:
        """Return where the arrays lie, 0 for none, in the order of the fields."""
        return tuple([0 if array is None else array.pointer for array in self[_BEFORE_BACKWARD:]])

    def arguments(self, launch: Launch) -> bytes:
        """Return `struct Arguments` of row_norm_backward.cu."""
        return backward_arguments(self.form, self.pointers(), self.numbers(), launch)

    def param_arguments(self, launch: Launch) -> bytes:
        """Return `struct Arguments` of param_grad.cu; `launch` is row_norm_backward's."""
        return param_grad_arguments(self.form, self.pointers(), launch)

    def operands(self) -> list[Operand]:
        """Return every array of the call."""
        return [operand for operand in self[_BEFORE_BACKWARD:] if operand is not None]

    def access(self) -> int:
        """Return how many elements alignment lets a GPU's thread move at once."""
        return _access(self, _BACKWARD_ROWS)


BACKWARD_ARRAYS = len(Backward._fields) - _BEFORE_BACKWARD


def backward_arguments(
    form: BackwardForm, pointers: Pointers, numbers: bytes, launch: Launch
) -> bytes:
    """Return `struct Arguments` of row_norm_backward.cu; `pointers` as Backward has them."""
    at = dict(zip(Backward._fields[_BEFORE_BACKWARD:], pointers, strict=True))
    others = [at[name] for name in _BACKWARD_OTHERS]
    sums = _sum_pointers(form, at["sums"], launch)
    rows = _rows([at[name] for name in _BACKWARD_ROWS], form.layouts)
    return _BACKWARD.pack(*rows, *others, *sums, *_sizes(form.where)) + numbers


def param_grad_arguments(form: BackwardForm, pointers: Pointers, launch: Launch) -> bytes:
    """Return `struct Arguments` of param_grad.cu; `launch` is row_norm_backward's."""
    at = dict(zip(Backward._fields[_BEFORE_BACKWARD:], pointers, strict=True))
    rows, groups, width = _sizes(form.where)
    return _PARAM_GRAD.pack(
        *_sum_pointers(form, at["sums"], launch),
        *(at["dweight"], at["dbias"]),
        *(launch.parts if rows else 0, launch.sums_pitch, width * groups),
    )


def _sum_pointers(form: BackwardForm, first: int, launch: Launch) -> tuple[int, int]:
    """Return where the partial sums for dweight and for dbias begin."""
    if not form.types.dweight:
        return (0, first)
    size = launch.sums_size * form.types.compute.itemsize
    return (first, first + size if form.types.dbias else 0)


def _numbers(form: ForwardForm | BackwardForm, *numbers: float) -> bytes:
    """Return `Number` of types.cuh of each; what is too large for a float becomes infinite."""
    if form.types.compute is FLOAT64:
        return array("d", numbers).tobytes()
    return array("f", [half for number in numbers for half in (number, 0.0)]).tobytes()


def _rows(pointers: list[int], layouts: tuple[RowLayout, ...]) -> Iterator[int]:
    """Return the fields of `struct Rows` for each layout, with the pointers in front."""
    for pointer, layout in zip(pointers, layouts, strict=True):
        yield pointer
        yield from layout


def _sizes(where: Geometry) -> tuple[int, int, int]:
    rows, width, groups = where.walk
    return rows, groups, width


def _access(call: Forward | Backward, names: tuple[str, ...]) -> int:
    """Return what the alignment of the operands that the kernel reads and writes allows."""
    types = call.form.types
    places: list[tuple[int, int, tuple[int, ...]]] = []
    for dtype, name, layout in zip(types.row_operands(), names, call.form.layouts, strict=True):
        if dtype is not None:
            places.append((getattr(call, name).pointer, dtype.itemsize, layout.strides))
    for dtype, parameter in ((types.weight, call.weight), (types.bias, call.bias)):
        if dtype is not None and parameter is not None:
            places.append((parameter.pointer, dtype.itemsize, ()))
    return _plan.common_access(call.form.where.walk.width, places)
