# SPDX-License-Identifier: MIT
"""CuPy for the scripts that run on a GPU or on the software GPU."""

from __future__ import annotations

import os
from typing import Any


def cupy() -> Any:
    """Return CuPy; ImportError without it. The software GPU also gets a clock."""
    import cupy

    if "SOFTGPU_LIBRARY" in os.environ:
        from tests.softgpu import clock

        clock.add_to(cupy)
    return cupy
