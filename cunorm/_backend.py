# SPDX-License-Identifier: MIT
"""Runs the row-norm kernels where the arrays are: on a GPU, on a CPU, or by the NumPy reference."""

from __future__ import annotations

import struct
import warnings
from dataclasses import dataclass
from functools import cache

from cunorm import _cpu, _cuda, _fallback, _plan
from cunorm._arrays import Operand, joined
from cunorm._builds import BackwardTypes, ForwardTypes, Launch, ParamGradTypes
from cunorm._checks import Geometry
from cunorm._dtypes import DType
from cunorm._layout import SINGLE_ROW, RowLayout

# The kernels' argument structs: all fields are of eight bytes. Rows: a pointer and a layout.
_FORWARD = struct.Struct("<" + 4 * "Q5q" + "4Q2q2d")
_BACKWARD = struct.Struct("<" + 5 * "Q5q" + "5Q2qd")
_PARAM_GRAD = struct.Struct("<4Q3q")

Rows = tuple[Operand, RowLayout]


@dataclass(slots=True)
class Forward:
    """A call of row_norm_forward."""

    where: Geometry
    x: Rows
    residual: Rows | None
    weight: Operand | None
    bias: Operand | None
    y: Rows
    new_residual: Rows | None
    mean: Operand | None
    rstd: Operand | None
    compute: DType
    center: bool
    k: float
    eps: float

    def types(self) -> ForwardTypes:
        """Return the dtypes that the build is for."""
        return ForwardTypes(
            compute=self.compute,
            x=self.x[0].dtype,
            residual=_row_dtype(self.residual),
            new_residual=_row_dtype(self.new_residual),
            weight=_dtype(self.weight),
            bias=_dtype(self.bias),
            y=self.y[0].dtype,
            center=self.center,
        )

    def arguments(self) -> bytes:
        """Return `struct Arguments` of row_norm_forward.cu."""
        return _FORWARD.pack(
            *_rows(self.x),
            *_rows(self.residual),
            *_rows(self.y),
            *_rows(self.new_residual),
            *map(_pointer, (self.weight, self.bias, self.mean, self.rstd)),
            self.where.rows,
            self.where.width,
            self.k,
            self.eps,
        )

    def operands(self) -> list[Operand]:
        """Return every array of the call."""
        rows = (self.x, self.residual, self.y, self.new_residual)
        return _present(rows, (self.weight, self.bias, self.mean, self.rstd))

    def access(self) -> int:
        """Return how many elements alignment lets a GPU's thread move at once."""
        rows = (self.x, self.residual, self.y, self.new_residual)
        return _access(self.where.width, rows, (self.weight, self.bias))


@dataclass(slots=True)
class Backward:
    """A call of row_norm_backward, and of param_grad where a parameter's gradient is wanted."""

    where: Geometry
    dy: Rows
    x: Rows
    d_residual: Rows | None
    dx: Rows | None
    dresidual: Rows | None
    weight: Operand | None
    mean: Operand | None
    rstd: Operand
    dweight: Operand | None
    dbias: Operand | None
    compute: DType
    center: bool
    k: float
    sums: Operand | None = None  # partial sums: for dweight, then for dbias

    def types(self) -> BackwardTypes:
        """Return the dtypes that the build is for."""
        return BackwardTypes(
            compute=self.compute,
            dy=self.dy[0].dtype,
            x=self.x[0].dtype,
            d_residual=_row_dtype(self.d_residual),
            dx=_row_dtype(self.dx),
            dresidual=_row_dtype(self.dresidual),
            weight=_dtype(self.weight),
            center=self.center,
            dweight=self.dweight is not None,
            dbias=self.dbias is not None,
        )

    def sum_pointers(self, launch: Launch) -> tuple[int, int]:
        """Return where the partial sums for dweight and for dbias begin."""
        if self.sums is None:
            return (0, 0)
        first = self.sums.pointer
        if self.dweight is None:
            return (0, first)
        size = launch.grid * launch.sums_pitch * self.compute.itemsize
        return (first, 0 if self.dbias is None else first + size)

    def arguments(self, launch: Launch) -> bytes:
        """Return `struct Arguments` of row_norm_backward.cu."""
        return _BACKWARD.pack(
            *_rows(self.dy),
            *_rows(self.x),
            *_rows(self.d_residual),
            *_rows(self.dx),
            *_rows(self.dresidual),
            *map(_pointer, (self.weight, self.mean, self.rstd)),
            *self.sum_pointers(launch),
            self.where.rows,
            self.where.width,
            self.k,
        )

    def param_types(self) -> ParamGradTypes:
        """Return the dtypes that the build of param_grad is for."""
        return ParamGradTypes(self.compute, _dtype(self.dweight), _dtype(self.dbias))

    def param_arguments(self, launch: Launch) -> bytes:
        """Return `struct Arguments` of param_grad.cu; `launch` is row_norm_backward's."""
        return _PARAM_GRAD.pack(
            *self.sum_pointers(launch),
            *map(_pointer, (self.dweight, self.dbias)),
            launch.grid if self.where.rows else 0,
            launch.sums_pitch,
            self.where.width,
        )

    def operands(self) -> list[Operand]:
        """Return every array of the call."""
        rows = (self.dy, self.x, self.d_residual, self.dx, self.dresidual)
        others = (self.weight, self.mean, self.rstd, self.dweight, self.dbias, self.sums)
        return _present(rows, others)

    def access(self) -> int:
        """Return how many elements alignment lets a GPU's thread move at once."""
        rows = (self.dy, self.x, self.d_residual, self.dx, self.dresidual)
        return _access(self.where.width, rows, (self.weight,))


