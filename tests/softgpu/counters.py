# SPDX-License-Identifier: MIT
"""Counts the accesses of launches on the software GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from . import load, settings


class Range(ctypes.Structure):
    """The accesses of a launch to one allocation, from address `begin` up to `end`.

    `loaded` and `stored` count the bytes of every access, `distinct_*` count each byte once, and
    `*_sectors` count the 32-byte sectors of each access of a warp. An asynchronous copy counts as a
    load.
    """

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("begin", "end", "loaded", "stored", "distinct_loaded", "distinct_stored"),
            *("load_sectors", "store_sectors"),
        )
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("ranges", ctypes.c_uint64),
        ("range", ctypes.POINTER(Range)),
    ]


class Launch(NamedTuple):
    """A launch, and the allocations that it accessed."""

    kernel: str
    ranges: tuple[Range, ...]

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
        found = record.contents
        ranges = (Range.from_buffer_copy(found.range[k]) for k in range(found.ranges))
        launches.append(Launch(found.kernel.decode(), tuple(ranges)))
    load().softgpu_clear_launches()
