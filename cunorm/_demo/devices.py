# SPDX-License-Identifier: MIT
"""The devices of the demo: copies to and from them, and the time of a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from cunorm import _info
from cunorm._arrays.cupy import cupy
from cunorm._backends.cpu.compiler import compiler
from cunorm._backends.cpu.threads import available_cores, thread_count
from cunorm._demo.data import Array, DemoError
from cunorm._demo.operators import Operands, Operator

Case = tuple[Operator, Operands]
_REPEATS = 10


class Device:
    """The host: arrays stay where they are."""

    name = "cpu"
    calls = 1  # timed together

    def __str__(self) -> str:
        if not self.can_compile():
            return f"cpu, {_info.cpu_name()}, NumPy's loops as there is no C++ compiler"
        return f"cpu, {_info.cpu_name()}, {thread_count()} threads"

    def can_compile(self) -> bool:
        """Whether there is a compiler for it; else NumPy does the work."""
        return compiler() is not None

    def prepare(self, cases: Iterable[Case]) -> None:
        """Compile the kernels of the cases, several at once."""
        with ThreadPoolExecutor(available_cores()) as pool:
            list(pool.map(lambda case: case[0].warm_up(case[1], self.name), cases))

    def put(self, array: Array) -> Any:
        """Copy an array to the device."""
        return array

    def get(self, array: Any) -> Array:
        """Copy an array from the device."""
        return np.asarray(array)

    def get_all(self, result: Any) -> Any:
        """Copy an array, or the arrays of a named tuple, from the device."""
        if isinstance(result, tuple):
            return type(result)(*map(self.get_all, result))
        return None if result is None else self.get(result)

    def wait(self) -> None:
        """Return when the device is idle."""

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the shortest of several times of a call, with the host's part."""
        times = []
        for _ in range(_REPEATS):
            self.wait()
            start = time.perf_counter()
            for _ in range(self.calls):
                call()
            self.wait()
            times.append((time.perf_counter() - start) / self.calls)
        return min(times)


class Cuda(Device):
    """The current device of CuPy."""

    name = "cuda"
    calls = 20  # or it would wait for the host

    def __str__(self) -> str:
        return f"cuda, {_info.cuda_name(cupy().cuda.runtime.getDevice())}"

    def can_compile(self) -> bool:
        """Return True: where NVRTC is missing, it says so itself."""
        return True

    def put(self, array: Array) -> Any:
        """Copy an array to the device."""
        return cupy().asarray(array)

    def get(self, array: Any) -> Array:
        """Copy an array from the device."""
        return np.asarray(cupy().asnumpy(array))

    def wait(self) -> None:
        """Return when the device is idle."""
        cupy().cuda.runtime.deviceSynchronize()


def chosen_device(name: str | None) -> Device:
    """Return the device of a name; by default CUDA's where there is one."""
    if name == "cpu":
        return Device()
    count, reason = _info.cuda_devices()
    if name == "cuda" and not count:
        raise DemoError(f"--device cuda: {reason}")
    return Cuda() if count else Device()
