# SPDX-License-Identifier: MIT
"""Optimisation levels of CPU builds in tests: O0, unless a test is marked `compiled`.

Each level has its own loaded kernels, so that no test runs a build of another level.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from tests.support.internals import OnceMap, _compile, _dispatch

BUDGET = {"O0": 720, "O1": 5, "O3": 31}  # builds of a whole run at each level

builds: set[tuple[str, str]] = set()  # levels and builds of this process
_current = "O3"
_stored: dict[str, OnceMap] = {}


def use(level: str) -> None:
    """Compile at a level from now on, in this process and its children."""
    global _current
    if level == _current:
        return
    _stored[_current] = _compile.loaded
    _compile.loaded = _stored.get(level) or OnceMap()
    _dispatch.clear_calls()  # its calls hold kernels of the former level
    _current = level
    os.environ["CUNORM_CXXFLAGS"] = "" if level == "O3" else f"-{level}"  # O3 is the shipped level


def prepare() -> None:
    """Compile the system's headers for most tests, which else compile many builds without them."""
    use("O0")
    _compile.prepare_headers()


def count_builds() -> None:
    """Record each build that is loaded, with its level."""
    load = _compile._load

    def load_and_record(build: Any) -> Any:
        builds.add((_current, str(build)))
        return load(build)

    _compile._load = load_and_record


def account(found: set[tuple[str, str]]) -> tuple[str, bool]:
    """Return a text about the builds of each level, and whether they are within the budget."""
    counts = Counter(level for level, _ in found)
    text = ", ".join(f"{counts[level]} at -{level} (of {most})" for level, most in BUDGET.items())
    return f"CPU builds: {text}", all(counts[level] <= most for level, most in BUDGET.items())
