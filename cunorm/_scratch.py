# SPDX-License-Identifier: MIT
"""Memory for a while on a CPU: some MiB are kept, as to allocate them takes longer."""

from __future__ import annotations

from cunorm._arrays import CPU, NUMPY, Operand, contiguous_form
from cunorm._cpu import Kernels, Pointers
from cunorm._dtypes import FLOAT64

_LARGEST = 1 << 20  # elements that are kept in one piece
_PIECES = 4

_kept: list[Operand] = []  # to take and to put back is one step each, whatever interrupts


def lend(size: int) -> Operand:
    """Lend memory for `size` bytes."""
    needed = -(-size // FLOAT64.itemsize)
    try:
        operand = _kept.pop()
    except IndexError:
        operand = None
    if operand is None or operand.form.shape[0] < needed:
        operand = NUMPY.allocate(contiguous_form((needed,), FLOAT64, CPU))
    return operand


def take_back(operand: Operand) -> None:
    """Take back what was lent."""
    if operand.form.shape[0] <= _LARGEST and len(_kept) < _PIECES:
        _kept.append(operand)


def lent(size: int, kernels: Kernels) -> Kernels:
    """Lend kernels memory, if they need some, whose address they take last, where that is 0."""
    if not size:
        return kernels

    def run(pointers: Pointers) -> None:
        if pointers[-1]:
            kernels(pointers)
            return
        memory = lend(size)
        try:
            kernels([*pointers[:-1], memory.pointer])
        finally:
            take_back(memory)

    return run
