# SPDX-License-Identifier: MIT
"""A CPU as the timings use it: operands, copies and a timer.

Everyone allocates results with an allocator that keeps freed memory, so that no page fault is
timed. A turn is as many calls as a copy of the bytes takes to fill a millisecond, and ten at most:
as many for everyone at a point; or so many as asked for. Of a turn of one short call, code and data
were driven from the caches by the others.
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
from bench.arrays import upload
from bench.cases import DTYPES, Call, Operands, Operator, Shape, checked_shape, drawn
from bench.grid import Point
from bench.turns import Turn
from cunorm._backends.cpu.threads import available_cores

_TURN_SECONDS, _MOST_CALLS = 1e-3, 10


class Cpu:
    """The machine's CPU, with as many threads for everyone."""

    kind = "cpu"
    driver = ""
    note = "freed memory is kept, so that no page fault is timed"

    def __init__(
        self,
        threads: int,
        calls_in_turn: int | None = None,
        copies: Sequence[ModuleType] = (cunorm,),  # of cunorm, that are to be timed
    ) -> None:
        self.threads = threads
        self._copies = copies
        self._calls_asked_for = calls_in_turn
        self._calls_in_turn = 1
        keep_freed_memory()
        torch.set_num_threads(threads)
        for copy in copies:
            copy.set_num_threads(threads)

    @property
    def name(self) -> str:
        """The CPU's model and how many cores are used."""
        return f"{_model()}, {self.threads} of {available_cores()} cores"

    @property
    def versions(self) -> dict[str, str]:
        """What is timed beside cunorm and the providers; nothing here."""
        return {}

    def fitting(self, point: Point, contestants: int) -> Point:
        """Return the point as it is: points of the CPU's grid fit any memory."""
        return point

    def operands(self, point: Point) -> list[Operands]:
        """Return one set of operands; rows repeat, as drawing them all would take long."""
        host, repeats = drawn(point.operator, point.dtype, point.shape)
        return [{name: upload(np, array, repeats) for name, array in host.items()}]

    def upload(self, host: Operands) -> Operands:
        """Return the host's arrays themselves."""
        return host

    def copies(self, point: Point) -> list[Call]:
        """Return a copy that reads and writes as many bytes in all.

        From then on a turn has as many calls as are right for it.
        """
        copy = copying(point.bytes, DTYPES[point.dtype].itemsize)
        self._calls_in_turn = self._calls_asked_for or _calls_in_turn(copy)
        return [copy]

    def turn(self, calls: list[Call], wait: Callable[[Any], Any] | None = None) -> Turn:
        """Warm up, and return the turns of the one call."""
        (call,) = calls
        if wait is not None:
            call = partial(_waited, call, wait)
        call()
        return Turn(partial(_seconds, call, self._calls_in_turn))

    def prepare(self, points: Iterable[Point]) -> None:
        """Compile what cunorm needs for the points and their checks, several builds at once."""
        needs = {
            (operator.base, *_described(operator, point.dtype, shape))
            for point in points
            for operator in (point.operator, point.operator.ungated())
            for shape in (point.shape, checked_shape(point.shape))
        }
        with ThreadPoolExecutor(available_cores()) as pool:
            for copy in self._copies:
                list(pool.map(partial(_compile, copy), sorted(needs, key=str)))


def keep_freed_memory() -> None:
    """Let glibc keep and reuse freed memory: no mmap, no trimming of the heap."""
    if platform.system() == "Linux":
        trim_threshold, mmap_max = -1, -4
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_max, 0)


def copying(moved: int, itemsize: int) -> Call:
    """Return torch's copy that reads and writes so many bytes in all."""
    dtype = {2: torch.int16, 4: torch.int32}[itemsize]
    source = torch.ones(moved // (2 * itemsize), dtype=dtype)
    return lambda: torch.empty_like(source).copy_(source)


def _waited(call: Call, wait: Callable[[Any], Any]) -> Any:
    return wait(call())


def _calls_in_turn(call: Call) -> int:
    """Warm up, and return how many calls a turn takes."""
    call()
    fastest = min(_seconds(call, 1) for _ in range(3))
    return max(1, min(_MOST_CALLS, round(_TURN_SECONDS / fastest)))


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
