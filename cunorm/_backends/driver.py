# SPDX-License-Identifier: MIT
"""Functions of the CUDA driver that CuPy does not wrap.

They need a CUDA context, which a thread may lack. CuPy creates it for launches and loads, and in
``Device.use()``. ``with Device(i)`` creates it only if another device is current.
"""

import ctypes
import struct
import sys
from contextlib import suppress
from typing import Any

from cunorm._core.build import Launch
from cunorm._core.memo import memoize

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_NON_PORTABLE_CLUSTER_ALLOWED = 14  # an attribute of functions
_INVALID_CLUSTER_SIZE = 912  # a status
_MIN_CUDA_FOR_PROGRAMMATIC_LAUNCHES = 12030  # before 12.3, a stream capture refuses them

# CUlaunchConfig of the driver API: grid, block, bytes of shared memory, stream, address and number
# of attributes. The cluster size is no attribute, because it is compiled into the kernel.
_CONFIG = struct.Struct("@3I3IIPPI0P")
# CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, and the value 1.
_PROGRAMMATIC = ctypes.create_string_buffer(struct.pack("@I4xI60x", 6, 1))
_PROGRAMMATIC_ADDRESS = ctypes.addressof(_PROGRAMMATIC)


def library() -> Any:
    """Return the driver's library; OSError if there is none."""
    return _opened(_LIBRARY)


@memoize()
def _opened(path: str) -> ctypes.CDLL:
    opened = ctypes.CDLL(path)
    if hasattr(opened, "cuLaunchKernelEx"):
        opened.cuLaunchKernelEx.argtypes = (ctypes.c_char_p, *3 * (ctypes.c_void_p,))
    return opened


def check(cupy: Any, status: int, what: str) -> None:
    """Raise a RuntimeError that says what the driver failed to do, unless the status is 0."""
    if status:
        error = cupy.cuda.driver.CUDADriverError(status)  # has the status's name
        raise RuntimeError(f"the CUDA driver does not {what}: {error}") from error


def allow_large_clusters(cupy: Any, function: Any) -> None:
    cupy.cuda.driver.funcSetAttribute(function.ptr, _NON_PORTABLE_CLUSTER_ALLOWED, 1)


def clusters_that_fit(cupy: Any, function: Any, launch: Launch) -> int:
    """Return how many clusters the current device, or our partition of it, runs at a time.

    Return 0 if none fits or the driver knows no clusters. Raise other errors: if they meant 0,
    calls would run without clusters, and their results would have other bits.
    """
    blocks = launch.build.cluster
    try:
        query = library().cuOccupancyMaxActiveClusters
    except (OSError, AttributeError):  # a driver from before there were clusters
        return 0
    cupy.cuda.Device().use()
    config = _CONFIG.pack(blocks, 1, 1, launch.block, 1, 1, launch.shared, 0, 0, 0)
    count = ctypes.c_int()
    status = query(ctypes.byref(count), ctypes.c_void_p(function.ptr), config)
    if status == _INVALID_CLUSTER_SIZE:  # larger than this device takes
        return 0
    check(cupy, status, f"say how many clusters of {blocks} blocks fit")
    return count.value


def has_programmatic_launches(cupy: Any) -> bool:
    with suppress(OSError):
        if cupy.cuda.runtime.driverGetVersion() >= _MIN_CUDA_FOR_PROGRAMMATIC_LAUNCHES:
            return hasattr(library(), "cuLaunchKernelEx")
    return False


def launch_dependent(
    cupy: Any, function: Any, launch: Launch, arguments: bytes, stream: int
) -> None:
    """Start a kernel that may begin while the previous launch on the stream still runs.

    CuPy's launches have no attributes. CuPy started the previous launch, so there is a context.
    """
    grid, block = (launch.grid, 1, 1), (launch.block, 1, 1)
    config = _CONFIG.pack(*grid, *block, launch.shared, stream, _PROGRAMMATIC_ADDRESS, 1)
    argument = ctypes.c_char_p(arguments)  # the address of the only argument
    start = library().cuLaunchKernelEx
    status = start(config, function.ptr, ctypes.byref(argument), None)
    check(cupy, status, f"launch {launch.build.kernel}")
