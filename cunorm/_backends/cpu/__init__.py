# SPDX-License-Identifier: MIT
"""The CPU backend: the machine's C++ compiler compiles the kernels, which run on all cores."""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from cunorm._backends.cpu.compile import libraries
from cunorm._backends.cpu.threads import thread_count
from cunorm._core.build import KernelArgs
from cunorm._core.memo import on_clear
from cunorm._core.plan import KernelCall

Run = Callable[[Sequence[int]], object]  # given the addresses of arrays

_WORD = 8  # bytes; arguments are a multiple of it
_SERIAL_WORK = 1 << 15  # up to so many elements other threads cost more than they save
# `struct List`, `struct Task` and `struct Place` of launch.h.
_LIST, _TASK, _PLACE = struct.Struct("<3q"), struct.Struct("<Qqqq"), struct.Struct("<2q")


def runner(calls: Sequence[KernelCall], array_count: int) -> Run:
    """Return a function that runs kernels, one after the other."""
    entries = libraries(call.launch.build for call in calls)
    words, tasks, relocations = b"", [], []
    last: KernelArgs | None = None
    first_word = 0
    for call, entry in zip(calls, entries, strict=True):
        if call.args is not last:
            last, first_word = call.args, len(words) // _WORD
            words += last.data
            relocations += [_PLACE.pack(first_word + word, slot) for word, slot in last.relocations]
        tasks.append(_TASK.pack(entry.blocks, call.launch.grid, first_word, call.parts))
    head = _LIST.pack(len(tasks), len(relocations), len(words) // _WORD)
    listed = b"".join((head, *tasks, *relocations, words))
    run, pack = entries[0].run, struct.Struct(f"<{array_count}Q").pack
    most = max(1 if call.work <= _SERIAL_WORK else call.parts or call.launch.grid for call in calls)
    if most > 1:
        return lambda pointers: (
            run(listed, pack(*pointers), min(thread_count(), most)) and _no_memory()
        )
    return lambda pointers: run(listed, pack(*pointers), 1) and _no_memory()


def _no_memory() -> NoReturn:
    raise MemoryError("cunorm: there is no memory for the sums of a call's threads")


# --- workspaces: some MiB are kept, because allocating them takes longer --------------------------

_LARGEST = 16 << 20  # bytes that are kept in one piece
_PIECES = 4


class Piece(NamedTuple):
    array: np.ndarray[Any, Any]
    address: int


_kept: list[Piece] = []  # threads take and put back by one atomic operation each
on_clear(_kept.clear)


def take(size: int) -> Piece:
    """Return memory of at least a size in bytes."""
    try:
        piece = _kept.pop()
        if piece.array.nbytes >= size:
            return piece
    except IndexError:
        pass
    array = np.empty(-(-size // 8), np.float64)
    return Piece(array, array.ctypes.data)


def with_scratch(size: int, run: Run) -> Run:
    """Return `run` with memory for its last pointer, where that is 0."""

    def run_with(pointers: Sequence[int]) -> None:
        if pointers[-1]:
            run(pointers)
            return
        piece = take(size)
        try:
            run([*pointers[:-1], piece.address])
        finally:
            if piece.array.nbytes <= _LARGEST and len(_kept) < _PIECES:
                _kept.append(piece)

    return run_with
