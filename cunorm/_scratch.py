# SPDX-License-Identifier: MIT
"""Memory for a while on a CPU: each thread keeps a little, as to allocate it takes longer."""

from __future__ import annotations

import threading

from cunorm._arrays import CPU, NUMPY, Operand, contiguous_form
from cunorm._dtypes import FLOAT64

_KEPT = 1 << 17  # elements at most, by a thread


class _Kept(threading.local):
    """What the thread keeps, None also while it is in use."""

    operand: Operand | None = None


_kept = _Kept()


def lend(size: int) -> Operand:
    """Lend memory for `size` bytes; a signal handler that asks meanwhile gets other memory."""
    needed = -(-size // FLOAT64.itemsize)
    operand, _kept.operand = _kept.operand, None
    if operand is None or operand.form.shape[0] < needed:
        operand = NUMPY.allocate(contiguous_form((needed,), FLOAT64, CPU))
    return operand


def take_back(operand: Operand) -> None:
    """Take back what was lent."""
    if operand.form.shape[0] <= _KEPT:
        _kept.operand = operand
