# SPDX-License-Identifier: MIT
"""The software GPU: a CUDA driver that interprets PTX, and a stand-in for CuPy on top of it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from .building import folder, library, nvrtc, unavailable

__all__ = ["is_loaded", "load", "real_gpu", "settings", "subprocess_environment", "unavailable"]

STANDIN = str(Path(__file__).parent / "standin")


def real_gpu() -> bool:
    """Return whether the NVIDIA driver has a device; call this before `load`."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    is_on = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return is_on and count.value > 0


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Load the library, and compile it if necessary; `import cupy` then imports the stand-in."""
    if reason := unavailable():
        raise RuntimeError(reason)
    paths = {
        "SOFTGPU_LIBRARY": library(),
        "SOFTGPU_NVRTC": nvrtc(),
        "SOFTGPU_PTX": os.environ.get("SOFTGPU_PTX", folder() / "ptx"),
    }
    os.environ.update({name: str(path) for name, path in paths.items()})
    if STANDIN not in sys.path:
        sys.path.insert(0, STANDIN)
    loaded = ctypes.CDLL(os.environ["SOFTGPU_LIBRARY"])
    loaded.softgpu_settings.restype = loaded.softgpu_error.restype = ctypes.c_char_p
    return loaded


def is_loaded() -> bool:
    """Return whether `cupy` is the stand-in in this process."""
    return STANDIN in sys.path


def subprocess_environment() -> dict[str, str]:
    """Return environment variables that make another process use this software GPU."""
    load()
    paths = [STANDIN, os.environ.get("PYTHONPATH", "")]
    names = ("SOFTGPU_LIBRARY", "SOFTGPU_NVRTC", "SOFTGPU_PTX")
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SOFTGPU_SETTINGS": load().softgpu_settings().decode(),
        **{name: os.environ[name] for name in names},
    }


@contextmanager
def settings(**values: object) -> Iterator[None]:
    """Change settings of the software GPU within the block; README.md lists them.

    Work queued before the block runs with the former settings.
    """
    _finish()
    before = load().softgpu_settings()
    text = ",".join(f"{name}={value}" for name, value in values.items())
    try:
        if not load().softgpu_set(text.encode()):
            raise ValueError(f"the software GPU has no setting {text}")
        yield
        _finish()
    finally:
        load().softgpu_finish()
        load().softgpu_set(before)


def _finish() -> None:
    if load().softgpu_finish():
        raise RuntimeError(load().softgpu_error().decode())
