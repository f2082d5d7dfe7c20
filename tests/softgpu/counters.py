# SPDX-License-Identifier: MIT
"""Counts what launches access on the software GPU, which the driver API's clients do not see."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from . import load, settings

_u64, _three = ctypes.c_uint64, ctypes.c_uint * 3


class _Range(ctypes.Structure):
    _fields_ = [
        *((name, _u64) for name in ("begin", "end", "loaded", "stored")),
        *((name, _u64) for name in ("distinct_loaded", "distinct_stored")),
        *((name, _u64) for name in ("load_sectors", "store_sectors")),
    ]


class _Shared(ctypes.Structure):
    _fields_ = [(name, _u64) for name in ("accesses", "wavefronts", "ideal")]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        *((name, _three) for name in ("grid", "block", "cluster")),
        ("dynamic_shared", ctypes.c_uint),
        *((name, _u64) for name in ("issued", "executed")),
        *((name, _Shared) for name in ("shared_loads", "shared_stores")),
        ("ranges", _u64),
        ("range", ctypes.POINTER(_Range)),
    ]


@dataclass(frozen=True)
class Range:
    """What a launch did to one allocation, from address `begin` up to `end`.

    Every access counts its own bytes, `distinct_*` each byte once. Sectors of 32 bytes are counted
    for each access of a warp. Asynchronous copies are loads. Atomic operations load and store.
    """

    begin: int
    end: int
    loaded: int = 0
    stored: int = 0
    distinct_loaded: int = 0
    distinct_stored: int = 0
    load_sectors: int = 0
    store_sectors: int = 0


@dataclass(frozen=True)
class Shared:
    """Accesses of warps to shared memory, how often it was busy, and had to be without conflicts.

    Of 8 bytes a lane, half a warp is served at a time; of 16, a quarter.
    """

    accesses: int
    wavefronts: int
    ideal: int

    @property
    def excess(self) -> int:
        """How often banks were wanted for another word."""
        return self.wavefronts - self.ideal


@dataclass(frozen=True)
class Launch:
    """A launch: instructions `issued` to warps, `executed` by their threads, and its accesses."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    dynamic_shared: int
    issued: int
    executed: int
    shared_loads: Shared
    shared_stores: Shared
    ranges: tuple[Range, ...]

    def of(self, pointer: int) -> Range:
        """Return the counts of the allocation that holds an address: zeros if untouched."""
        found = (one for one in self.ranges if one.begin <= pointer < one.end)
        return next(found, Range(pointer, pointer))


@contextmanager
def counting() -> Iterator[list[Launch]]:
    """Give a list that has the launches made within, once the block has ended."""
    launches: list[Launch] = []
    load().softgpu_forget_launches()
    with settings(counters=True):
        yield launches
    read = load().softgpu_launch
    read.argtypes, read.restype = [_u64], ctypes.POINTER(_Launch)
    while made := read(len(launches)):
        launches.append(_launch(made.contents))
    load().softgpu_forget_launches()


def _launch(made: _Launch) -> Launch:
    plain = {name: getattr(made, name) for name in ("dynamic_shared", "issued", "executed")}
    sizes = {name: tuple(getattr(made, name)) for name in ("grid", "block", "cluster")}
    shared = {
        name: Shared(*_values(getattr(made, name))) for name in ("shared_loads", "shared_stores")
    }
    ranges = tuple(Range(*_values(made.range[k])) for k in range(made.ranges))
    return Launch(made.kernel.decode(), **sizes, **plain, **shared, ranges=ranges)


def _values(structure: ctypes.Structure) -> tuple[int, ...]:
    return tuple(getattr(structure, field[0]) for field in structure._fields_)
