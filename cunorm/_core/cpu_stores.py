# SPDX-License-Identifier: MIT
"""Stores past a CPU's caches, of both families."""

from __future__ import annotations

from cunorm._core.build import Macros
from cunorm._core.caps import CpuCaps
from cunorm._core.dtypes import FLOAT64, DType

# Stores past a CPU's caches pay, even if the result is read next, where rows are whole cache lines
# and the result has this share of the last cache, by the bytes of an element (of two, a store is
# half a line; of eight there are none), or this many bytes. Measured with two cores and 32 MiB of
# cache, and with 480 MiB.
_LARGE_SHARE, _LARGE_RESULT, _CACHE_LINE = {4: 4, 2: 2}, 32 << 20, 64


def cpu_stores(elements: int, row: int, result: DType, compute: DType, caps: CpuCaps) -> Macros:
    """Return the macro that sends stores past the caches, for large outputs of whole lines."""
    itemsize = result.itemsize
    share = _LARGE_SHARE.get(itemsize)
    if share is None or compute is FLOAT64 or row * itemsize % _CACHE_LINE:
        return ()
    large = min(_LARGE_RESULT, caps.last_cache_bytes // share)
    return (("NON_TEMPORAL", "true"),) if elements * itemsize >= large else ()
