# SPDX-License-Identifier: MIT
"""Where the operators of the demo run, and how long a call takes there."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cunorm import _info
from cunorm._backends.cpu.compiler import compiler
from cunorm._backends.cpu.threads import thread_count
from cunorm._core import tensor
from cunorm._demo.operators import Operands

Array = NDArray[Any]

REPEATS = 10  # of a time in the table
CUDA_CALLS = 20  # timed together, or the GPU would wait for the host


class DemoError(Exception):
    """The demo cannot run with these options; the text says why."""


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
    loops = "NumPy's loops as there is no C++ compiler"
    title = f"cpu, {_info.cpu_name()}, {f'{thread_count()} threads' if compiler() else loops}"
    return Device("cpu", title, tensor.CPU, np, np.asarray, np.asarray, lambda: None, calls=1)
