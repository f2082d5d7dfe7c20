# SPDX-License-Identifier: MIT
"""Times cunorm against PyTorch on the CPU: the same tensors, threads and process.

Each contestant allocates its outputs with PyTorch's allocator, whose freed memory is kept, so that
no page fault is timed. The contestants take turns, in an order drawn anew for each round, as what
one leaves in the caches is the next one's gain; the figures are medians. A turn is one call, whose
code and data the others' turns have driven from the caches, or several, as in a loop.
"""

from __future__ import annotations

import ctypes
import math
import platform
import random
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

import cunorm
from bench import cases, peers
from bench.cases import Call, Operands, Operator, Shape
from cunorm._cpu import available_cores

_CHECKED_ROWS = 64
_CHECKED_ELEMENTS = 1 << 21  # of group norms, whose samples are large


@dataclass(frozen=True)
class Point:
    """What is timed."""

    operator: Operator
    direction: str
    dtype: str
    shape: Shape

    @property
    def shape_text(self) -> str:
        """The shape as the command line has it."""
        return "x".join(map(str, self.shape))

    def __format__(self, spec: str) -> str:
        text = f"{self.operator.label} {self.direction} {self.dtype} {self.shape_text}"
        return format(text, spec)


@dataclass(frozen=True)
class Result:
    """Median seconds of a call, and of a copy that moves as many bytes."""

    point: Point
    cunorm: float
    torch: float
    copy: float
    ungated: float | None = None  # of cunorm, where the operator has a gate

    @property
    def speedup(self) -> float:
        """How many times faster than torch."""
        return self.torch / self.cunorm

    @property
    def over_copy(self) -> float:
        """How many times a copy of the same bytes the call takes."""
        return self.cunorm / self.copy

    @property
    def over_ungated(self) -> float | None:
        """How many times the call without its gate it takes."""
        return self.cunorm / self.ungated if self.ungated else None


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


def compile_ahead(points: Iterable[Point]) -> None:
    """Compile what the points need, and their checks, several builds at once."""
    needs = {
        (operator.base, *_described(operator, point.dtype, shape))
        for point in points
        for operator in (point.operator, point.operator.ungated())
        for shape in (point.shape, _checked_shape(point))
    }

    def compile_one(need: tuple[Any, ...]) -> None:
        base, options = need[0], dict(need[1:])
        functions = [f"{base}_forward", f"{base}_backward"]
        cunorm.warmup(functions, **options, device="cpu", workers=1, progress=False)

    with ThreadPoolExecutor(available_cores()) as pool:
        list(pool.map(compile_one, sorted(needs, key=str)))


def _described(operator: Operator, dtype: str, shape: Shape) -> tuple[tuple[str, Any], ...]:
    """Return the arguments of `warmup` for an operator, but for its functions."""
    rows, width, *positions = shape
    operands = dict.fromkeys((*operator.parameters, *operator.leaves), True)
    del operands["x"]
    options = {name: value for name, value in operator.options.items() if name != "c"}
    if "groups" in options:
        options["groups"] = operator.groups(width)
    if operator.of_channels:
        del options["channel_axis"]
        options["num_groups"] = options.pop("groups")
        options["positions"] = math.prod(positions)
        options["layout"] = {"NHWC": "channels_last", "NCHW": "channels_first"}[operator.memory]
    return (
        ("widths", width),
        ("dtypes", dtype),
        ("rows", rows),
        *operands.items(),
        *options.items(),
    )


def measure(point: Point, seconds: float, calls_in_turn: int = 1) -> Result:
    """Check cunorm against the oracle, then time the contestants in turn."""
    _check(point)
    operator = point.operator
    host = cases.host_operands(operator, point.dtype, point.shape)
    tensors = {name: tensor(array) for name, array in host.items()}
    x = tensors["x"]
    moved = cases.bytes_moved(operator, point.direction, point.shape, x.itemsize)
    theirs = peers.torch_function(torch, operator, point.shape[1])
    calls = {"copy": copying(moved, x.dtype), "cunorm": _ours(operator, point.direction, tensors)}
    if point.direction == "forward":
        calls["torch"] = peers.torch_forward(theirs, operator, tensors)
    else:
        calls["torch"] = peers.torch_backward(torch, theirs, operator, tensors)
    if operator.gate_position:
        calls["ungated"] = _ours(operator.ungated(), point.direction, tensors)
    return Result(point, **medians(calls, seconds, calls_in_turn))


def _ours(operator: Operator, direction: str, tensors: Operands) -> Call:
    if direction == "forward":
        return cases.forward(cunorm, operator, tensors)
    saved = cases.training_forward(cunorm, operator, tensors)()
    return cases.backward(cunorm, operator, tensors, saved)


def copying(moved: int, dtype: torch.dtype) -> Call:
    """Return a copy that reads and writes as many bytes in all."""
    source = torch.ones(moved // (2 * dtype.itemsize), dtype=dtype)
    return lambda: torch.empty_like(source).copy_(source)


def medians(calls: dict[str, Call], seconds: float, calls_in_turn: int = 1) -> dict[str, float]:
    """Return each call's median over rounds in which they take turns; seconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    contestants = list(calls.items())
    order = random.Random(0)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[contestants[0][0]]) < 5:
        order.shuffle(contestants)
        for name, call in contestants:
            start = time.perf_counter()
            for _ in range(calls_in_turn):
                call()
            times[name].append((time.perf_counter() - start) / calls_in_turn)
    return {name: statistics.median(spent) for name, spent in times.items()}


def _check(point: Point) -> None:
    """Compare a few rows of the same width, or samples of the same channels, with the oracle."""
    shape = _checked_shape(point)
    error = cases.check(point.operator, point.dtype, shape, tensor, _array)
    if not error <= cases.TOLERANCE[point.dtype]:
        raise RuntimeError(f"{point}: error {error:.1e}, nothing is timed")


def _checked_shape(point: Point) -> Shape:
    if point.operator.of_channels:
        return cases.fewer(point.shape, _CHECKED_ELEMENTS)
    rows, width = point.shape
    return min(rows, _CHECKED_ROWS), width


def tensor(array: Any) -> torch.Tensor:
    """Return the tensor of a NumPy array's memory, with its strides."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("uint16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: torch.Tensor) -> Any:
    return tensor.double().numpy()
