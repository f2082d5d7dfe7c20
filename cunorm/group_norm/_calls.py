# SPDX-License-Identifier: MIT
"""Calls of the group-norm kernels: their operands, and the argument structs made of them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

from cunorm import _plan
from cunorm._arrays import Operand
from cunorm._builds import ParamGradTypes
from cunorm._cpu import Pointers
from cunorm.group_norm._builds import GroupBackwardTypes, GroupForwardTypes
from cunorm.group_norm._plan import Schedule
from cunorm.group_norm._tiling import Samples

# The kernels' argument structs: all fields are of eight bytes. Lines: a pointer and two strides.
_FORWARD = struct.Struct("<" + 2 * "Q2q" + "5Q7q")  # and eps
_BACKWARD = struct.Struct("<" + 3 * "Q2q" + "7Q7q")
_PARAM_GRAD = struct.Struct("<4Q3q")
_EPS = struct.Struct("<d")

_FORWARD_LINES = ("x", "y")
_BACKWARD_LINES = ("dy", "x", "dx")
_BEFORE_FORWARD: Final = 2  # the fields of a call that come before its arrays
_BEFORE_BACKWARD: Final = 1

Lines = tuple[int, int]  # the strides from sample to sample and from line to line, in elements


def eps_bits(eps: float) -> bytes:
    """Return eps as bits: 0.0 is not -0.0."""
    return _EPS.pack(eps)


def eps_of(bits: bytes) -> float:
    """Return the eps whose bits these are."""
    eps: float = _EPS.unpack(bits)[0]
    return eps


@dataclass(frozen=True, slots=True, eq=False)  # a key that is compared by identity
class GroupForwardForm:
    """All of a call of group_norm_forward but eps and where its arrays lie."""

    where: Samples
    types: GroupForwardTypes
    lines: tuple[Lines, ...]  # of x and y
    channel_axis: int  # of the arrays' shapes


class GroupForward(NamedTuple):
    """A call of group_norm_forward."""

    form: GroupForwardForm
    eps: float
    x: Operand
    weight: Operand | None
    bias: Operand | None
    y: Operand
    mean: Operand | None
    rstd: Operand | None
    workspace: Operand | None = None  # what passes hand on

    def numbers(self) -> bytes:
        """Return the numbers of the arguments, as bits."""
        return eps_bits(self.eps)

    def pointers(self) -> tuple[int, ...]:
        """Return where the arrays lie, 0 for none, in the order of the fields."""
        return tuple([0 if array is None else array.pointer for array in self[_BEFORE_FORWARD:]])

    def operands(self) -> list[Operand]:
        """Return every array of the call."""
        return [operand for operand in self[_BEFORE_FORWARD:] if operand is not None]

    def access(self) -> int:
        """Return how many elements alignment lets a GPU's thread move at once."""
        return _access(self, _FORWARD_LINES)


@dataclass(frozen=True, slots=True, eq=False)
class GroupBackwardForm:
    """As GroupForwardForm, of group_norm_backward and param_grad."""

    where: Samples
    types: GroupBackwardTypes
    param_types: ParamGradTypes
    lines: tuple[Lines, ...]  # of dy, x and dx
    channel_axis: int  # of the arrays' shapes

    @property
    def parameters(self) -> int:
        """Return for how many parameters a gradient is wanted."""
        return self.types.dweight + self.types.dbias


class GroupBackward(NamedTuple):
    """A call of group_norm_backward, and of param_grad where a parameter's gradient is wanted."""

    form: GroupBackwardForm
    dy: Operand
    x: Operand
    mean: Operand
    rstd: Operand
    weight: Operand | None
    bias: Operand | None
    dx: Operand | None
    dweight: Operand | None
    dbias: Operand | None
    workspace: Operand | None = None  # what passes hand on, and the samples' sums

    def numbers(self) -> bytes:
        """Return nothing: there are none."""
        return b""

    def pointers(self) -> tuple[int, ...]:
        """Return where the arrays lie, 0 for none, in the order of the fields."""
        return tuple([0 if array is None else array.pointer for array in self[_BEFORE_BACKWARD:]])

    def operands(self) -> list[Operand]:
        """Return every array of the call."""
        return [operand for operand in self[_BEFORE_BACKWARD:] if operand is not None]

    def access(self) -> int:
        """Return how many elements alignment lets a GPU's thread move at once."""
        return _access(self, _BACKWARD_LINES)


