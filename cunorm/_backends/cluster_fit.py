# SPDX-License-Identifier: MIT
"""Whether a GPU, or the part of it that a process has, has room for the clusters of a launch."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from cunorm._core.build import Launch

_NON_PORTABLE_CLUSTER_ALLOWED = 14  # of the driver's function attributes
_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver API, without attributes: the kernel has its cluster's size."""

    _fields_ = (
        ("grid", 3 * ctypes.c_uint),
        ("block", 3 * ctypes.c_uint),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


def allow_large_clusters(cupy: Any, function: Any) -> None:
    """Allow a function of CuPy's clusters of more than 8 blocks."""
    cupy.cuda.driver.funcSetAttribute(function.ptr, _NON_PORTABLE_CLUSTER_ALLOWED, 1)


def clusters_that_fit(function: Any, launch: Launch) -> int:
    """Return the number of clusters of a launch that the current device runs at a time."""
    config = _LaunchConfig(
        grid=(launch.build.cluster, 1, 1), block=(launch.block, 1, 1), shared_memory=launch.shared
    )
    count = ctypes.c_int()
    try:
        query = ctypes.CDLL(_LIBRARY).cuOccupancyMaxActiveClusters
    except (OSError, AttributeError):  # a driver from before there were clusters
        return 0
    refused = query(ctypes.byref(count), ctypes.c_void_p(function.ptr), ctypes.byref(config))
    return 0 if refused else count.value
