# SPDX-License-Identifier: MIT
"""The CPU backend: the kernels' sources, compiled by the machine's C++ compiler, on all cores."""

from __future__ import annotations

from typing import NamedTuple

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
    "Kernel",
    "available_cores",
    "cache_folder",
    "compiler",
    "forget",
    "library",
    "loaded_count",
    "prepare",
    "set_num_threads",
    "thread_count",
]

# Elements below which waking other threads costs more than they save.
_SERIAL_WORK = 1 << 15


class Kernel(NamedTuple):
    """A kernel of `grid` blocks that is ready to run; it goes through `work` elements."""

    entry: Entry
    grid: int
    arguments: bytes
    work: int

    def run(self) -> None:
        """Run it to its end."""
        parallel = self.work > _SERIAL_WORK and self.grid > 1
        self.entry(self.grid, min(thread_count(), self.grid) if parallel else 1, self.arguments)
