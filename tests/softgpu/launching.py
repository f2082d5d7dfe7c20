# SPDX-License-Identifier: MIT
"""Helpers that build and launch small kernels in the software GPU's own tests."""

from __future__ import annotations

import pytest

from tests import softgpu

if not softgpu.is_loaded():
    reason = softgpu.unavailable() or "there is a GPU: the software GPU is not loaded"
    pytest.skip(reason, allow_module_level=True)

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


def kernel(body: str, head: str = ""):
    """Return a kernel: `body` begins with its parameters, `head` stands before its name."""
    return cupy.RawKernel(f'extern "C" __global__ void {head} k({body}', "k")


def launch(body: str, *arguments, grid=1, block=32, shared=0, head="", stream=None) -> None:
    kwargs = {"shared_mem": shared, "stream": stream}
    grid, block = (size if isinstance(size, tuple) else (size,) for size in (grid, block))
    kernel(body, head)(grid, block, arguments, **kwargs)


def raises(text: str):
    return pytest.raises((RuntimeError, TypeError), match=text)
