# SPDX-License-Identifier: MIT
"""Where an example computes: by NumPy on the CPU, or by CuPy, with the same calls, on a GPU."""

from __future__ import annotations

import argparse
import ctypes
import platform
from typing import Any

import numpy as np


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Add --device, which `array_module` takes."""
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda if there is a device, else cpu"
    )


def array_module(device: str | None) -> Any:
    """Return NumPy for "cpu" and CuPy for "cuda"; for None, CuPy if there is a device."""
    if device == "cpu":
        return np
    try:
        import cupy

        cupy.cuda.runtime.getDevice()
    except (ImportError, RuntimeError) as error:
        if device == "cuda":
            raise SystemExit(f"--device cuda needs CuPy and an NVIDIA GPU: {error}") from error
        return np
    return cupy


def wait(xp: Any) -> None:
    """Return when everything that was started is done."""
    if xp is not np:
        xp.cuda.runtime.deviceSynchronize()


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next array, as CuPy's pool does on a GPU.

    Else each large array of NumPy comes from the system anew and costs a page fault for each page,
    which may take longer than to write it.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_max = -1, -4
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_max, 0)
