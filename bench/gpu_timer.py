# SPDX-License-Identifier: MIT
"""A GPU as the timings use it: rotating operands, device-to-device copies and a timer.

Buffers rotate, so that L2 is cold, and a spinning kernel holds the GPU back until a batch of calls
is queued, so that the host's time stays out.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.cases import DTYPES, Operands, Operator, Shape, bytes_moved, host_operands

DRAWN_ELEMENTS = 1 << 20  # or one sample; a power of two, as most of the shapes' axes are
ROTATED_BYTES = 512 << 20  # several times the L2 of any GPU so far
BATCH_SECONDS = 2e-3
ROUNDS = 7

_SPIN = """
extern "C" __global__ void spin(long long nanoseconds) {
  long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
"""


@dataclass(frozen=True)
class Point:
    """What is timed: an operator in one direction, on one shape and dtype."""

    operator: Operator
    direction: str
    dtype: str
    shape: Shape

    def __str__(self) -> str:
        shape = "×".join(map(str, self.shape))
        return f"{self.operator.label} {self.direction} {self.dtype} {shape}"

    @property
    def bytes(self) -> int:
        """The bytes that must be read and written."""
        itemsize = DTYPES[self.dtype].itemsize
        return bytes_moved(self.operator, self.direction, self.shape, itemsize)

    @property
    def sets(self) -> int:
        """How many sets of operands keep each other out of L2."""
        return max(2, min(64, -(-ROTATED_BYTES // self.bytes)))


class Gpu:
    """The current device; everything is timed on its default stream, which is CuPy's and torch's.

    `torch` is None where torch is not installed or has no CUDA.
    """

    def __init__(self, cupy: Any, torch: Any | None) -> None:
        self.cupy: Any = cupy
        self.torch: Any = torch
        self._spin = cupy.RawKernel(_SPIN, "spin", ("-std=c++17",))

    def operands(self, point: Point) -> list[Operands]:
        """Return the point's sets of operands; rows repeat, as drawing them all would take long."""
        rows, *row = point.shape
        drawn = math.gcd(rows, max(1, DRAWN_ELEMENTS // math.prod(row)))
        host = host_operands(point.operator, point.dtype, (drawn, *row))
        return [
            {name: upload(self.cupy, array, rows // drawn) for name, array in host.items()}
            for _ in range(point.sets)
        ]

    def tensors(self, operands: Operands) -> Operands:
        """Return the same memory as torch tensors."""
        return {name: self._tensor(array) for name, array in operands.items()}

    def _tensor(self, array: Any) -> Any:
        bits = self.torch.as_tensor(array.view(f"i{array.dtype.itemsize}"), device="cuda")
        return bits.view(getattr(self.torch, array.dtype.name))

    def copies(self, point: Point) -> list[Callable[[], Any]]:
        """Return device-to-device copies, each of which reads and writes as many bytes in all."""
        runtime, size = self.cupy.cuda.runtime, point.bytes // 2
        kind = runtime.memcpyDeviceToDevice

        def copy(source: Any, target: Any) -> Callable[[], Any]:
            return lambda: runtime.memcpyAsync(target.data.ptr, source.data.ptr, size, kind, 0)

        empty = self.cupy.empty
        return [copy(empty(size, np.uint8), empty(size, np.uint8)) for _ in range(point.sets)]

    def queue_seconds(self, call: Callable[[int], Any], calls: int) -> float:
        """Return how long the host takes for a batch of calls."""
        self.cupy.cuda.runtime.deviceSynchronize()
        start = time.perf_counter()
        for index in range(calls):
            call(index)
        seconds = time.perf_counter() - start
        self.cupy.cuda.runtime.deviceSynchronize()
        return seconds

    def seconds(self, call: Callable[[int], Any], calls: int, queue_seconds: float) -> float:
        """Time a batch of calls on the GPU alone; seconds per call."""
        cuda = self.cupy.cuda
        start, stop = cuda.Event(), cuda.Event()
        hold = min(1.5 * queue_seconds + 50e-6, 0.1)
        self._spin((1,), (1,), (np.int64(hold * 1e9),))
        start.record()
        for index in range(calls):
            call(index)
        stop.record()
        stop.synchronize()
        return 1e-3 * float(cuda.get_elapsed_time(start, stop)) / calls

    def medians(self, contestants: dict[str, Callable[[int], Any]], sets: int) -> dict[str, float]:
        """Return each contestant's median over rounds in which they take turns; seconds a call."""
        batches, queues = {}, {}
        for name, call in contestants.items():
            self.queue_seconds(call, 2 * sets)  # compiles, and fills the allocators
            per_call = self.seconds(call, 4, self.queue_seconds(call, 4))
            batches[name] = max(4, min(64, int(BATCH_SECONDS / per_call)))
            queues[name] = self.queue_seconds(call, batches[name])
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(ROUNDS):
            first = turn % len(times)
            for name in [*times][first:] + [*times][:first]:
                times[name].append(self.seconds(contestants[name], batches[name], queues[name]))
        return {name: statistics.median(values) for name, values in times.items()}

    def host_seconds(self, call: Callable[[int], Any], calls: int = 100, rounds: int = 5) -> float:
        """Return what a call costs the host, the median over rounds."""
        self.queue_seconds(call, calls)
        return statistics.median(self.queue_seconds(call, calls) for _ in range(rounds)) / calls

    def free_memory(self) -> int:
        """Give cached memory back; the bytes that are free then."""
        self.cupy.get_default_memory_pool().free_all_blocks()
        if self.torch is not None:
            self.torch.cuda.empty_cache()
        return int(self.cupy.cuda.runtime.memGetInfo()[0])


def upload(cupy: Any, host: Any, repeats: int = 1) -> Any:
    """Put an array on the GPU as bits, which CuPy always has, and in the order of its memory.

    One that has rows is put there `repeats` times over.
    """
    by_memory = sorted(range(host.ndim), key=lambda axis: -host.strides[axis])
    bits = cupy.asarray(host.transpose(by_memory).view(f"i{host.itemsize}"))
    if bits.ndim > 1 and repeats > 1:
        whole = cupy.empty((repeats, *bits.shape), bits.dtype)
        whole[...] = bits
        bits = whole.reshape(-1, *bits.shape[1:])
    return bits.view(host.dtype).transpose(np.argsort(by_memory).tolist())


def rotating(calls: list[Callable[[], Any]]) -> Callable[[int], None]:
    """Call one after the other, keeping as many results, so that outputs rotate as inputs do."""
    kept: list[Any] = [None] * len(calls)

    def call(index: int) -> None:
        turn = index % len(calls)
        kept[turn] = calls[turn]()

    return call
