# SPDX-License-Identifier: MIT
"""Times cunorm against PyTorch on the CPU: the same tensors, threads and process.

Each contestant allocates its outputs with PyTorch's allocator, whose freed memory is kept, so that
no page fault is timed. The contestants take turns, in an order drawn anew for each round, as what
one leaves in the caches is the next one's gain; the figures are medians.
"""

from __future__ import annotations

import csv
import ctypes
import datetime
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cunorm
from bench import cases
from bench.cases import Operator

_CHECKED_ROWS = 64
Call = Callable[[], Any]


@dataclass(frozen=True)
class Point:
    """What is timed."""

    operator: Operator
    direction: str
    dtype: str
    rows: int
    width: int

    def __format__(self, spec: str) -> str:
        text = f"{self.operator.name} {self.direction} {self.dtype} {self.rows}x{self.width}"
        return format(text, spec)


@dataclass(frozen=True)
class Result:
    """Median seconds of a call, and of a copy that moves as many bytes."""

    point: Point
    cunorm: float
    torch: float
    copy: float

    @property
    def speedup(self) -> float:
        """How many times faster than torch."""
        return self.torch / self.cunorm

    @property
    def over_copy(self) -> float:
        """How many times a copy of the same bytes the call takes."""
        return self.cunorm / self.copy


def keep_freed_memory() -> None:
    """Let glibc keep and reuse freed memory: no mmap, no trimming of the heap."""
    if platform.system() == "Linux":
        trim_threshold, mmap_max = -1, -4
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_max, 0)


def use_threads(threads: int) -> None:
    """Give both sides the same number of threads."""
    torch.set_num_threads(threads)
    cunorm.set_num_threads(threads)


def measure(point: Point, seconds: float) -> Result:
    """Check cunorm against the oracle, then time the contestants in turn."""
    _check(point)
    operator = point.operator
    host = cases.host_operands(operator, point.dtype, point.rows, point.width)
    tensors = {name: _tensor(array) for name, array in host.items()}
    x = tensors["x"]
    moved = cases.bytes_moved(operator, point.direction, point.rows, point.width, x.itemsize)
    contestants = [copying(moved, x.dtype)]
    if point.direction == "forward":
        contestants += [
            cases.forward(cunorm, operator, tensors),
            cases.torch_forward(torch, operator, tensors),
        ]
    else:
        saved = cases.saved_forward(cunorm, operator, tensors)
        contestants += [
            cases.backward(cunorm, operator, tensors, saved),
            cases.torch_backward(torch, operator, tensors),
        ]
    copy, ours, theirs = _medians(contestants, seconds)
    return Result(point, ours, theirs, copy)


def copying(moved: int, dtype: torch.dtype) -> Call:
    """Return a copy that reads and writes as many bytes in all."""
    source = torch.ones(moved // (2 * dtype.itemsize), dtype=dtype)
    return lambda: torch.empty_like(source).copy_(source)


def _medians(calls: Sequence[Call], seconds: float) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    contestants = list(zip(calls, times, strict=True))
    order = random.Random(0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        order.shuffle(contestants)
        for call, spent in contestants:
            start = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start)
    return [statistics.median(spent) for spent in times]


def _check(point: Point) -> None:
    """Compare a few rows of the same width with the oracle."""
    shape = (min(point.rows, _CHECKED_ROWS), point.width)
    error = cases.check(point.operator, point.dtype, shape, _tensor, _array)
    if not error <= cases.TOLERANCE[point.dtype]:
        raise RuntimeError(f"{point}: error {error:.1e}, nothing is timed")


def _tensor(array: Any) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("uint16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: torch.Tensor) -> Any:
    return tensor.double().numpy()


def table(results: Iterable[Result], threads: int) -> str:
    """Return the points as a table, and geometric means by operator, direction and dtype."""
    results = list(results)
    lines = [
        f"cunorm {cunorm.__version__}, torch {torch.__version__}, {threads} threads, memory warm,",
        "medians in ms; × torch: speed relative to it; / copy: time over a copy of as many bytes",
        f"{'point':46} {'cunorm':>8} {'torch':>8} {'copy':>8} {'× torch':>8} {'/ copy':>7}",
    ]
    lines += [
        f"{result.point:46} {1e3 * result.cunorm:8.3f} {1e3 * result.torch:8.3f} "
        f"{1e3 * result.copy:8.3f} {result.speedup:8.2f} {result.over_copy:7.2f}"
        for result in results
    ]
    for names, group in _groups(results).items():
        speedup = statistics.geometric_mean(result.speedup for result in group)
        over_copy = statistics.geometric_mean(result.over_copy for result in group)
        worst = min(result.speedup for result in group)
        lines.append(
            f"{' '.join(names):30} geometric mean × torch {speedup:5.2f}, worst {worst:5.2f}, "
            f"/ copy {over_copy:5.2f}"
        )
    return "\n".join(lines)


def _groups(results: Iterable[Result]) -> dict[tuple[str, str, str], list[Result]]:
    """Return the points of each operator, direction and dtype, then those of all operators."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    of_all: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        point = result.point
        groups.setdefault((point.operator.name, point.direction, point.dtype), []).append(result)
        of_all.setdefault(("all", point.direction, point.dtype), []).append(result)
    return groups | of_all


def write_csv(path: Path, results: Iterable[Result]) -> None:
    """Write one line for each point, with what it was measured on."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        what = ["operator", "direction", "dtype", "rows", "width"]
        times = ["cunorm_ms", "torch_ms", "copy_ms"]
        writer.writerow(["date", "machine", "cunorm", "torch", *what, *times])
        machine = [datetime.date.today().isoformat(), platform.machine()]
        for result in results:
            point = result.point
            what = [point.operator.name, point.direction, point.dtype, point.rows, point.width]
            times = [f"{1e3 * t:.4f}" for t in (result.cunorm, result.torch, result.copy)]
            writer.writerow([*machine, cunorm.__version__, torch.__version__, *what, *times])
