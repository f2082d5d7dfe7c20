# SPDX-License-Identifier: MIT
"""Arrays against guard pages, for kernels that must not leave them."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Literal

import numpy as np
import numpy.typing as npt

_PAGE = mmap.PAGESIZE
_NO_ACCESS = 0
_GUARD = 1 << 20  # bytes on either side, of address space only
_POISON = 0xFF  # in every byte: a NaN of any floating-point type

Role = Literal["input", "output", "inout"]


class GuardedArray:
    """A copy of an array, of the same shape and strides, between pages that allow no access.

    The bytes around the array and those in the gaps of a strided one are poison; `disturbed` finds
    those that a kernel overwrote.

    Attributes
    ----------
    array : ndarray
        The copy; read-only for an input.
    pointer : int
        The address of its first element. With negative strides that is not its lowest address.
    begin, nbytes : int
        Its lowest address, and the bytes from there to its highest, gaps included.
    role : {"input", "output", "inout"}
        A kernel's write to an input faults. An output holds poison.
    """

    def __init__(
        self,
        array: np.ndarray,
        role: Role,
        at: Literal["end", "start"],
        alignment: int,
        offset: int,
    ) -> None:
        low, high = _extent(array)
        self.role: Role = role
        self.nbytes = high - low
        if not 0 <= offset < alignment <= _PAGE:
            raise ValueError(f"offset {offset} and alignment {alignment} do not fit")
        inner = -(-(self.nbytes + alignment) // _PAGE) * _PAGE
        mapping = mmap.mmap(-1, inner + 2 * _GUARD, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = np.frombuffer(mapping, np.uint8)
        self._pages = memory[_GUARD:-_GUARD]
        first_address = self._pages.ctypes.data

        if at == "end":
            begin = inner - self.nbytes
            begin -= (first_address + begin - low - offset) % alignment
        elif at == "start":
            begin = (offset + low - first_address) % alignment
        else:
            raise ValueError(f"at is {at!r}, expected 'end' or 'start'")
        self.begin = first_address + begin
        self.pointer = self.begin - low
        self.array = np.ndarray(array.shape, array.dtype, self._pages, begin - low, array.strides)

        foreign = np.ones(inner, bool)
        bytes_of_elements = (*array.shape, array.itemsize)
        byte_strides = (*array.strides, 1)
        np.ndarray(bytes_of_elements, bool, foreign, begin - low, byte_strides)[...] = False
        self._foreign = np.flatnonzero(foreign)

        self.poison()
        if role != "output":
            self.array[...] = array
        _protect(memory[:_GUARD], _NO_ACCESS)
        _protect(memory[-_GUARD:], _NO_ACCESS)
        if role == "input":
            _protect(self._pages, mmap.PROT_READ)
            self.array.flags.writeable = False

    def poison(self) -> None:
        """Fill the array and what surrounds it with bytes that make a NaN of any float."""
        self._pages[...] = _POISON

    def disturbed(self) -> npt.NDArray[np.int64]:
        """Return the places around the array, in bytes from `begin`, that are no longer poison."""
        changed = self._foreign[self._pages[self._foreign] != _POISON]
        return changed - (self.begin - self._pages.ctypes.data)


def guarded(
    array: npt.ArrayLike,
    *,
    role: Role = "input",
    at: Literal["end", "start"] = "end",
    alignment: int | None = None,
    offset: int = 0,
) -> GuardedArray:
    """Copy an array, strides included, against a guard page.

    Parameters
    ----------
    array : array_like
        What is copied. Of an output only the shape, strides and dtype are taken.
    role : {"input", "output", "inout"}
        What the kernel does with it.
    at : {"end", "start"}
        Whether the last byte lies before a guard page or the first after one, as closely as the
        alignment allows.
    alignment, offset : int
        The first element's address modulo alignment is offset. By default it is a multiple of the
        element's size and, the array being a whole number of elements, flush with the guard page.
    """
    array = np.asarray(array)
    return GuardedArray(array, role, at, alignment or array.itemsize, offset)


def _extent(array: np.ndarray) -> tuple[int, int]:
    """Return where the bytes of an array begin and end, from its first element."""
    if array.size == 0:
        return 0, 0
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    return sum(min(s, 0) for s in steps), sum(max(s, 0) for s in steps) + array.itemsize


def _protect(pages: np.ndarray, protection: int) -> None:
    address, size = ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.nbytes)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(address, size, ctypes.c_int(protection)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