GroupCall = GroupForward | GroupBackward
GroupForm = GroupForwardForm | GroupBackwardForm


def array_count(form: GroupForm) -> int:
    """Return how many arrays a call of the form has, absent ones and its workspace too."""
    if isinstance(form, GroupForwardForm):
        return len(GroupForward._fields) - _BEFORE_FORWARD
    return len(GroupBackward._fields) - _BEFORE_BACKWARD


def workspace_elements(form: GroupForm, schedule: Schedule) -> int:
    """Return how many elements of the compute type a call's workspace has."""
    where, rows = form.where, 0
    if isinstance(form, GroupBackwardForm):  # dweight takes the sums for dbias, too
        rows = 2 if form.types.dweight else form.parameters
    return schedule.handed_size + rows * where.samples * schedule.parts * where.pitch


def arguments(
    form: GroupForm,
    pointers: Pointers,
    numbers: bytes,
    schedule: Schedule,
    samples: int,
    first_sample: int,
) -> bytes:
    """Return `struct Arguments` of the form's kernel; `pointers` as its call has them."""
    if isinstance(form, GroupForwardForm):
        return _forward_arguments(form, pointers, schedule, samples, first_sample) + numbers
    return _backward_arguments(form, pointers, schedule, samples, first_sample)


def arguments_size(form: GroupForm) -> int:
    """Return the bytes of them."""
    return _FORWARD.size + _EPS.size if isinstance(form, GroupForwardForm) else _BACKWARD.size


def _forward_arguments(
    form: GroupForwardForm,
    pointers: Pointers,
    schedule: Schedule,
    samples: int,
    first_sample: int,
) -> bytes:
    x, weight, bias, y, mean, rstd, workspace = pointers
    (of_x, of_y), sizes = form.lines, _sizes(form.where, schedule)
    others = (weight, bias, mean, rstd, workspace)
    return _FORWARD.pack(x, *of_x, y, *of_y, *others, samples, first_sample, *sizes)


def _backward_arguments(
    form: GroupBackwardForm,
    pointers: Pointers,
    schedule: Schedule,
    samples: int,
    first_sample: int,
) -> bytes:
    dy, x, mean, rstd, weight, bias, dx, _, _, workspace = pointers
    (of_dy, of_x, of_dx), sizes = form.lines, _sizes(form.where, schedule)
    sums = _sum_pointers(form, workspace, schedule)
    others = (weight, bias, mean, rstd, *sums, workspace)
    rows = (dy, *of_dy, x, *of_x, dx, *of_dx)
    return _BACKWARD.pack(*rows, *others, samples, first_sample, *sizes)


def param_grad_arguments(form: GroupBackwardForm, pointers: Pointers, schedule: Schedule) -> bytes:
    """Return `struct Arguments` of param_grad.cu."""
    *_, dweight, dbias, workspace = pointers
    sums, where = _sum_pointers(form, workspace, schedule), form.where
    parts = where.samples * schedule.parts
    return _PARAM_GRAD.pack(*sums, dweight, dbias, parts, where.pitch, where.channels)


def _sum_pointers(form: GroupBackwardForm, first: int, schedule: Schedule) -> tuple[int, int]:
    """Return where the sums for dweight and for dbias begin: rows for each part of each sample."""
    itemsize = form.types.compute.itemsize
    dweight = first + schedule.handed_size * itemsize
    rows = form.where.samples * schedule.parts * form.where.pitch * itemsize
    return dweight, dweight + rows if form.types.dweight else dweight


def _sizes(where: Samples, schedule: Schedule) -> tuple[int, ...]:
    cut = schedule.part_positions, schedule.parts
    return where.positions, where.channels, where.groups, *cut


def _access(call: GroupCall, names: tuple[str, ...]) -> int:
    """Return what the alignment of the operands that the kernel reads and writes allows."""
    types, where = call.form.types, call.form.where
    places: list[tuple[int, int, tuple[int, ...]]] = []
    for name, strides in zip(names, call.form.lines, strict=True):
        operand = getattr(call, name)
        if operand is not None:
            places.append((operand.pointer, operand.dtype.itemsize, strides))
    if where.channels_last:
        for dtype, parameter in ((types.weight, call.weight), (types.bias, call.bias)):
            if dtype is not None and parameter is not None:
                places.append((parameter.pointer, dtype.itemsize, ()))
    line = where.channels if where.channels_last else where.positions
    return _plan.common_access(line, places)
