# SPDX-License-Identifier: MIT
"""The CPU backend: the kernels' sources, compiled by the machine's C++ compiler, on all cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cunorm._cpu._compile import (
    Entry,
    cache_folder,
    compiler,
    forget,
    library,
    loaded_count,
    prepare,
)
from cunorm._cpu._threads import available_cores, set_num_threads, thread_count

__all__ = [
    "available_cores",
    "cache_folder",
    "compiler",
    "forget",
    "library",
    "loaded_count",
    "prepare",
    "runner",
    "set_num_threads",
    "thread_count",
]

# Elements below which waking other threads costs more than they save.
_SERIAL_WORK = 1 << 15


def runner(entry: Entry, grid: int, arguments: bytes, work: int) -> Callable[[], object]:
    """Return what runs a kernel of `grid` blocks to its end; it goes through `work` elements."""
    if work > _SERIAL_WORK and grid > 1:
        return lambda: entry(grid, min(thread_count(), grid), arguments)
    return partial(entry, grid, 1, arguments)