def run_forward(call: Forward) -> None:
    """Run the forward; there is at least one row."""
    x = call.x[0]
    if x.device.kind == "cuda":
        launch = _plan.cuda_forward(call.types(), call.where.rows, call.where.width, call.access())
        with (
            x.framework.device_scope(x.device),
            joined(x.framework, call.operands(), x.device) as stream,
        ):
            _cuda.launch(launch, call.arguments(), x.device, stream)
    elif _has_compiler():
        launch = _plan.cpu_forward(call.types(), call.where.rows, call.where.width)
        work = call.where.rows * call.where.width
        _cpu.prepared(launch.build, launch.grid, call.arguments(), work)()
    else:
        _fallback.forward(call)


def run_backward(call: Backward) -> None:
    """Run the backward; with zero rows, dweight and dbias become zeros."""
    x = call.x[0]
    if x.device.kind == "cuda":
        with x.framework.device_scope(x.device):
            _backward_on_gpu(call)
    elif _has_compiler():
        _backward_on_cpu(call)
    else:
        _fallback.backward(call)


def _backward_on_gpu(call: Backward) -> None:
    x, where = call.x[0], call.where
    sm_count = _cuda.device_limits(x.device).sm_count
    launch = _plan.cuda_backward(
        call.types(), max(where.rows, 1), where.width, call.access(), sm_count
    )
    _allocate_sums(call, launch)
    with joined(x.framework, call.operands(), x.device) as stream:
        if where.rows:
            _cuda.launch(launch, call.arguments(launch), x.device, stream)
        if call.sums is not None:
            params = _plan.cuda_param_grad(call.param_types(), where.width)
            _cuda.launch(params, call.param_arguments(launch), x.device, stream)


def _backward_on_cpu(call: Backward) -> None:
    where = call.where
    launch = _plan.cpu_backward(call.types(), max(where.rows, 1), where.width)
    _allocate_sums(call, launch)
    kernels = []
    if where.rows:
        work = where.rows * where.width
        kernels.append(_cpu.prepared(launch.build, launch.grid, call.arguments(launch), work))
    if call.sums is not None:
        params = _plan.cpu_param_grad(call.param_types(), where.width)
        arguments = call.param_arguments(launch)
        work = launch.grid * where.width
        kernels.append(_cpu.prepared(params.build, params.grid, arguments, work))
    for kernel in kernels:
        kernel()


def _allocate_sums(call: Backward, launch: Launch) -> None:
    parameters = (call.dweight is not None) + (call.dbias is not None)
    if parameters:
        x = call.x[0]
        size = parameters * launch.grid * launch.sums_pitch
        call.sums = x.framework.allocate((size,), call.compute, x.device)


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


def _dtype(operand: Operand | None) -> DType | None:
    return None if operand is None else operand.dtype


def _row_dtype(rows: Rows | None) -> DType | None:
    return None if rows is None else rows[0].dtype


def _pointer(operand: Operand | None) -> int:
    return 0 if operand is None else operand.pointer


def _rows(rows: Rows | None) -> tuple[int, ...]:
    if rows is None:
        return (0, *SINGLE_ROW)
    return (rows[0].pointer, *rows[1])


def _present(rows: tuple[Rows | None, ...], operands: tuple[Operand | None, ...]) -> list[Operand]:
    found = [pair[0] for pair in rows if pair is not None]
    return found + [operand for operand in operands if operand is not None]


def _access(
    width: int, rows: tuple[Rows | None, ...], parameters: tuple[Operand | None, ...]
) -> int:
    places: list[tuple[int, int, tuple[int, ...]]] = [
        (pair[0].pointer, pair[0].dtype.itemsize, pair[1].strides)
        for pair in rows
        if pair is not None
    ]
    places += [(p.pointer, p.dtype.itemsize, ()) for p in parameters if p is not None]
    return _plan.common_access(width, places)
