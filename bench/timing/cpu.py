# SPDX-License-Identifier: MIT
"""The CPU of the timings: operands, copies and a timer.

The allocator keeps freed memory, so that no timing includes page faults. All providers of a point
have the same number of calls in a turn: the requested number, or the number of copies of the same
bytes that fit in a millisecond, at most ten. A turn of one short call would find code and data
cold, because the other providers evict them from the caches.
"""

from __future__ import annotations

import ctypes
import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

import cunorm
from bench.timing.arrays import upload
from bench.timing.cases import DTYPES, Call, Operands, Operator, Shape, checked_shape, drawn
from bench.timing.grid import Point
from bench.timing.turns import Turn
from cunorm._backends.cpu.threads import available_cores
from cunorm._demo import operators as demo

_TURN_SECONDS, _MAX_CALLS = 1e-3, 10


class Cpu:
    """The machine's CPU, with the same number of threads for each provider."""

    kind = "cpu"
    driver = ""
    note = "freed memory is kept, so that no page fault is timed"

    def __init__(
        self,
        threads: int,
        calls_per_turn: int | None = None,
        copies: Sequence[ModuleType] = (cunorm,),  # the copies of cunorm to time
    ) -> None:
        self.threads = threads
        self._copies = copies
        self._requested_calls = calls_per_turn
        self._calls_per_turn = 1
        keep_freed_memory()
        torch.set_num_threads(threads)
        for copy in copies:
            copy.set_num_threads(threads)

    @property
    def name(self) -> str:
        """The CPU's model and the number of cores in use."""
        return f"{_model()}, {self.threads} of {available_cores()} cores"

    @property
    def versions(self) -> dict[str, str]:
        """Versions of further software; none on a CPU."""
        return {}

    def fitting(self, point: Point, contestants: int) -> Point:
        """Return the point unchanged: the CPU's grid fits any memory."""
        return point

    def operands(self, point: Point) -> list[Operands]:
        """Return one set of operands; rows repeat, because drawing all of them would take long."""
        host, repeats = drawn(point.operator, point.dtype, point.shape)
        return [{name: upload(np, array, repeats) for name, array in host.items()}]

    def upload(self, host: Operands) -> Operands:
        """Return the arrays unchanged."""
        return host

    def copies(self, point: Point) -> list[Call]:
        """Return a copy that reads and writes as many bytes as the call.

        This method also sets the number of calls in a turn.
        """
        copy = make_copy(point.bytes, DTYPES[point.dtype].itemsize)
        self._calls_per_turn = self._requested_calls or _calls_per_turn(copy)
        return [copy]

    def turn(self, calls: list[Call], wait: Callable[[Any], Any] | None = None) -> Turn:
        """Warm up the only call, and return its turn."""
        (call,) = calls
        if wait is not None:
            call = partial(_call_and_wait, call, wait)
        call()
        return Turn(partial(_seconds, call, self._calls_per_turn))

    def prepare(self, points: Iterable[Point]) -> None:
        """Compile the builds of the points and of their checks, several at once."""
        needs = {
            (operator.base, *_warmup_arguments(operator, point.dtype, shape))
            for point in points
            for operator in (point.operator, point.operator.ungated())
            for shape in (point.shape, checked_shape(point.shape))
        }
        with ThreadPoolExecutor(available_cores()) as pool:
            for copy in self._copies:
                list(pool.map(partial(_compile, copy), sorted(needs, key=str)))


def keep_freed_memory() -> None:
    """Make glibc keep and reuse freed memory, as the demo does for its plot.

    All threads share one arena, because glibc unmaps the arenas that JAX's threads would have.
    """
    if demo.keep_freed_memory():
        arena_max = -8
        ctypes.CDLL(None).mallopt(arena_max, 1)


def make_copy(moved: int, itemsize: int) -> Call:
    """Return a torch copy that reads and writes that many bytes in all."""
    dtype = {2: torch.int16, 4: torch.int32}[itemsize]
    source = torch.ones(moved // (2 * itemsize), dtype=dtype)
    return lambda: torch.empty_like(source).copy_(source)


def _call_and_wait(call: Call, wait: Callable[[Any], Any]) -> Any:
    return wait(call())


def _calls_per_turn(call: Call) -> int:
    """Warm up, and return the number of calls in a turn."""
    call()
    fastest = min(_seconds(call, 1) for _ in range(3))
    return max(1, min(_MAX_CALLS, round(_TURN_SECONDS / fastest)))


def _seconds(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _model() -> str:
    if platform.system() == "Linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _compile(copy: ModuleType, need: tuple[Any, ...]) -> None:
    base, options = need[0], dict(need[1:])
    functions = [f"{base}_forward", f"{base}_backward"]
    copy.warmup(functions, **options, device="cpu", workers=1, progress=False)


def _warmup_arguments(operator: Operator, dtype: str, shape: Shape) -> tuple[tuple[str, Any], ...]:
    """Return the arguments of `warmup` for an operator, without its functions."""
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
