# SPDX-License-Identifier: MIT
"""Skips the tests marked gpu, with the reason, where there is no GPU."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if needy and (reason := why_no_gpu()):
        for item in needy:
            item.add_marker(pytest.mark.skip(reason=reason))


def why_no_gpu() -> str | None:
    """Say what is missing for a test on a GPU, if anything is."""
    try:
        import cupy
    except ImportError as error:
        return f"needs a GPU and CuPy: {error}"
    try:
        cupy.cuda.runtime.getDevice()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"needs an NVIDIA GPU: {error}"
    return None
