# SPDX-License-Identifier: MIT
"""What the tests have and `python -m bench static` and `bytes` use as well."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


def from_tests(name: str) -> ModuleType:
    """Import a module of the tests.

    The emulator and the reader of ptxas's account are tested there and used by tests most of all,
    so that there they stay. They are not installed, so the source tree has to be on the path.
    """
    folder = str(Path(__file__).resolve().parents[1])
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(f"tests.{name}")
