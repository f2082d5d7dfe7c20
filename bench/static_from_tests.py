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
    so that there they stay. The tests' folder is no package: pytest puts it on the path, as this
    does for who runs without.
    """
    folder = str(Path(__file__).resolve().parents[1] / "tests")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
