# SPDX-License-Identifier: MIT
"""Memory between two pages on which any access faults."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np

from tests.support.gpu_arrays import OnNumpy

_PAGE = mmap.PAGESIZE
_NO_ACCESS = 0  # PROT_NONE
_mprotect = None
if sys.platform != "win32":  # on Windows, no page is protected
    _mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    _mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class OnGuarded(OnNumpy):
    """NumPy arrays that begin or end at the border of a page that faults on any access."""

    behind = 0

    def __init__(self, at_end: bool = True) -> None:
        self.at_end = at_end

    def allocate(self, content: Any) -> Any:
        """Allocate memory with these bytes."""
        size = len(content)
        pages = -(-size // _PAGE) * _PAGE
        memory = np.frombuffer(mmap.mmap(-1, pages + 2 * _PAGE), np.uint8)
        for guard in (0, _PAGE + pages):
            if _mprotect and _mprotect(memory.ctypes.data + guard, _PAGE, _NO_ACCESS):
                raise OSError(ctypes.get_errno(), "mprotect")
        begin = _PAGE + (pages - size if self.at_end else 0)
        allocated = memory[begin : begin + size]
        allocated[...] = content
        return allocated
