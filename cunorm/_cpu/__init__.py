# SPDX-License-Identifier: MIT
"""The CPU backend: the kernels' sources, compiled by the machine's C++ compiler, on all cores."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
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
    arguments: bytes
    work: int  # elements that it goes through


def runner(tasks: Sequence[Task]) -> Callable[[], object]:
    """Return what runs kernels to their end, one after the other."""
    if not tasks:
        return lambda: None
    run, listed, count = tasks[0].entry.run, _list_of(tasks), len(tasks)
    most = max(task.grid for task in tasks)
    if most > 1 and any(task.work > _SERIAL_WORK for task in tasks):
        return lambda: run(listed, count, min(thread_count(), most))
    return partial(run, listed, count, 1)


def _list_of(tasks: Sequence[Task]) -> bytes:
    """Return the list that `cunorm_run` takes: the tasks, then the arguments of each."""
    heads, place = [], len(tasks) * _TASK.size
    for task in tasks:
        heads.append(_TASK.pack(task.entry.blocks, task.grid, place))
        place += len(task.arguments)
    return b"".join((*heads, *(task.arguments for task in tasks)))
