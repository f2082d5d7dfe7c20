# SPDX-License-Identifier: MIT
"""The CPU backend: the kernels' sources, compiled by the machine's C++ compiler, on all cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cunorm._builds import Build
from cunorm._cpu._compile import cache_folder, compiler, forget, library, loaded_count, prepare
from cunorm._cpu._threads import available_cores, set_num_threads, thread_count

__all__ = [
    "available_cores",
    "cache_folder",
    "compiler",
    "forget",
    "library",
    "loaded_count",
    "prepare",
    "prepared",
    "set_num_threads",
    "thread_count",
]

# Elements below which waking other threads costs more than they save.
_SERIAL_WORK = 1 << 15


def prepared(build: Build, grid: int, arguments: bytes, work: int) -> Callable[[], None]:
    """Return what runs a kernel of `grid` blocks to its end; it goes through `work` elements.

    A call's kernels are prepared before the first is run: afterwards the caches hold its data in
    place of the interpreter, and every line of Python takes several times as long.
    """
    threads = thread_count() if work > _SERIAL_WORK and grid > 1 else 1
    return partial(library(build), grid, min(threads, grid), arguments)
