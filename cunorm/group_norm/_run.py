# SPDX-License-Identifier: MIT
"""Runs the group-norm kernels where the arrays are: on a GPU, on a CPU, or by the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from math import prod

from cunorm import _again, _backend, _cpu, _cpu_plan, _cuda_calls, _cuda_plan, _fallback, _scratch
from cunorm._again import Ran
from cunorm._arguments import Kernels, Pointers
from cunorm._arrays import CPU, Device, contiguous_form
from cunorm._builds import Build, Launch
from cunorm._cuda_calls import Launches, Start
from cunorm._loaded import Cached
from cunorm._plan import common_access
from cunorm.group_norm._calls import (
    GroupBackwardForm,
    GroupCall,
    GroupForm,
    GroupForward,
    arguments,
    arguments_size,
    array_count,
    param_grad_arguments,
    workspace_elements,
)
from cunorm.group_norm._plan import SOME_GPUS, Schedule, cpu_schedule, cuda_schedule


def run(call: GroupCall) -> Ran | None:
    """Run a call; return what ran, if that was compiled.

    With no samples, dweight and dbias become zeros.
    """
    form, device = call.form, call.x.device
    if device.kind == "cuda":
        schedule = schedule_of(form, device, call.access())
        size = workspace_elements(form, schedule)
        _check_workspace(call, size * form.types.compute.itemsize)
        memory = contiguous_form((size,), form.types.compute, device) if size else None
        return _cuda_calls.run(call, _starter(form, call.numbers(), schedule, device), memory)
    if _backend.has_compiler():
        return _again.run(cpu_kernels(form, call.numbers()), call.pointers())
    if isinstance(call, GroupForward):
        _fallback.group_forward(call)
    else:
        _fallback.group_backward(call)
    return None


def builds(form: GroupForm, device: Device) -> list[Build]:
    """Return what `run` needs for a form of call whose arrays are aligned."""
    schedule = schedule_of(form, device)
    found = [one.build for one in schedule.passes]
    if isinstance(form, GroupBackwardForm) and form.parameters:
        found.append(_param_launch(form, device).build)
    return found


@lru_cache(maxsize=1024)  # by identity, which is quicker than by what a schedule depends on
def schedule_of(form: GroupForm, device: Device, access: int | None = None) -> Schedule:
    """Return the launches of a call; without `access`, of aligned arrays."""
    where = form.where._replace(samples=max(form.where.samples, 1))
    if device.kind == "cpu":
        return cpu_schedule(form.types, where)
    aligned = common_access(where.channels if where.channels_last else where.positions, [])
    plan = partial(cuda_schedule, form.types, where)
    gpu = _backend.limits_that_fit(lambda gpu: plan(aligned, gpu).passes[0], device)
    return plan(aligned if access is None else access, gpu)


def _check_workspace(call: GroupCall, size: int) -> None:
    """Refuse memory that was planned before it was known for which GPU, and does not suffice."""
    given = call.workspace
    if given is not None and prod(given.shape) * given.dtype.itemsize < size:
        raise RuntimeError(
            f"cunorm: a group norm has {prod(given.shape) * given.dtype.itemsize} bytes of "
            f"workspace, and takes {size} on this GPU"
        )


@lru_cache(maxsize=1024)
def most_workspace_bytes(form: GroupForm) -> int:
    """Return the bytes that a call takes at most on a GPU that is not known yet."""
    where = form.where._replace(samples=max(form.where.samples, 1))
    plans = (cuda_schedule(form.types, where, 1, gpu) for gpu in SOME_GPUS)
    most = max(workspace_elements(form, schedule) for schedule in plans)
    return most * form.types.compute.itemsize


@lru_cache(maxsize=1024)
def workspace_bytes(form: GroupForm, device: Device) -> int:
    """Return the bytes that a call takes at most."""
    elements = workspace_elements(form, schedule_of(form, device))
    return elements * form.types.compute.itemsize


def launches(
    form: GroupForm, pointers: Pointers, numbers: bytes, schedule: Schedule
) -> Iterator[tuple[Launch, bytes]]:
    """Yield each launch of the group norm itself, and its arguments."""
    for count, first in _chunks(form, schedule):
        of_chunk = arguments(form, pointers, numbers, schedule, count, first)
        for one in schedule.passes:
            yield replace(one, grid=one.grid * count), of_chunk


@Cached
def cpu_kernels(form: GroupForm, numbers: bytes) -> Kernels:
    """Return what runs calls of a form, given where their arrays lie."""
    schedule, where, size = schedule_of(form, CPU), form.where, arguments_size(form)
    chunks = _chunks(form, schedule)
    tasks = [
        _cpu.Task(_cpu.library(one.build), one.grid * count, number * size, where.elements)
        for number, (count, _) in enumerate(chunks)
        for one in schedule.passes
    ]
    if isinstance(form, GroupBackwardForm) and form.parameters:
        launch = _cpu_plan.cpu_param_grad(form.param_types, where.channels)
        library = _cpu.library(launch.build)
        work = where.samples * schedule.parts * where.channels
        tasks.append(_cpu.Task(library, launch.grid, len(chunks) * size, work))

    def packed(pointers: Pointers) -> bytes:
        of_chunks = (arguments(form, pointers, numbers, schedule, *chunk) for chunk in chunks)
        if isinstance(form, GroupBackwardForm) and form.parameters:
            return b"".join((*of_chunks, param_grad_arguments(form, pointers, schedule)))
        return b"".join(of_chunks)

    run = _cpu.runner(tasks, packed, array_count(form))
    return _scratch.lent(workspace_bytes(form, CPU), run)


def forget() -> None:
    """Let the next call load its kernels anew."""
    schedule_of.cache_clear()
    workspace_bytes.cache_clear()
    cpu_kernels.cache_clear()
    _starter.cache_clear()
    _again.forget()


def _chunks(form: GroupForm, schedule: Schedule) -> list[tuple[int, int]]:
    """Return how many samples each chunk has, and its first."""
    samples, chunk = form.where.samples, schedule.chunk
    return [(min(chunk, samples - first), first) for first in range(0, samples, chunk)]


@Cached
def _starter(form: GroupForm, numbers: bytes, schedule: Schedule, device: Device) -> Start:
    """Return what starts calls of a form, given where their arrays lie."""

    def all_launches(pointers: Pointers) -> Launches:
        found = [*launches(form, pointers, numbers, schedule)]
        if isinstance(form, GroupBackwardForm) and form.parameters:
            params = param_grad_arguments(form, pointers, schedule)
            found.append((_param_launch(form, device), params))
        return found

    return _cuda_calls.starter(all_launches, array_count(form), device)


def _param_launch(form: GroupBackwardForm, device: Device) -> Launch:
    plan = _cpu_plan.cpu_param_grad if device.kind == "cpu" else _cuda_plan.cuda_param_grad
    return plan(form.param_types, form.where.channels)
