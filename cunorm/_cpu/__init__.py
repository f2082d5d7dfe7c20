# SPDX-License-Identifier: MIT
"""The CPU backend: the kernels' sources, compiled by the machine's C++ compiler, on all cores."""

from __future__ import annotations

from cunorm._builds import Build
from cunorm._cpu._compile import compiler, library
from cunorm._cpu._threads import set_num_threads, thread_count

__all__ = ["compiler", "launch", "library", "set_num_threads", "thread_count"]

# Elements below which waking other threads costs more than they save.
_SERIAL_WORK = 1 << 15


def launch(build: Build, grid: int, arguments: bytes, work: int) -> None:
    """Run a kernel of `grid` blocks to its end; `work` is how many elements it goes through."""
    threads = thread_count() if work > _SERIAL_WORK and grid > 1 else 1
    library(build)(grid, min(threads, grid), arguments)
