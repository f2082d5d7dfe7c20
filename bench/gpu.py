# SPDX-License-Identifier: MIT
"""CuPy for the scripts on a GPU, also where the software GPU stands in for it."""

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
