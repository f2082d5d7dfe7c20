# SPDX-License-Identifier: MIT
"""The GPU of the timings: rotating operands, device-to-device copies and a timer.

Buffers rotate, so that L2 is cold. A spinning kernel holds the GPU back until a batch of calls is
queued, so that times exclude host time. Only the times of JAX, which has its own streams, include
host time.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bench.timing import gpu
from bench.timing.arrays import upload
from bench.timing.cases import DTYPES, Call, Operands
from bench.timing.engine import Device, Turn
from bench.timing.grid import Point
from bench.timing.operands import drawn
from cunorm._backends import cuda as _cuda

ROTATED_BYTES = 512 << 20  # several times the L2 of any GPU so far
MAX_SETS = 2048  # 2048 sets of the grid's smallest point have ROTATED_BYTES
MEMORY_SHARE = 64  # rotated sets take at most 1/64 of free memory, to leave room for results
BATCH_SECONDS = 2e-3
HOST_BATCHES, HOST_CALLS = 9, 8  # few calls at once: with a full queue, a call would wait
# Arrays as large as x that are alive at once, for each set.
OPERAND_ARRAYS = 10  # operands and copies
ARRAYS_OF_ONE = 8  # results of one provider, and arrays that it saves for a backward

_SPIN = """
extern "C" __global__ void spin(long long nanoseconds) {
  long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
"""


class Gpu(Device):
    """The current device; everything but JAX is timed on the default stream of CuPy and torch.

    `torch` is None if torch is not installed or has no CUDA.
    """

    kind = "cuda"
    note = (
        "buffers rotate, so that L2 is cold, and the host's time stays out; but JAX has streams of "
        "its own and is timed by the host's clock"
    )

    def __init__(self, cupy: Any, torch: Any | None) -> None:
        runtime = cupy.cuda.runtime
        version = runtime.driverGetVersion()
        self.name = runtime.getDeviceProperties(0)["name"].decode()
        self.driver = f"{version // 1000}.{version % 1000 // 10}"
        self._cupy: Any = cupy
        self._torch: Any = torch
        self._spin = cupy.RawKernel(_SPIN, "spin", ("-std=c++17",))
        # Shared by all providers: each call takes the least recently used set.
        self._next_set = itertools.count()

    def versions(self) -> dict[str, str]:
        """Return versions of NVRTC and CuPy."""
        nvrtc = ".".join(map(str, _cuda.nvrtc_version()))
        return {"NVRTC": nvrtc, "cupy": self._cupy.__version__}

    def fitting(self, point: Point, contestants: int) -> Point:
        """Halve the rows or samples until all arrays of a point fit the memory."""
        rows, *row = point.shape
        arrays = OPERAND_ARRAYS + ARRAYS_OF_ONE * contestants
        itemsize = DTYPES[point.dtype].itemsize
        free = self.free_memory()
        while rows > 1 and arrays * _sets(point, free) * itemsize * rows * math.prod(row) > free:
            rows //= 2
            point = replace(point, shape=(rows, *row))
        return point

    def operands(self, point: Point) -> list[Operands]:
        """Return the point's sets of operands; rows repeat, because drawing all takes long."""
        host, repeats = drawn(point.operator, point.dtype, point.shape)
        return [
            {name: upload(self._cupy, array, repeats) for name, array in host.items()}
            for _ in range(_sets(point, self.free_memory()))
        ]

    def upload(self, host: Operands) -> Operands:
        """Copy the host's arrays to the GPU."""
        return {name: upload(self._cupy, array) for name, array in host.items()}

    def copies(self, point: Point) -> list[Call]:
        """Return device-to-device copies that each move as many bytes as a call."""
        runtime, size = self._cupy.cuda.runtime, point.bytes // 2
        kind = runtime.memcpyDeviceToDevice

        def copy(source: Any, target: Any) -> Call:
            return lambda: runtime.memcpyAsync(target.data.ptr, source.data.ptr, size, kind, 0)

        empty, sets = self._cupy.empty, _sets(point, self.free_memory())
        return [copy(empty(size, np.uint8), empty(size, np.uint8)) for _ in range(sets)]

    def turn(self, calls: list[Call], wait: Callable[[Any], Any] | None = None) -> Turn:
        """Warm up, and return the turn of a batch of calls that rotate through the sets.

        With `wait`, the calls use other streams, and the host's clock times them, from the start of
        the first call to the end of the last.
        """
        call = self._rotating(calls)
        self._queue_seconds(call, len(calls) + 2, wait)  # compiles, and fills the allocators
        per_call = self._seconds(call, 4, wait, self._queue_seconds(call, 4, wait))
        batch = max(4, min(64, int(BATCH_SECONDS / per_call)))
        queues = [self._queue_seconds(call, HOST_CALLS, wait) for _ in range(HOST_BATCHES)]
        host = statistics.median(queues) / HOST_CALLS
        return Turn(partial(self._seconds, call, batch, wait, host * batch), host)

    def _rotating(self, calls: list[Call]) -> Call:
        """Make a call that runs the next of `calls`; it keeps results, so that outputs rotate."""
        kept: list[Any] = [None] * len(calls)

        def call() -> Any:
            turn = next(self._next_set) % len(calls)
            kept[turn] = calls[turn]()
            return kept[turn]

        return call

    def _queue_seconds(self, call: Call, calls: int, wait: Callable[[Any], Any] | None) -> float:
        """Return the seconds in which the host queues a batch of calls."""
        self._cupy.cuda.runtime.deviceSynchronize()
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        seconds = time.perf_counter() - start
        if wait is not None:
            wait(result)
        self._cupy.cuda.runtime.deviceSynchronize()
        return seconds

    def _seconds(
        self, call: Call, calls: int, wait: Callable[[Any], Any] | None, queue_seconds: float
    ) -> float:
        """Return the mean seconds of a call in a batch."""
        if wait is not None:
            start = time.perf_counter()
            for _ in range(calls):
                result = call()
            wait(result)
            return (time.perf_counter() - start) / calls
        cuda = self._cupy.cuda
        before, after = cuda.Event(), cuda.Event()
        hold = min(1.5 * queue_seconds + 50e-6, 0.1)
        self._spin((1,), (1,), (np.int64(hold * 1e9),))
        before.record()
        for _ in range(calls):
            call()
        after.record()
        after.synchronize()
        return 1e-3 * float(cuda.get_elapsed_time(before, after)) / calls

    def free_memory(self) -> int:
        """Free cached memory, and return the number of free bytes."""
        self._cupy.get_default_memory_pool().free_all_blocks()
        if self._torch is not None:
            self._torch.cuda.empty_cache()
        return int(self._cupy.cuda.runtime.memGetInfo()[0])


def find() -> Gpu:
    """Return the current GPU; ImportError without CuPy, RuntimeError without a GPU."""
    cupy = gpu.cupy()
    # JAX is imported later, and would take most of the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"there is no GPU to time: {error}") from error
    try:
        import torch
    except ImportError:
        return Gpu(cupy, None)
    return Gpu(cupy, torch if torch.cuda.is_available() else None)


def _sets(point: Point, free: int) -> int:
    """Return the number of sets of operands: ROTATED_BYTES in all, or less if memory is scarce."""
    rotated = min(ROTATED_BYTES, free // MEMORY_SHARE)
    return max(2, min(MAX_SETS, -(-rotated // point.bytes)))
