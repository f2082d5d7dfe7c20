# SPDX-License-Identifier: MIT
"""Where the operators of the demo run, and how long a call takes there."""

import ctypes
import platform
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cunorm import _info
from cunorm._backends.cpu.compiler import has_compiler, search
from cunorm._backends.cpu.threads import thread_count

CUDA_CALLS = 20  # timed together: after a single call the GPU would wait for the host


class DemoError(Exception):
    """The demo cannot run with these options; the text says why."""


class Device(NamedTuple):
    """Where the operators run."""

    title: str
    library: Any  # NumPy or CuPy
    has_kernels: bool = True  # else NumPy computes all results
    wait: Callable[[], object] = lambda: None  # returns when the device is idle
    calls: int = 1  # timed together

    def placed(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.library.asarray(array) for name, array in operands.items()}

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the time of a call, with the host's part."""
        self.wait()
        start = time.perf_counter()
        for _ in range(self.calls):
            call()
        self.wait()
        return (time.perf_counter() - start) / self.calls


def chosen_device(name: str | None) -> Device:
    """Return the device of a name; by default the current CUDA device if there is one."""
    count, reason = (0, "") if name == "cpu" else _info.cuda_devices()
    if count:
        import cupy

        runtime = cupy.cuda.runtime
        title = f"cuda, {_info.cuda_name(runtime.getDevice())}"
        return Device(title, cupy, wait=runtime.deviceSynchronize, calls=CUDA_CALLS)
    if name == "cuda":
        raise DemoError(f"--device cuda: {reason}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the title says the same
            has_kernels, cxx_problem = has_compiler(), search().cxx_problem
    except ValueError as error:  # CXX is no command
        raise DemoError(str(error)) from error
    threads = f"{thread_count()} thread{'s' if thread_count() > 1 else ''}"
    runs = threads if has_kernels else "NumPy's loops as there is no C++ compiler"
    remark = f" ({cxx_problem})" if cxx_problem else ""
    return Device(f"cpu, {_info.cpu_name()}, {runs}{remark}", np, has_kernels)


def keep_freed_memory() -> bool:
    """Make glibc reuse freed memory, so that calls cause no page faults; return whether it does."""
    trim_threshold, mmap_max = (-1, 2**31 - 1), (-4, 0)  # parameters of mallopt and their values
    if platform.libc_ver()[0] != "glibc":
        return False
    return all(ctypes.CDLL(None).mallopt(*option) for option in (trim_threshold, mmap_max))
