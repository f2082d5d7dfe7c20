# SPDX-License-Identifier: MIT
"""The CPU backend: the kernels' sources, compiled by the machine's C++ compiler, on all cores."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cunorm._arguments import WORD, Kernels, Pointers, template
from cunorm._cpu._caches import last_cache_bytes
from cunorm._cpu._compile import Entry, forget, library, loaded_count, prepare
from cunorm._cpu._compiler import compiler
from cunorm._cpu._files import cache_folder
from cunorm._cpu._threads import available_cores, set_num_threads, thread_count

__all__ = [
    "Kernels",
    "Pointers",
    "Task",
    "available_cores",
    "cache_folder",
    "compiler",
    "forget",
    "last_cache_bytes",
    "library",
    "loaded_count",
    "prepare",
    "runner",
    "set_num_threads",
    "thread_count",
]

# Elements below which waking other threads costs more than they save.
_SERIAL_WORK = 1 << 15


# `struct List`, `struct Task` and `struct Place` of launch.h.
_LIST, _TASK, _PLACE = struct.Struct("<3q"), struct.Struct("<Qqqq"), struct.Struct("<2q")


class Task(NamedTuple):
    """A kernel to run."""

    entry: Entry
    grid: int  # blocks
    place: int  # where, in the arguments of all, its own begin
    work: int  # elements that it goes through
    parts: int = 0  # of each block's work, of which every thread does some; 0: it does whole blocks

    @property
    def most_threads(self) -> int:
        """Return how many threads find something to do."""
        if self.work <= _SERIAL_WORK:
            return 1
        return self.parts or self.grid


def runner(tasks: Sequence[Task], arguments: Callable[[Pointers], bytes], arrays: int) -> Kernels:
    """Return what runs kernels to their end, one after the other, given where arrays lie.

    `arguments` are those of all kernels, as `template` takes them.
    """
    if not tasks:
        return lambda pointers: None
    plain, places = template(arguments, arrays)
    head = _LIST.pack(len(tasks), len(places), len(plain) // WORD)
    packed = [
        _TASK.pack(task.entry.blocks, task.grid, task.place // WORD, task.parts) for task in tasks
    ]
    listed = b"".join((head, *packed, *(_PLACE.pack(*place) for place in places), plain))
    run, pack = tasks[0].entry.run, struct.Struct(f"<{arrays}Q").pack
    most = max(task.most_threads for task in tasks)
    if most > 1:
        return lambda pointers: run(listed, pack(*pointers), min(thread_count(), most))
    return lambda pointers: run(listed, pack(*pointers), 1)
