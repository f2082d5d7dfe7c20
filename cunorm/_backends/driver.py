# SPDX-License-Identifier: MIT
"""The CUDA driver's own functions, where CuPy has none for them.

They need a context, which a thread may lack, autograd's for one: CuPy makes it for a launch and a
load, and ``with Device(i)`` makes none where that device is the current one. ``use()`` does.
"""

import ctypes
import sys
from functools import cache
from typing import Any

from cunorm._core.build import Launch

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_NON_PORTABLE_CLUSTER_ALLOWED = 14  # of a function's attributes
_INVALID_CLUSTER_SIZE = 912  # of its statuses


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver API, without attributes: the kernel has its cluster's size."""

    _fields_ = (
        ("grid", 3 * ctypes.c_uint),
        ("block", 3 * ctypes.c_uint),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


def library() -> ctypes.CDLL:
    """Return the driver's library; OSError if there is none."""
    return _opened(_LIBRARY)


@cache
def _opened(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


def check(cupy: Any, status: int, what: str) -> None:
    """Raise a RuntimeError that says what the driver does not do, unless a status is 0."""
    if status:
        error = cupy.cuda.driver.CUDADriverError(status)  # it knows the status' name
        raise RuntimeError(f"the CUDA driver does not {what}: {error}") from error


def allow_large_clusters(cupy: Any, function: Any) -> None:
    cupy.cuda.driver.funcSetAttribute(function.ptr, _NON_PORTABLE_CLUSTER_ALLOWED, 1)


def clusters_that_fit(cupy: Any, function: Any, launch: Launch) -> int:
    """Return the number of clusters that the current device, or our part of it, runs at a time.

    Any other error than that there is no room is raised: without clusters results have other bits.
    """
    blocks = launch.build.cluster
    try:
        query = library().cuOccupancyMaxActiveClusters
    except (OSError, AttributeError):  # a driver from before there were clusters
        return 0
    cupy.cuda.Device().use()
    config = LaunchConfig((blocks, 1, 1), (launch.block, 1, 1), launch.shared)
    count = ctypes.c_int()
    status = query(ctypes.byref(count), ctypes.c_void_p(function.ptr), ctypes.byref(config))
    if status == _INVALID_CLUSTER_SIZE:  # larger than this device takes
        return 0
    check(cupy, status, f"say how many clusters of {blocks} blocks fit")
    return count.value
