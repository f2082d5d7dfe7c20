# SPDX-License-Identifier: MIT
"""Workspaces of CPU calls: some MiB are kept, as allocation takes longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cunorm._core.memo import on_clear

_LARGEST = 8 << 20  # bytes that are kept in one piece
_PIECES = 4


class Piece(NamedTuple):
    """Memory of a NumPy array, and its address."""

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


def put_back(piece: Piece) -> None:
    """Keep memory for the next call."""
    if piece.array.nbytes <= _LARGEST and len(_kept) < _PIECES:
        _kept.append(piece)


def with_scratch(
    size: int, run: Callable[[Sequence[int]], object]
) -> Callable[[Sequence[int]], None]:
    """Return `run` with memory for its last pointer, where that is 0."""

    def run_with(pointers: Sequence[int]) -> None:
        if pointers[-1]:
            run(pointers)
            return
        piece = take(size)
        try:
            run([*pointers[:-1], piece.address])
        finally:
            put_back(piece)

    return run_with
