# SPDX-License-Identifier: MIT
"""The CPU of the timings: operands, copies and a timer.

The allocator keeps freed memory, so that no timing includes page faults. All providers of a point
have the same number of calls in a turn: as many copies of the same bytes as fit in a millisecond,
at most ten. A turn of one short call would find code and data cold, because the other providers
evict them from the caches.
"""

from __future__ import annotations

import ctypes
import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

import cunorm
from bench.timing.arrays import upload
from bench.timing.cases import DTYPES, LAYOUTS, Call, Operands, Operator, Shape
from bench.timing.engine import Device, Turn
from bench.timing.grid import Point
from bench.timing.operands import checked_shape, drawn
from cunorm._backends.cpu.threads import available_cores
from cunorm._info import cpu_name

_TURN_SECONDS, _MAX_CALLS = 1e-3, 10


class Cpu(Device):
    """The machine's CPU, with the same number of threads for each provider."""

    kind = "cpu"
    note = "freed memory is kept, so that no page fault is timed"

    def __init__(self, threads: int, copies: Sequence[ModuleType] = (cunorm,)) -> None:
        """Set the number of threads of torch and of the copies of cunorm that are timed."""
        self.name = f"{cpu_name()}, {threads} of {available_cores()} cores"
        self.threads = threads
        self._copies = copies
        self._calls_per_turn = 1
        _keep_freed_memory()
        torch.set_num_threads(threads)
        for copy in copies:
            copy.set_num_threads(threads)

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
        itemsize = DTYPES[point.dtype].itemsize
        dtype = {2: torch.int16, 4: torch.int32}[itemsize]
        source = torch.ones(point.bytes // (2 * itemsize), dtype=dtype)

        def copy() -> Any:
            return torch.empty_like(source).copy_(source)

        copy()
        fastest = min(_seconds(copy, 1) for _ in range(3))
        self._calls_per_turn = max(1, min(_MAX_CALLS, round(_TURN_SECONDS / fastest)))
        return [copy]

    def turn(self, calls: list[Call], wait: Callable[[Any], Any] | None = None) -> Turn:
        """Warm up the only call, and return its turn."""
        (call,) = calls
        waited = call if wait is None else lambda: wait(call())
        waited()
        return Turn(partial(_seconds, waited, self._calls_per_turn))

    def prepare(self, points: Iterable[Point]) -> None:
        """Compile the builds of the points and of their checks, several at once."""
        needs = {
            str(need): need
            for point in points
            if not point.operator.modulated  # the checks compile its builds
            for operator in (point.operator, point.operator.ungated())
            for shape in (point.shape, checked_shape(point.shape))
            for need in [_warmup_arguments(operator, point.dtype, shape)]
        }
        with ThreadPoolExecutor(available_cores()) as pool:
            for copy in self._copies:
                list(pool.map(partial(_compile, copy), needs.values()))


def _seconds(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _compile(copy: ModuleType, need: dict[str, Any]) -> None:
    copy.warmup(**need, device="cpu", workers=1, progress=False)


def _warmup_arguments(operator: Operator, dtype: str, shape: Shape) -> dict[str, Any]:
    """Return the arguments of `warmup` for the forward and the backward of an operator."""
    rows, width, *positions = shape
    options = {name: one for name, one in operator.options.items() if name not in ("c", "axis")}
    options |= dict.fromkeys((*operator.parameters, *operator.leaves), True)
    del options["x"]
    if "groups" in options:
        options["groups"] = operator.groups(width)
    if operator.of_channels:
        del options["channel_axis"]
        options["num_groups"] = options.pop("groups")
        options["positions"] = math.prod(positions)
    elif operator.of_images:
        rows *= math.prod(positions)
    if operator.of_images:
        options["layout"] = LAYOUTS[operator.memory]
    return options | {"ops": operator.functions, "widths": width, "dtypes": dtype, "rows": rows}


def _keep_freed_memory() -> None:
    """Make glibc reuse freed memory, so that calls cause no page faults.

    All threads share an arena, because glibc unmaps the arenas that JAX's threads would have.
    """
    trim_threshold, mmap_max, arena_max = (-1, 2**31 - 1), (-4, 0), (-8, 1)  # for mallopt
    if platform.libc_ver()[0] == "glibc":
        for option in (trim_threshold, mmap_max, arena_max):
            ctypes.CDLL(None).mallopt(*option)
