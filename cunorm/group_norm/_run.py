# SPDX-License-Identifier: MIT
"""Runs the group-norm kernels where the arrays are: on a GPU, on a CPU, or by the reference."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

from cunorm import _again, _backend, _cpu, _cuda, _fallback, _plan, _scratch
from cunorm._again import Ran
from cunorm._arrays import CPU, Device, contiguous_form, joined
from cunorm._builds import Build, Launch
from cunorm._cpu import Kernels, Pointers
from cunorm._loaded import Cached
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
from cunorm.group_norm._plan import Schedule, cpu_schedule, cuda_schedule


def run(call: GroupCall) -> Ran | None:
    """Run a call; return what ran, if that was compiled for a CPU and is to be had again.

    With no samples, dweight and dbias become zeros.
    """
    x = call.x
    if x.device.kind == "cuda":
        with x.framework.device_scope(x.device):
            _run_on_gpu(call)
    elif _backend.has_compiler():
        return _again.run(cpu_kernels(call.form, call.numbers()), call.pointers())
    elif isinstance(call, GroupForward):
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
    if access is None:
        line = where.channels if where.channels_last else where.positions
        access = _plan.common_access(line, [])
    return cuda_schedule(form.types, where, access)


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
            yield Launch(one.build, one.blocks * count, one.threads), of_chunk


@Cached
def cpu_kernels(form: GroupForm, numbers: bytes) -> Kernels:
    """Return what runs calls of a form, given where their arrays lie."""
    schedule, where, size = schedule_of(form, CPU), form.where, arguments_size(form)
    chunks = _chunks(form, schedule)
    tasks = [
        _cpu.Task(_cpu.library(one.build), one.blocks * count, number * size, where.elements)
        for number, (count, _) in enumerate(chunks)
        for one in schedule.passes
    ]
    if isinstance(form, GroupBackwardForm) and form.parameters:
        launch = _plan.cpu_param_grad(form.param_types, where.channels)
        library, work = _cpu.library(launch.build), where.samples * where.channels
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
    workspace_bytes.cache_clear()
    cpu_kernels.cache_clear()
    _again.forget()


def _chunks(form: GroupForm, schedule: Schedule) -> list[tuple[int, int]]:
    """Return how many samples each chunk has, and its first."""
    samples, chunk = form.where.samples, schedule.chunk
    return [(min(chunk, samples - first), first) for first in range(0, samples, chunk)]


def _run_on_gpu(call: GroupCall) -> None:
    x, form = call.x, call.form
    schedule = schedule_of(form, x.device, call.access())
    call = _with_workspace(call, schedule)
    pointers = call.pointers()
    with joined(x.framework, call.operands(), x.device) as stream:
        start = partial(_cuda.launch, device=x.device, stream=stream)
        for launch, given in launches(form, pointers, call.numbers(), schedule):
            start(launch, given)
        if isinstance(form, GroupBackwardForm) and form.parameters:
            start(_param_launch(form, x.device), param_grad_arguments(form, pointers, schedule))


def _param_launch(form: GroupBackwardForm, device: Device) -> Launch:
    plan = _plan.cpu_param_grad if device.kind == "cpu" else _plan.cuda_param_grad
    return plan(form.param_types, form.where.channels)


def _with_workspace(call: GroupCall, schedule: Schedule) -> GroupCall:
    """Return the call with memory on its GPU for what its kernels hand on."""
    size = workspace_elements(call.form, schedule)
    if call.workspace is not None or not size:
        return call
    form = contiguous_form((size,), call.form.types.compute, call.x.device)
    return call._replace(workspace=call.x.framework.allocate(form))
