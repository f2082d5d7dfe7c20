# SPDX-License-Identifier: MIT
"""The CPU backend: the kernels' sources, compiled by the machine's C++ compiler, on all cores."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
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
    "Task",
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


_TASK = struct.Struct("<Qqq")  # `struct Task` of launch.h


class Task(NamedTuple):
    """A kernel to run."""

    entry: Entry
    grid: int  # blocks
    place: int  # where, in the arguments of all, its own begin
    work: int  # elements that it goes through


def runner(tasks: Sequence[Task]) -> Callable[[bytes], object]:
    """Return what runs kernels to their end, one after the other, given the arguments of all."""
    if not tasks:
        return lambda arguments: None
    run, count = tasks[0].entry.run, len(tasks)
    most = max((task.grid for task in tasks if task.work > _SERIAL_WORK), default=1)
    heads = b"".join(
        _TASK.pack(task.entry.blocks, task.grid, count * _TASK.size + task.place) for task in tasks
    )
    if most > 1:
        return lambda arguments: run(heads + arguments, count, min(thread_count(), most))
    return lambda arguments: run(heads + arguments, count, 1)
