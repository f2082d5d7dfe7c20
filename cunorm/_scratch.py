# SPDX-License-Identifier: MIT
"""Memory for a while on a CPU: each thread keeps a little, as to allocate it takes longer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cunorm._arrays import CPU, NUMPY, Operand, contiguous_form
from cunorm._dtypes import FLOAT64, DType

_KEPT_BYTES = 1 << 20  # at most, by a thread


class _Kept(threading.local):
    """What the thread keeps, None also while it is in use."""

    operand: Operand | None = None


_kept = _Kept()


@contextmanager
def scratch(size: int, dtype: DType) -> Iterator[Operand]:
    """Lend memory for `size` elements; a signal handler that asks meanwhile gets other memory."""
    needed = -(-size * dtype.itemsize // FLOAT64.itemsize)
    operand, _kept.operand = _kept.operand, None
    if operand is None or operand.form.shape[0] < needed:
        operand = NUMPY.allocate(contiguous_form((needed,), FLOAT64, CPU))
    try:
        yield operand
    finally:
        if operand.form.shape[0] * FLOAT64.itemsize <= _KEPT_BYTES:
            _kept.operand = operand
