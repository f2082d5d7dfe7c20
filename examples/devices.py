# SPDX-License-Identifier: MIT
"""The device of an example: of PyTorch or JAX, or NumPy on the CPU and CuPy on a GPU."""

from __future__ import annotations

import argparse
import ctypes
import platform
from typing import Any

import numpy as np


def array_module(device: str | None) -> Any:
    """Return NumPy for "cpu" and CuPy for "cuda"; for None, CuPy if there is a GPU."""
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


def torch_device(parser: argparse.ArgumentParser, wanted: str | None) -> str:
    """Return the device that --device names, or PyTorch's default device."""
    import torch

    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        parser.error("--device cuda needs a PyTorch with CUDA and an NVIDIA GPU")
    return wanted or ("cuda" if there else "cpu")


def jax_device(parser: argparse.ArgumentParser, wanted: str | None) -> Any:
    """Return the device that --device names, or JAX's default device."""
    import jax

    try:
        there = "cuda" if jax.default_backend() == "gpu" else "cpu"
        return jax.devices(wanted or there)[0]
    except RuntimeError as error:
        parser.error(f"--device {wanted}: {error}")


def wait(xp: Any) -> None:
    """Wait until all work on the device is done."""
    if xp is not np:
        xp.cuda.runtime.deviceSynchronize()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next array, as CuPy's pool does on a GPU.

    Otherwise each large NumPy array costs a page fault for each page, which may take longer than
    writing the array.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_max = -1, -4
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_max, 0)
