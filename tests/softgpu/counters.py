# SPDX-License-Identifier: MIT
"""Counts the instructions and the accesses of launches on the software GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from . import load, settings


@dataclass(frozen=True)
class Range:
    """The accesses of a launch to one allocation, from address `begin` up to `end`.

    `loaded` and `stored` count the bytes of every access, `distinct_*` count each byte once, and
    `*_sectors` count the 32-byte sectors of each access of a warp. An asynchronous copy counts as a
    load, an atomic operation as a load and a store.
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
    """Accesses of warps to shared memory; without bank conflicts they take `ideal` wavefronts.

    A wavefront serves at most a warp at 4 bytes a lane, half a warp at 8 and a quarter at 16 bytes.
    """

    accesses: int
    wavefronts: int
    ideal: int

    @property
    def surplus(self) -> int:
        """The wavefronts due to bank conflicts."""
        return self.wavefronts - self.ideal


class _Range(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_uint64) for field in fields(Range)]


class _Shared(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_uint64) for field in fields(Shared)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        *((name, ctypes.c_uint64) for name in ("threads", "issued", "executed")),
        *((name, _Shared) for name in ("shared_loads", "shared_stores")),
        *(("ranges", ctypes.c_uint64), ("range", ctypes.POINTER(_Range))),
    ]


@dataclass(frozen=True)
class Launch:
    """A launch: the instructions `issued` to warps and `executed` by threads, and the accesses."""

    kernel: str
    threads: int
    issued: int
    executed: int
    shared_loads: Shared
    shared_stores: Shared
    ranges: tuple[Range, ...]  # the accessed allocations

    def range_at(self, pointer: int) -> Range:
        """Return the counts of the allocation at an address, all 0 if it was not accessed."""
        found = (one for one in self.ranges if one.begin <= pointer < one.end)
        return next(found, Range(pointer, pointer))


@contextmanager
def counting() -> Iterator[list[Launch]]:
    """Yield a list; after the block, the list has the launches that ran in the block."""
    launches: list[Launch] = []
    load().softgpu_clear_launches()
    with settings(counters=True):
        yield launches
    read = load().softgpu_launch
    read.argtypes, read.restype = [ctypes.c_uint64], ctypes.POINTER(_Launch)
    while record := read(len(launches)):
        launches.append(_launch(record.contents))
    load().softgpu_clear_launches()


def _launch(record: _Launch) -> Launch:
    plain = (record.threads, record.issued, record.executed)
    shared = (_read(Shared, one) for one in (record.shared_loads, record.shared_stores))
    ranges = tuple(_read(Range, record.range[k]) for k in range(record.ranges))
    return Launch(record.kernel.decode(), *plain, *shared, ranges)


def _read(kind: type, record: ctypes.Structure):
    return kind(*(getattr(record, field.name) for field in fields(kind)))
