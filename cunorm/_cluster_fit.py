# SPDX-License-Identifier: MIT
"""Clusters of more blocks than every GPU with clusters takes, for which a GPU may have no room."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_NON_PORTABLE_CLUSTER_ALLOWED = 14  # of the driver's function attributes
_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver API, without attributes: the kernel says its cluster."""

    _fields_ = (
        ("grid", 3 * ctypes.c_uint),
        ("block", 3 * ctypes.c_uint),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


def allow_large_clusters(cupy: Any, kernel: Any) -> None:
    """Let a kernel of `cupy.RawKernel` have clusters of more than 8 blocks."""
    cupy.cuda.driver.funcSetAttribute(kernel.kernel.ptr, _NON_PORTABLE_CLUSTER_ALLOWED, 1)


def clusters_that_fit(kernel: Any, blocks: int, threads: int) -> int:
    """Return how many clusters of a kernel the current device runs at a time; 0: none."""
    config = _LaunchConfig(grid=(blocks, 1, 1), block=(threads, 1, 1))
    count = ctypes.c_int()
    try:
        ask = ctypes.CDLL(_LIBRARY).cuOccupancyMaxActiveClusters
    except (OSError, AttributeError):  # a driver from before there were clusters
        return 0
    refused = ask(ctypes.byref(count), ctypes.c_void_p(kernel.kernel.ptr), ctypes.byref(config))
    return 0 if refused else count.value
