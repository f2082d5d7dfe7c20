# SPDX-License-Identifier: MIT
"""Where the operators of the demo run, and how long a call takes there."""

import ctypes
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cunorm import _info
from cunorm._backends.cpu.compiler import search
from cunorm._backends.cpu.threads import available_cores, thread_count
from cunorm._backends.pool import compile_concurrently
from cunorm._core import tensor
from cunorm._core.build import KernelBuild
from cunorm._demo.operators import Operands

Array = NDArray[Any]

REPEATS = 10  # of a time in the table
CUDA_CALLS = 20  # timed together, or the GPU would wait for the host


class DemoError(Exception):
    """The demo cannot run with these options; the text says why."""


class CompileError(Exception):
    """What the demo runs does not compile; the text is the compiler's."""


class Device(NamedTuple):
    """Where the operators run."""

    name: str
    title: str
    place: tensor.Device
    library: Any  # NumPy or CuPy
    put: Callable[[Array], Any]  # copies an array to it
    get: Callable[[Any], Array]  # and from it
    wait: Callable[[], object]  # returns when it is idle
    calls: int  # timed together

    @property
    def has_kernels(self) -> bool:  # else NumPy computes all results
        return self.name != "cpu" or search().compiler is not None

    def compile(
        self,
        builds: Sequence[KernelBuild],
        step: Callable[[], object],
        *,
        with_headers: bool = False,
    ) -> None:
        """Compile and load builds, as many at once as there are cores."""
        cores = available_cores()
        try:
            compile_concurrently(builds, self.place, cores, step, with_headers=with_headers)
        except RuntimeError as error:
            raise CompileError(str(error)) from error

    def put_all(self, operands: Operands) -> dict[str, Any]:
        return {name: self.put(array) for name, array in operands.items()}

    def fetched(self, result: Any) -> Any:
        """Copy an array, or the arrays of a named tuple, to host memory."""
        if isinstance(result, tuple):
            return type(result)(*map(self.fetched, result))
        return None if result is None else self.get(result)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the time of a call, with the host's part."""
        self.wait()
        start = time.perf_counter()
        for _ in range(self.calls):
            call()
        self.wait()
        return (time.perf_counter() - start) / self.calls

    def shortest_seconds(self, call: Callable[[], Any]) -> float:
        return min(self.seconds(call) for _ in range(REPEATS))


def chosen_device(name: str | None) -> Device:
    """Return the device of a name; by default CUDA's current one where there is one."""
    count, reason = (0, "") if name == "cpu" else _info.cuda_devices()
    if count:
        import cupy

        runtime = cupy.cuda.runtime
        place = tensor.Device("cuda", runtime.getDevice())
        title = f"cuda, {_info.cuda_name(place.index)}"
        copies = (cupy.asarray, cupy.asnumpy)
        return Device("cuda", title, place, cupy, *copies, runtime.deviceSynchronize, CUDA_CALLS)
    if name == "cuda":
        raise DemoError(f"--device cuda: {reason}")
    try:
        found, cxx_problem, _ = search()
        loops = "NumPy's loops as there is no C++ compiler"
        runs = _threads(thread_count()) if found else loops
        runs += f" ({cxx_problem})" if cxx_problem else ""
    except ValueError as error:  # of CXX
        raise DemoError(str(error)) from error
    title = f"cpu, {_info.cpu_name()}, {runs}"
    return Device("cpu", title, tensor.CPU, np, np.asarray, np.asarray, lambda: None, calls=1)


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


def keep_freed_memory() -> bool:
    """Make glibc keep and reuse freed memory, for as long as the process lives; else return False.

    Otherwise a large result costs page faults in each call, more or fewer by who allocates it.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    trim_threshold, mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(trim_threshold, 2**31 - 1) and libc.mallopt(mmap_max, 0))
