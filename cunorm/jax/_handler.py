# SPDX-License-Identifier: MIT
"""What XLA calls to run the kernels: on a CPU, or on the stream that it gives of a GPU.

XLA's own threads call it; ctypes takes the GIL for it, and lets go of it while a kernel runs. It
allocates nothing on a GPU: results and workspace are XLA's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from cunorm._arrays.cupy import cupy
from cunorm._backends import cuda
from cunorm._core.tensor import CPU, Device
from cunorm._dispatch import cache_entry, caps_for, cpu_run
from cunorm.jax import _xla_structs as xla
from cunorm.jax._call import Call, picker

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_checked: set[int] = set()  # where an api lies whose version is known
_called: set[Any] = set()  # the functions that XLA called

Alignments = tuple[int, ...] | None  # of all arrays, modulo 16; None: all are aligned


def handler(run: Callable[[xla.Frame], None]) -> Any:
    """Return a C function for XLA; it must be kept for as long as the process lives."""

    def handle(address: int) -> int | None:
        frame = xla.frame_at(address)
        try:
            _called.add(run)
            extension, api, stage = xla.head(frame)
            if extension and xla.answer_metadata_query(extension):
                return None
            if api not in _checked:
                xla.check(frame)
                _checked.add(api)
            if stage == xla.EXECUTE:  # in others there are no values
                run(frame)
        except BaseException as error:  # it must not go on into C
            return xla.error(frame, f"cunorm: {type(error).__name__}: {error}")
        return None

    return _CALLBACK(handle)


def was_called() -> bool:
    """Whether XLA called any of the handlers, which it does first when it compiles."""
    return bool(_called)


def run_on_cpu(frame: xla.Frame) -> None:
    """Run a call whose arrays lie in the CPU's memory."""
    text = xla.attribute(frame)
    entry = cache_entry(text, CPU)
    executable = entry.executable
    if executable is None:
        executable = entry.executable = _load_on_cpu(text)
    executable.run(executable.pointers(*xla.buffers(frame)))


def run_on_cuda(frame: xla.Frame) -> None:
    """Start a call on the stream that XLA gives."""
    text, (counts, found) = xla.attribute(frame), xla.buffers(frame)
    device = _device_of(found[counts[0]])
    executable = _on_cuda(text, device, None)
    pointers = executable.pointers(counts, found)
    alignments = tuple([pointer & 15 for pointer in pointers])
    if any(alignments):
        executable = _on_cuda(text, device, alignments)
    executable.run(pointers, xla.stream_of(frame))


class _Executable:
    """A loaded call; `run` takes the pointers of all its arrays, on CUDA also a stream."""

    def __init__(self, call: Call, run: Callable[..., object], *, has_workspace: bool) -> None:
        count = call.op.array_count
        arguments = [place for place, spec in enumerate(call.inputs) if spec is not None]
        results = [place for place, _ in call.plan.outputs]
        if has_workspace:
            results.append(count - 1)
        self.run, self._counts = run, (len(arguments), len(results))
        self._pick = picker((*arguments, *results), range(count))

    def pointers(self, counts: tuple[int, int], found: list[int]) -> tuple[int, ...]:
        """Return where all arrays lie, 0 for none: of so many arguments, and of results."""
        if counts != self._counts:
            raise RuntimeError(
                f"XLA gives {counts[0]} arguments and {counts[1]} results, expected "
                f"{self._counts[0]} and {self._counts[1]}"
            )
        return self._pick((0, *found))


def _load_on_cpu(text: bytes) -> _Executable:
    call = Call.parse(text, CPU)
    plan = call.plan
    run = cpu_run(call.op, call.spec, plan, caps_for(plan, CPU))
    return _Executable(call, run, has_workspace=False)


def _on_cuda(text: bytes, device: Device, alignments: Alignments) -> _Executable:
    """Return the executable of a text for such arrays on a GPU."""
    entry = cache_entry(text, device, alignments)
    if entry.executable is None:
        entry.executable = _load_on_cuda(text, device, alignments)
    executable: _Executable = entry.executable
    return executable


def _load_on_cuda(text: bytes, device: Device, alignments: Alignments) -> _Executable:
    call = Call.parse(text, device)
    plan = call.plan
    lowered = plan.lower(caps_for(plan, device), alignments)
    size = plan.workspace_bound(None)  # planned for XLA before the GPU was known
    if lowered.workspace > size:
        family, _, _ = call.op.name.partition("_")
        raise RuntimeError(
            f"cunorm: a {family} norm has {size} bytes of workspace, and takes "
            f"{lowered.workspace} on this GPU"
        )
    run = cuda.launcher(lowered.calls(), device)
    return _Executable(call, run, has_workspace=size > 0)


def _device_of(pointer: int) -> Device:
    """Return the GPU whose memory lies there."""
    return Device("cuda", cupy().cuda.runtime.pointerGetAttributes(pointer).device)
