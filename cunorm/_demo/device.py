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

CUDA_CALLS = 20  # timed together, or the GPU would wait for the host


class DemoError(Exception):
    """The demo cannot run with these options; the text says why."""


class Device(NamedTuple):
    """Where the operators run."""

    title: str
    library: Any  # NumPy or CuPy
    wait: Callable[[], object]  # returns when it is idle
    calls: int  # timed together
    has_kernels: bool = True  # else NumPy computes all results

    def placed(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.library.asarray(array) for name, array in operands.items()}

    def fetched(self, result: Any) -> Any:
        """Copy an array, or the arrays of a named tuple, to host memory."""
        if isinstance(result, tuple):
            return type(result)(*map(self.fetched, result))
        return result.get() if hasattr(result, "get") else result

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the time of a call, with the host's part."""
        self.wait()
        start = time.perf_counter()
        for _ in range(self.calls):
            call()
        self.wait()
        return (time.perf_counter() - start) / self.calls


def chosen_device(name: str | None) -> Device:
    """Return the device of a name; by default CUDA's current one where there is one."""
    count, reason = (0, "") if name == "cpu" else _info.cuda_devices()
    if count:
        import cupy

        runtime = cupy.cuda.runtime
        title = f"cuda, {_info.cuda_name(runtime.getDevice())}"
        return Device(title, cupy, runtime.deviceSynchronize, CUDA_CALLS)
    if name == "cuda":
        raise DemoError(f"--device cuda: {reason}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the title says the same
            has_kernels = has_compiler()
    except ValueError as error:  # of CXX
        raise DemoError(str(error)) from error
    threads, silent = thread_count(), search()[1]
    runs = f"{threads} thread" if threads == 1 else f"{threads} threads"
    runs = runs if has_kernels else "NumPy's loops as there is no C++ compiler"
    runs += f" ({silent})" if silent else ""
    return Device(f"cpu, {_info.cpu_name()}, {runs}", np, lambda: None, 1, has_kernels)


def keep_freed_memory() -> bool:
    """Make glibc keep and reuse freed memory, for as long as the process lives; else return False.

    Otherwise a large result costs page faults in each call, more or fewer by who allocates it.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    trim_threshold, mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(trim_threshold, 2**31 - 1) and libc.mallopt(mmap_max, 0))
