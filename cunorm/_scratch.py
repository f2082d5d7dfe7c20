# SPDX-License-Identifier: MIT
"""Memory for a while on a CPU: each thread keeps a little, as to allocate it takes longer."""

from __future__ import annotations

import threading

from cunorm._arrays import CPU, NUMPY, Operand, contiguous_form
from cunorm._dtypes import FLOAT64, DType

_KEPT_BYTES = 1 << 20  # at most, by a thread


class _Kept(threading.local):
    """What the thread keeps."""

    operand: Operand | None = None


_kept = _Kept()


def scratch(size: int, dtype: DType) -> Operand:
    """Return memory for `size` elements, good until the thread asks again."""
    needed = -(-size * dtype.itemsize // FLOAT64.itemsize)
    operand = _kept.operand
    if operand is not None and operand.form.shape[0] >= needed:
        return operand
    operand = NUMPY.allocate(contiguous_form((needed,), FLOAT64, CPU))
    if needed * FLOAT64.itemsize <= _KEPT_BYTES:
        _kept.operand = operand
    return operand
