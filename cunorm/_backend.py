# SPDX-License-Identifier: MIT
"""Runs the row-norm kernels where the arrays are: on a GPU, on a CPU, or by the NumPy reference."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from cunorm import (
    _again,
    _cpu,
    _cpu_plan,
    _cuda,
    _cuda_calls,
    _cuda_plan,
    _fallback,
    _plan,
    _scratch,
)
from cunorm._again import Ran
from cunorm._arguments import Kernels, Pointers
from cunorm._arrays import Device, contiguous_form
from cunorm._builds import Launch
from cunorm._calls import (
    BACKWARD_ARRAYS,
    BACKWARD_SIZE,
    FORWARD_ARRAYS,
    Backward,
    BackwardForm,
    Forward,
    ForwardForm,
    backward_arguments,
    forward_arguments,
    param_grad_arguments,
)
from cunorm._cuda_calls import Launches, Start
from cunorm._features import DeviceLimits
from cunorm._loaded import Cached


def run_forward(call: Forward) -> Ran | None:
    """Run the forward, of at least one row; return what ran, if that was compiled."""
    form, device = call.form, call.x.device
    if device.kind == "cuda":
        launch = _cuda_forward(form, call.access(), device)
        return _cuda_calls.run(call, _forward_starter(form, call.numbers(), launch, device), None)
    if has_compiler():
        return _again.run(cpu_forward_kernels(form, call.numbers()), call.pointers())
    _fallback.forward(call)
    return None


def forward_launches(form: ForwardForm, device: Device) -> list[Launch]:
    """Return what `run_forward` starts for a form of call whose arrays are aligned."""
    walk = form.where.walk
    if device.kind == "cuda":
        return [_cuda_forward(form, _plan.common_access(walk.width, []), device)]
    return [_forward_on_cpu(form)[0]]


def run_backward(call: Backward) -> Ran | None:
    """Run the backward, as `run_forward`; with zero rows, dweight and dbias become zeros."""
    form, device = call.form, call.x.device
    if device.kind == "cuda":
        launch = _cuda_backward(form, call.access(), device)
        size = form.parameters * launch.sums_size
        sums = contiguous_form((size,), form.types.compute, device) if size else None
        return _cuda_calls.run(call, _backward_starter(form, call.numbers(), launch, device), sums)
    if has_compiler():
        return _again.run(cpu_backward_kernels(form, call.numbers()), call.pointers())
    _fallback.backward(call)
    return None


def backward_launches(form: BackwardForm, device: Device) -> list[Launch]:
    """Return what `run_backward` starts for a form of call whose arrays are aligned."""
    walk = form.where.walk
    width = walk.width * walk.groups
    if device.kind == "cuda":
        launches = [_cuda_backward(form, _plan.common_access(walk.width, []), device)]
        params = _cuda_plan.cuda_param_grad(form.param_types, width)
    else:
        launches = [_backward_on_cpu(form)[0]]
        params = _cpu_plan.cpu_param_grad(form.param_types, width)
    if form.types.dweight or form.types.dbias:
        launches.append(params)
    return launches


def _cuda_forward(form: ForwardForm, access: int, device: Device) -> Launch:
    walk = form.where.walk
    plan = partial(_cuda_plan.cuda_forward, form.types, walk)
    return plan(access, _limits_of(plan, walk.width, device))


def _cuda_backward(form: BackwardForm, access: int, device: Device) -> Launch:
    walk = form.where.walk.not_empty()
    plan = partial(_cuda_plan.cuda_backward, form.types, walk)
    return plan(access, _limits_of(plan, walk.width, device))


def _limits_of(
    plan: Callable[[int, DeviceLimits], Launch], width: int, device: Device
) -> DeviceLimits:
    """Return what a GPU has, as arrays are aligned: no result depends on alignment."""
    return limits_that_fit(partial(plan, _plan.common_access(width, [])), device)


def limits_that_fit(plan: Callable[[DeviceLimits], Launch], device: Device) -> DeviceLimits:
    """Return what a GPU has, with smaller clusters, or none, where it has no room for them.

    A part of a GPU may have none for clusters that all whole ones take. The room is for blocks that
    have a multiprocessor each, as those of misaligned arrays may.
    """
    gpu = _cuda.device_limits(device)
    more_than_half = gpu.shared_memory_per_sm // 2
    while (launch := plan(gpu)).build.cluster > 1:
        alone = replace(launch, shared=max(launch.shared, more_than_half))
        if _cuda.fits_cluster(alone, device):
            break
        fewer = min(launch.build.cluster, gpu.features.largest_cluster) // 2
        features = gpu.features._replace(clusters=fewer > 1, largest_cluster=fewer)
        gpu = gpu._replace(features=features)
    return gpu


@Cached
def cpu_forward_kernels(form: ForwardForm, numbers: bytes) -> Kernels:
    """Return what runs calls of a form, given where their arrays lie."""
    launch, parts = _forward_on_cpu(form)

    def packed(pointers: Pointers) -> bytes:
        return forward_arguments(form, pointers, numbers)

    return _cpu.runner([_task(launch, 0, form.where.walk.elements, parts)], packed, FORWARD_ARRAYS)


def _forward_on_cpu(form: ForwardForm) -> tuple[Launch, int]:
    """Return a launch, and into how many parts it cuts rows that threads share; 0: they do not."""
    walk = form.where.walk
    launch, parts = _cpu_plan.cpu_forward(form.types, walk), _cpu_plan.cpu_forward_parts(walk)
    return (_cpu_plan.cpu_shared(launch, walk) if parts else launch), parts


@Cached
def cpu_backward_kernels(form: BackwardForm, numbers: bytes) -> Kernels:
    """Return the same of backwards."""
    walk = form.where.walk
    launch, parts = _backward_on_cpu(form)
    tasks = [_task(launch, 0, walk.elements, parts)] if walk.rows else []
    if form.parameters:
        width = walk.width * walk.groups
        params = _cpu_plan.cpu_param_grad(form.param_types, width)
        tasks.append(_task(params, len(tasks) * BACKWARD_SIZE, launch.parts * width))

    def packed(pointers: Pointers) -> bytes:
        found = backward_arguments(form, pointers, numbers, launch) if walk.rows else b""
        return found + (param_grad_arguments(form, pointers, launch) if form.parameters else b"")

    run = _cpu.runner(tasks, packed, BACKWARD_ARRAYS)
    return _scratch.lent(form.parameters * launch.sums_size * form.types.compute.itemsize, run)


def _backward_on_cpu(form: BackwardForm) -> tuple[Launch, int]:
    """Return the same of a backward."""
    walk = form.where.walk
    launch = _cpu_plan.cpu_backward(form.types, walk.not_empty())
    parts = _cpu_plan.cpu_backward_parts(walk)
    return (_cpu_plan.cpu_shared(launch, walk) if parts else launch), parts


def _task(launch: Launch, place: int, work: int, parts: int = 0) -> _cpu.Task:
    return _cpu.Task(_cpu.library(launch.build), launch.grid, place, work, parts)


@Cached
def _forward_starter(form: ForwardForm, numbers: bytes, launch: Launch, device: Device) -> Start:
    def launches(pointers: Pointers) -> Launches:
        return [(launch, forward_arguments(form, pointers, numbers))]

    return _cuda_calls.starter(launches, FORWARD_ARRAYS, device)


@Cached
def _backward_starter(form: BackwardForm, numbers: bytes, launch: Launch, device: Device) -> Start:
    walk = form.where.walk
    params = _cuda_plan.cuda_param_grad(form.param_types, walk.width * walk.groups)

    def launches(pointers: Pointers) -> Launches:
        found = []
        if walk.rows:
            found.append((launch, backward_arguments(form, pointers, numbers, launch)))
        if form.parameters:
            found.append((params, param_grad_arguments(form, pointers, launch)))
        return found

    return _cuda_calls.starter(launches, BACKWARD_ARRAYS, device)


def forget() -> None:
    """Let the next call load its kernels anew."""
    _cpu.forget()
    _cuda.forget()
    for kernels in (cpu_forward_kernels, cpu_backward_kernels, _forward_starter, _backward_starter):
        kernels.cache_clear()
    _again.forget()


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
