# SPDX-License-Identifier: MIT
"""Runs the row-norm kernels where the arrays are: on a GPU, on a CPU, or by the NumPy reference."""

from __future__ import annotations

import sys
import warnings
from functools import cache

from cunorm import _again, _cpu, _cuda, _fallback, _plan, _scratch
from cunorm._again import Ran
from cunorm._arrays import Device, contiguous_form, joined
from cunorm._builds import Build, Launch
from cunorm._calls import (
    BACKWARD_ARRAYS,
    BACKWARD_SIZE,
    FORWARD_ARRAYS,
    FORWARD_SIZE,
    Backward,
    BackwardForm,
    Forward,
    ForwardForm,
    backward_arguments,
    forward_arguments,
    param_grad_arguments,
)
from cunorm._cpu import Kernels, Pointers
from cunorm._loaded import Cached


def run_forward(call: Forward) -> Ran | None:
    """Run the forward, of at least one row; return what ran, if that was compiled for a CPU."""
    x, form = call.x, call.form
    walk = form.where.walk
    if x.device.kind == "cuda":
        features = _cuda.device_limits(x.device).features
        launch = _plan.cuda_forward(form.types, walk, call.access(), features)
        with (
            x.framework.device_scope(x.device),
            joined(x.framework, call.operands(), x.device) as stream,
        ):
            _cuda.launch(launch, call.arguments(), x.device, stream)
    elif has_compiler():
        return _again.run(cpu_forward_kernels(form, call.numbers()), call.pointers())
    else:
        _fallback.forward(call)
    return None


def forward_builds(form: ForwardForm, device: Device) -> list[Build]:
    """Return what `run_forward` needs for a form of call whose arrays are aligned."""
    walk = form.where.walk
    if device.kind == "cuda":
        features = _cuda.device_limits(device).features
        access = _plan.common_access(walk.width, [])
        return [_plan.cuda_forward(form.types, walk, access, features).build]
    return [_forward_on_cpu(form)[0].build]


def run_backward(call: Backward) -> Ran | None:
    """Run the backward, as `run_forward`; with zero rows, dweight and dbias become zeros."""
    x = call.x
    if x.device.kind == "cuda":
        with x.framework.device_scope(x.device):
            _backward_on_gpu(call)
    elif has_compiler():
        return _again.run(cpu_backward_kernels(call.form, call.numbers()), call.pointers())
    else:
        _fallback.backward(call)
    return None


def backward_builds(form: BackwardForm, device: Device) -> list[Build]:
    """Return what `run_backward` needs for a form of call whose arrays are aligned."""
    walk = form.where.walk
    width = walk.width * walk.groups
    if device.kind == "cuda":
        limits = _cuda.device_limits(device)
        sizes = (walk.not_empty(), _plan.common_access(walk.width, []))
        launches = [_plan.cuda_backward(form.types, *sizes, limits.sm_count, limits.features)]
        params = _plan.cuda_param_grad(form.param_types, width)
    else:
        launches = [_backward_on_cpu(form)[0]]
        params = _plan.cpu_param_grad(form.param_types, width)
    if form.types.dweight or form.types.dbias:
        launches.append(params)
    return [launch.build for launch in launches]


@Cached
def cpu_forward_kernels(form: ForwardForm, numbers: bytes) -> Kernels:
    """Return what runs calls of a form, given where their arrays lie."""
    launch, parts = _forward_on_cpu(form)
    passes = form.passes if parts else (0,)
    tasks = _tasks_of_passes(launch, form, len(passes), FORWARD_SIZE)

    def packed(pointers: Pointers) -> bytes:
        *arrays, part_sums = pointers
        return b"".join(forward_arguments(form, arrays, numbers, one, part_sums) for one in passes)

    run = _cpu.runner(tasks, packed, FORWARD_ARRAYS + 1)
    return _scratch.lent_last(_part_sums_size(form, parts), run)


def _forward_on_cpu(form: ForwardForm) -> tuple[Launch, int]:
    """Return a launch, and into how many parts it cuts rows that blocks share."""
    walk = form.where.walk
    launch, parts = _plan.cpu_forward(form.types, walk), _plan.cpu_forward_parts(walk)
    return (_plan.cpu_shared(launch, walk, parts) if parts else launch), parts


