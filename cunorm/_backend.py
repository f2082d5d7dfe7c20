# SPDX-License-Identifier: MIT
"""Runs the row-norm kernels where the arrays are: on a GPU, on a CPU, or by the NumPy reference."""

from __future__ import annotations

import struct
import warnings
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from cunorm import _cpu, _cuda, _fallback, _plan
from cunorm._arrays import Operand, contiguous_form, joined
from cunorm._builds import BackwardTypes, ForwardTypes, Launch, ParamGradTypes
from cunorm._checks import Geometry
from cunorm._layout import RowLayout

# The kernels' argument structs: all fields are of eight bytes. Rows: a pointer and a layout.
_FORWARD = struct.Struct("<" + 4 * "Q5q" + "4Q2q2d")
_BACKWARD = struct.Struct("<" + 5 * "Q5q" + "5Q2qd")
_PARAM_GRAD = struct.Struct("<4Q3q")


class ForwardForm(NamedTuple):
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
    x: Operand
    residual: Operand | None
    weight: Operand | None
    bias: Operand | None
    y: Operand
    new_residual: Operand | None
    mean: Operand | None
    rstd: Operand | None

    def row_operands(self) -> tuple[Operand | None, ...]:
        """Return the operands that have a row for each row of x."""
        return (self.x, self.residual, self.y, self.new_residual)

    def arguments(self) -> bytes:
        """Return `struct Arguments` of row_norm_forward.cu."""
        where, (x, residual, y, new_residual) = self.form.where, self.form.layouts
        return _FORWARD.pack(
            *(self.x.pointer, *x),
            *(_pointer(self.residual), *residual),
            *(self.y.pointer, *y),
            *(_pointer(self.new_residual), *new_residual),
            *map(_pointer, (self.weight, self.bias, self.mean, self.rstd)),
            *(where.rows, where.width, self.k, self.eps),
        )

    def operands(self) -> list[Operand]:
        """Return every array of the call."""
        return _present(*self.row_operands(), self.weight, self.bias, self.mean, self.rstd)

    def access(self) -> int:
        """Return how many elements alignment lets a GPU's thread move at once."""
        form = self.form
        return _access(
            form.where.width, self.row_operands(), form.layouts, (self.weight, self.bias)
        )


class BackwardForm(NamedTuple):
    """As ForwardForm, of row_norm_backward and param_grad."""

    where: Geometry
    types: BackwardTypes
    param_types: ParamGradTypes
    layouts: tuple[RowLayout, ...]  # of the operands with rows, in the order of `row_operands`


@dataclass(slots=True)
class Backward:
    """A call of row_norm_backward, and of param_grad where a parameter's gradient is wanted."""

    form: BackwardForm
    k: float
    dy: Operand
    x: Operand
    d_residual: Operand | None
    dx: Operand | None
    dresidual: Operand | None
    weight: Operand | None
    mean: Operand | None
    rstd: Operand
    dweight: Operand | None
    dbias: Operand | None
    sums: Operand | None = None  # partial sums: for dweight, then for dbias

    def row_operands(self) -> tuple[Operand | None, ...]:
        """Return the operands that have a row for each row of x."""
        return (self.dy, self.x, self.d_residual, self.dx, self.dresidual)

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
        where, (dy, x, d_residual, dx, dresidual) = self.form.where, self.form.layouts
        return _BACKWARD.pack(
            *(self.dy.pointer, *dy),
            *(self.x.pointer, *x),
            *(_pointer(self.d_residual), *d_residual),
            *(_pointer(self.dx), *dx),
            *(_pointer(self.dresidual), *dresidual),
            *map(_pointer, (self.weight, self.mean, self.rstd)),
            *self.sum_pointers(launch),
            *(where.rows, where.width, self.k),
        )

    def param_arguments(self, launch: Launch) -> bytes:
        """Return `struct Arguments` of param_grad.cu; `launch` is row_norm_backward's."""
        where = self.form.where
        return _PARAM_GRAD.pack(
            *self.sum_pointers(launch),
            *map(_pointer, (self.dweight, self.dbias)),
            launch.grid if where.rows else 0,
            launch.sums_pitch,
            where.width,
        )

    def operands(self) -> list[Operand]:
        """Return every array of the call."""
        others = (self.weight, self.mean, self.rstd, self.dweight, self.dbias, self.sums)
        return _present(*self.row_operands(), *others)

    def access(self) -> int:
        """Return how many elements alignment lets a GPU's thread move at once."""
        parameters = (self.weight,)
        return _access(self.form.where.width, self.row_operands(), self.form.layouts, parameters)


