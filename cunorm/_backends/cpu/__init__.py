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
from cunorm._core.plan import CallSize, KernelCall

Run = Callable[[Sequence[int]], object]  # given the addresses of arrays

_WORD = 8  # bytes; arguments are whole words
_SERIAL_WORK = 1 << 15  # elements; up to this number, more threads cost more than they save
# The structs List, Task and Slot of launch.h.
_LIST, _TASK, _SLOT = struct.Struct("<3q"), struct.Struct("<Qqqq"), struct.Struct("<2q")
_INTEGER = struct.Struct("<q")


class Program:
    """Kernels that run one after the other, in the form that launch.h reads."""

    def __init__(self, calls: Sequence[KernelCall], array_count: int) -> None:
        entries = libraries(call.launch.build for call in calls)
        words, tasks, slots = b"", [], []
        last: KernelArgs | None = None
        first_words = []
        for call, entry in zip(calls, entries, strict=True):
            if call.args is not last:
                last, first_word = call.args, len(words) // _WORD
                words += last.data
                slots += [_SLOT.pack(first_word + word, array) for word, array in last.relocations]
            tasks.append(_TASK.pack(entry.blocks, call.launch.grid, first_word, call.parts))
            first_words.append(first_word)
        head = _LIST.pack(len(tasks), len(slots), len(words) // _WORD)
        self._calls, self._kernels = calls, entries[0].run
        self._pack = struct.Struct(f"<{array_count}Q").pack
        self._listed = b"".join((head, *tasks, *slots, words))
        before_words = len(self._listed) - len(words)
        self._sized = [
            [before_words + _WORD * (first_word + word) for word in call.args.sized]
            for call, first_word in zip(calls, first_words, strict=True)
        ]

    def run(self) -> Run:
        """Return a function that runs the kernels."""
        return self._run(self._listed, [(call.work, call.launch.grid) for call in self._calls])

    def run_of(self, sizes: Sequence[CallSize]) -> Run:
        """Return a function that runs the kernels for another number of rows."""
        listed, grid_at = bytearray(self._listed), _LIST.size + _WORD
        for (grid, _, words), offsets in zip(sizes, self._sized, strict=True):
            _INTEGER.pack_into(listed, grid_at, grid)
            for offset, word in zip(offsets, words, strict=True):
                _INTEGER.pack_into(listed, offset, word)
            grid_at += _TASK.size
        return self._run(bytes(listed), [(size.work, size.grid) for size in sizes])

    def _run(self, listed: bytes, loads: list[tuple[int, int]]) -> Run:
        run, pack, most = self._kernels, self._pack, 1
        for call, (work, grid) in zip(self._calls, loads, strict=True):
            if work > _SERIAL_WORK:
                most = max(most, call.parts or grid)
        if most > 1:
            return lambda pointers: (
                run(listed, pack(*pointers), min(thread_count(), most)) and _no_memory()
            )
        return lambda pointers: run(listed, pack(*pointers), 1) and _no_memory()


def _no_memory() -> NoReturn:
    raise MemoryError("cunorm: there is no memory for the sums of a call's threads")


# --- workspaces -----------------------------------------------------------------------------------

# Workspaces are kept for later calls, because allocating a new one takes longer.
_LARGEST = 16 << 20  # bytes
_PIECES = 4


class Piece(NamedTuple):
    array: np.ndarray[Any, Any]
    address: int


_kept: list[Piece] = []  # its pop and append are atomic
on_clear(_kept.clear)


def take(size: int) -> Piece:
    """Return memory of at least `size` bytes."""
    try:
        piece = _kept.pop()
        if piece.array.nbytes >= size:
            return piece
    except IndexError:
        pass
    array = np.empty(-(-size // 8), np.float64)
    return Piece(array, array.ctypes.data)


def with_scratch(size: int, run: Run) -> Run:
    """Return `run`, with memory of `size` bytes as the last pointer where that is 0."""
    if not size:
        return run

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
