# SPDX-License-Identifier: MIT
"""The CPU backend: the machine's C++ compiler compiles the kernels, which run on all cores."""

import struct
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

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
        self._listed = array("q", b"".join((head, *tasks, *slots, words)))
        # For each call, the indices in self._listed of its grid and of the words of its CallSize.
        before_words = len(self._listed) - len(words) // _WORD
        self._sized = [
            (
                (_LIST.size + number * _TASK.size) // _WORD + 1,
                [before_words + first_word + word for word in call.args.sized],
            )
            for number, (call, first_word) in enumerate(zip(calls, first_words, strict=True))
        ]

    def run(self) -> Run:
        """Return a function that runs the kernels."""
        sizes: list[CallSize] = [(call.launch.grid, call.work, ()) for call in self._calls]
        return self._run(self._listed, sizes)

    def run_of(self, sizes: Sequence[CallSize]) -> Run:
        """Return a function that runs the kernels for another number of rows."""
        listed = self._listed[:]
        for (grid_at, places), (grid, _, words) in zip(self._sized, sizes, strict=True):
            listed[grid_at] = grid
            for place, word in zip(places, words, strict=True):
                listed[place] = word
        return self._run(listed, sizes)

    def _run(self, listed: "array[int]", sizes: Sequence[CallSize]) -> Run:
        most = 1
        for call, (grid, work, _) in zip(self._calls, sizes, strict=True):
            if work > _SERIAL_WORK:
                most = max(most, call.parts or grid)
        return partial(_run_list, self._kernels, listed.tobytes(), self._pack, most)


def _run_list(
    run: Any, listed: bytes, pack: Callable[..., bytes], most: int, pointers: Sequence[int]
) -> None:
    """Run a list of kernels on at most `most` threads."""
    if run(listed, pack(*pointers), 1 if most == 1 else min(thread_count(), most)):
        raise MemoryError(
            "cunorm: there is no memory for the sums of a call's threads, or for tiles"
        )


# --- workspaces -----------------------------------------------------------------------------------

# Workspaces are kept for later calls, because allocating new ones would take longer.
_LARGEST = 16 << 20  # the most bytes of a workspace that is kept
_PIECES = 4  # the most workspaces that are kept


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
    """Return a function like `run` that replaces a last pointer of 0 by memory of `size` bytes."""
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
