# SPDX-License-Identifier: MIT
"""The parts of CuPy that only bench needs: events timed by the host's clock, copies, and others.

The times are the interpreter's, not a GPU's: they only exercise the scripts that measure.
"""

from __future__ import annotations

import ctypes
import os
import time
from types import SimpleNamespace
from typing import Any

from cunorm._backends import driver

FREE = 1 << 28  # bytes of free memory; with so few, bench uses fewer sets of arrays


def add_to(cupy: Any) -> None:
    """Add the parts that only bench needs to `cupy`; make cunorm use the software GPU's driver."""
    driver._LIBRARY = os.environ["SOFTGPU_LIBRARY"]  # in place of libcuda.so.1
    if hasattr(cupy.cuda, "get_elapsed_time"):
        return
    runtime, raw_kernel = cupy.cuda.runtime, cupy.RawKernel
    runtime.memcpyDeviceToDevice, runtime.memcpyAsync = 3, _copy
    runtime.memGetInfo = lambda: (FREE, FREE)
    cupy.cuda.set_allocator = lambda allocator: None  # arrays have memory of their own anyway
    cupy.cuda.Event = _clocked(cupy.cuda.Event)
    cupy.cuda.get_elapsed_time = lambda before, after: 1e3 * (after.seconds - before.seconds)
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    cupy.get_default_memory_pool = lambda: pool
    # The spinning kernel of bench reads a timer that the interpreter lacks.
    cupy.RawKernel = lambda code, name, *rest: (
        (lambda *arguments: None) if name == "spin" else raw_kernel(code, name, *rest)
    )


def _copy(target: int, source: int, size: int, kind: int, stream: int) -> None:
    ctypes.memmove(target, source, size)


def _clocked(event: type) -> type:
    """Return a class of events that store the time of record(): by then, earlier work has run."""

    class Event(event):  # type: ignore[misc]
        def record(self, stream: Any = None) -> None:
            super().record(stream)
            self.seconds = time.perf_counter()

    return Event