def run_forward(call: Forward) -> None:
    """Run the forward; there is at least one row."""
    x, form = call.x, call.form
    rows, width = form.where.rows, form.where.width
    if x.device.kind == "cuda":
        launch = _plan.cuda_forward(form.types, rows, width, call.access())
        with (
            x.framework.device_scope(x.device),
            joined(x.framework, call.operands(), x.device) as stream,
        ):
            _cuda.launch(launch, call.arguments(), x.device, stream)
    elif _has_compiler():
        launch = _plan.cpu_forward(form.types, rows, width)
        _cpu.prepared(launch.build, launch.grid, call.arguments(), rows * width)()
    else:
        _fallback.forward(call)


def run_backward(call: Backward) -> None:
    """Run the backward; with zero rows, dweight and dbias become zeros."""
    x = call.x
    if x.device.kind == "cuda":
        with x.framework.device_scope(x.device):
            _backward_on_gpu(call)
    elif _has_compiler():
        _backward_on_cpu(call)
    else:
        _fallback.backward(call)


def _backward_on_gpu(call: Backward) -> None:
    x, form = call.x, call.form
    rows, width = form.where.rows, form.where.width
    sm_count = _cuda.device_limits(x.device).sm_count
    launch = _plan.cuda_backward(form.types, max(rows, 1), width, call.access(), sm_count)
    _allocate_sums(call, launch)
    with joined(x.framework, call.operands(), x.device) as stream:
        if rows:
            _cuda.launch(launch, call.arguments(launch), x.device, stream)
        if call.sums is not None:
            params = _plan.cuda_param_grad(form.param_types, width)
            _cuda.launch(params, call.param_arguments(launch), x.device, stream)


def _backward_on_cpu(call: Backward) -> None:
    form = call.form
    rows, width = form.where.rows, form.where.width
    launch = _plan.cpu_backward(form.types, max(rows, 1), width)
    _allocate_sums(call, launch)
    kernels = []
    if rows:
        arguments = call.arguments(launch)
        kernels.append(_cpu.prepared(launch.build, launch.grid, arguments, rows * width))
    if call.sums is not None:
        params = _plan.cpu_param_grad(form.param_types, width)
        arguments = call.param_arguments(launch)
        kernels.append(_cpu.prepared(params.build, params.grid, arguments, launch.grid * width))
    for kernel in kernels:
        kernel()


def _allocate_sums(call: Backward, launch: Launch) -> None:
    parameters = (call.dweight is not None) + (call.dbias is not None)
    if parameters:
        size = parameters * launch.sums_size
        sums = contiguous_form((size,), call.form.types.compute, call.x.device)
        call.sums = call.x.framework.allocate(sums)


@cache
def _has_compiler() -> bool:
    if _cpu.compiler() is not None:
        return True
    warnings.warn(
        "cunorm found no C++ compiler, so CPU arrays are normalised by the slow NumPy reference: "
        "install g++ or clang++, or point CXX at one",
        RuntimeWarning,
        stacklevel=6,  # the caller of the public function
    )
    return False


def _pointer(operand: Operand | None) -> int:
    return 0 if operand is None else operand.pointer


def _present(*operands: Operand | None) -> list[Operand]:
    return [operand for operand in operands if operand is not None]


def _access(
    width: int,
    rows: tuple[Operand | None, ...],
    layouts: tuple[RowLayout, ...],
    parameters: tuple[Operand | None, ...],
) -> int:
    places: list[tuple[int, int, tuple[int, ...]]] = [
        (operand.pointer, operand.dtype.itemsize, layout.strides)
        for operand, layout in zip(rows, layouts, strict=True)
        if operand is not None
    ]
    places += [(p.pointer, p.dtype.itemsize, ()) for p in _present(*parameters)]
    return _plan.common_access(width, places)