@Cached
def cpu_backward_kernels(form: BackwardForm, numbers: bytes) -> Kernels:
    """Return the same of backwards."""
    walk = form.where.walk
    launch, parts = _backward_on_cpu(form)
    passes = () if not walk.rows else form.passes if parts else (0,)
    tasks = _tasks_of_passes(launch, form, len(passes), BACKWARD_SIZE)
    if form.parameters:
        width = walk.width * walk.groups
        params = _plan.cpu_param_grad(form.param_types, width)
        tasks.append(_task(params, len(passes) * BACKWARD_SIZE, launch.parts * width))

    def packed(pointers: Pointers) -> bytes:
        *arrays, part_sums = pointers
        found = b"".join(
            backward_arguments(form, arrays, numbers, launch, one, part_sums) for one in passes
        )
        return found + (param_grad_arguments(form, arrays, launch) if form.parameters else b"")

    run = _cpu.runner(tasks, packed, BACKWARD_ARRAYS + 1)
    run = _scratch.lent_last(_part_sums_size(form, parts), run)
    return _scratch.lent(form.parameters * launch.sums_size * form.types.compute.itemsize, run)


def _backward_on_cpu(form: BackwardForm) -> tuple[Launch, int]:
    """Return the same of a backward."""
    walk = form.where.walk
    launch = _plan.cpu_backward(form.types, walk.not_empty())
    parts = _plan.cpu_backward_parts(walk)
    return (_plan.cpu_shared(launch, walk, parts) if parts else launch), parts


def _part_sums_size(form: ForwardForm | BackwardForm, parts: int) -> int:
    """Return the bytes of what passes over shared rows hand on: three sums, found twice at most."""
    walk = form.where.walk
    return 2 * 3 * walk.rows * walk.groups * parts * form.types.compute.itemsize


def _tasks_of_passes(
    launch: Launch, form: ForwardForm | BackwardForm, passes: int, size: int
) -> list[_cpu.Task]:
    elements = form.where.walk.elements
    return [_task(launch, number * size, elements) for number in range(passes)]


def _task(launch: Launch, place: int, work: int) -> _cpu.Task:
    return _cpu.Task(_cpu.library(launch.build), launch.grid, place, work)


def forget() -> None:
    """Let the next call load its kernels anew."""
    _cpu.forget()
    _cuda.forget()
    cpu_forward_kernels.cache_clear()
    cpu_backward_kernels.cache_clear()
    _again.forget()


def _backward_on_gpu(call: Backward) -> None:
    x, form = call.x, call.form
    walk = form.where.walk
    limits = _cuda.device_limits(x.device)
    sizes = (walk.not_empty(), call.access())
    launch = _plan.cuda_backward(form.types, *sizes, limits.sm_count, limits.features)
    if call.sums is None and form.parameters:
        call = _with_sums(call, launch)
    with joined(x.framework, call.operands(), x.device) as stream:
        if walk.rows:
            _cuda.launch(launch, call.arguments(launch), x.device, stream)
        if form.parameters:
            params = _plan.cuda_param_grad(form.param_types, walk.width * walk.groups)
            _cuda.launch(params, call.param_arguments(launch), x.device, stream)


def _with_sums(call: Backward, launch: Launch) -> Backward:
    """Return the call with memory for its partial sums."""
    size = call.form.parameters * launch.sums_size
    sums = contiguous_form((size,), call.form.types.compute, call.x.device)
    return call._replace(sums=call.x.framework.allocate(sums))


@cache
def has_compiler() -> bool:
    if _cpu.compiler() is not None:
        return True
    warnings.warn(
        "cunorm found no C++ compiler, so CPU arrays are normalised by the slow NumPy reference: "
        "install g++ or clang++, or point CXX at one",
        RuntimeWarning,
        stacklevel=_level_of_caller(),
    )
    return False


def _level_of_caller() -> int:
    """Return the stacklevel with which a warning of the function that asks points to our user."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(f"{__package__}."):
        frame, level = frame.f_back, level + 1
    return level
