# SPDX-License-Identifier: MIT
"""How tests compile for a CPU: without optimisation, unless a test is marked `compiled`.

Each level has its own loaded kernels, so that a test never runs what another level compiled.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from cunorm import _again, _backend
from cunorm._cpu import _compile
from cunorm._loaded import Cached, Loaded
from cunorm.group_norm import _run

BUDGET = {"O0": 590, "O1": 80, "O3": 34}  # builds of a whole run at each level
_KERNELS = [
    (_backend, "cpu_forward_kernels"),
    (_backend, "cpu_backward_kernels"),
    (_run, "cpu_kernels"),
]

builds: set[tuple[str, str]] = set()  # a level, and what was built at it in this process
_current = "O3"
_kept: dict[str, list[tuple[Any, str, Any]]] = {}


def use(level: str) -> None:
    """Compile at a level from now on, here and in processes that are started."""
    global _current
    if level == _current:
        return
    _kept[_current] = [(module, name, getattr(module, name)) for module, name in _places()]
    for module, name, value in _kept.get(level) or _fresh():
        setattr(module, name, value)
    _current = level
    os.environ["CUNORM_CXXFLAGS"] = "" if level == "O3" else f"-{level}"  # O3 is as shipped


def count_builds() -> None:
    """Note each build that is loaded, and the level that it has."""
    load = _compile._load

    def noted(build: Any) -> Any:
        builds.add((_current, str(build)))
        return load(build)

    _compile._load = noted


def account(found: set[tuple[str, str]]) -> tuple[str, bool]:
    """Return the builds of each level and what they may be, and whether they are within that."""
    counts = Counter(level for level, _ in found)
    text = ", ".join(f"{counts[level]} at -{level} (of {most})" for level, most in BUDGET.items())
    return f"CPU builds: {text}", all(counts[level] <= most for level, most in BUDGET.items())


def _places() -> list[tuple[Any, str]]:
    return [(_compile, "_loaded"), (_again, "_known"), *_KERNELS]


def _fresh() -> list[tuple[Any, str, Any]]:
    kernels = [
        (module, name, Cached(getattr(module, name).__wrapped__)) for module, name in _KERNELS
    ]
    return [(_compile, "_loaded", Loaded()), (_again, "_known", {}), *kernels]
