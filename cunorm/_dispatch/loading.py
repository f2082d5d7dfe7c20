# SPDX-License-Identifier: MIT
"""Loads a plan's kernels for a GPU or a CPU, or the reference if there is no C++ compiler."""

from collections.abc import Callable
from functools import partial

from cunorm._arrays.adapter import ArrayAdapter
from cunorm._arrays.numpy import numpy_view
from cunorm._backends import cpu, cuda
from cunorm._backends.cpu import with_scratch
from cunorm._backends.cpu.compiler import has_compiler
from cunorm._backends.cpu.threads import last_cache_bytes
from cunorm._core.build import Launch
from cunorm._core.caps import Caps, CpuCaps
from cunorm._core.plan import Alignments, Lowered, OpDef, Plan, Sizes, SpecT
from cunorm._core.tensor import ArrayView, Device, OptionalSpecs, bytes_spec
from cunorm._dispatch.executable import Loaded, Pointers, Run


def caps_for(plan: Plan | None, device: Device) -> Caps:
    """Return the caps of a device; a plan limits them to clusters for which the GPU has room."""
    if device.kind == "cpu":
        return CpuCaps(last_cache_bytes())
    if plan is None or plan.is_empty:
        caps: Caps = cuda.gpu_caps(device)
        return caps
    return cuda.caps_that_fit(device, lambda caps: plan.lower(caps, None).launches[0])


def launches_of(plan: Plan, device: Device) -> list[Launch]:
    """Return the launches of a plan for aligned arrays."""
    if plan.is_empty:
        return []
    return [*plan.lower(caps_for(plan, device), None).launches]


def load(
    op: OpDef[SpecT],
    spec: SpecT,
    plan: Plan,
    caps: Caps,
    alignments: Alignments,
    x: ArrayView,
) -> Loaded:
    """Return a plan's kernels. On a GPU, each run uses the stream that is current when it starts.

    Another device may be current, so allocations and launches name their device.
    """
    device, adapter = x.spec.device, x.adapter
    if device.kind == "cpu":
        return cpu_loaded(op, spec, plan, caps)
    lowered = plan.lower(caps, alignments)
    launcher = cuda.Launcher.load(lowered.calls(), device)

    def run_of(sizes: Sizes) -> Run:
        workspace, calls = sizes
        return _cuda_run(launcher.resized(calls), workspace, adapter, device)

    run = _cuda_run(launcher, lowered.workspace, adapter, device)
    return Loaded(run, _resized(lowered, run_of))


def _resized(
    lowered: Lowered, run_of: Callable[[Sizes], Run]
) -> Callable[[int], Run | None] | None:
    sizes_of = lowered.sizes
    if sizes_of is None:
        return None

    def resized(rows: int) -> Run | None:
        sizes = sizes_of(rows)
        return sizes and run_of(sizes)

    return resized


def _cuda_run(
    start: cuda.Launcher, workspace_bytes: int, adapter: ArrayAdapter, device: Device
) -> Run:
    spec = bytes_spec(workspace_bytes, device) if workspace_bytes else None

    def run(pointers: Pointers) -> None:
        if spec is None or pointers[-1]:
            start(pointers, adapter.stream(device))
        else:
            # The workspace may be freed before the kernels end: the allocator reuses it only for
            # later work on the same stream.
            workspace = adapter.allocate(spec)
            start([*pointers[:-1], workspace.pointer], adapter.stream(device))

    return run


def cpu_loaded(op: OpDef[SpecT], spec: SpecT, plan: Plan, caps: Caps) -> Loaded:
    """Return a plan's kernels for the CPU, or the reference if there is no compiler."""
    if not has_compiler():
        return Loaded(partial(_run_reference, op, spec, plan.kernel_specs()))
    lowered = plan.lower(caps, None)
    program = cpu.Program(lowered.calls(), op.array_count)

    def run_of(sizes: Sizes) -> Run:
        workspace, calls = sizes
        return with_scratch(workspace, program.run_of(calls))

    run = with_scratch(lowered.workspace, program.run())
    return Loaded(run, _resized(lowered, run_of))


def _run_reference(op: OpDef[SpecT], spec: SpecT, specs: OptionalSpecs, pointers: Pointers) -> None:
    views = [
        None if one is None else numpy_view(ArrayView(pointer, one, None, None, writable=True))
        for one, pointer in zip(specs, pointers[:-1], strict=True)  # the workspace comes last
    ]
    op.reference(spec, views)
