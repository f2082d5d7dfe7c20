# SPDX-License-Identifier: MIT
"""Optimisation levels of CPU builds in tests: O0, or the level in a test's mark `compiled`.

Each level has its own loaded kernels, so that no test runs a build of another level.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.internals import OnceMap, _compile, _compiler, _dispatch, _files, compiler

BUDGET = {"O0": 820, "O1": 4, "O3": 15}  # the most builds of a whole run at each level

# GCC ignores the precompiled form of these headers if it does not fit the other options.
_SYSTEM_HEADERS = (_compile._HOST / "intrinsics.h").read_text("utf-8") + "".join(
    f"#include <{name}>\n"
    for name in ("algorithm", "cmath", "cstring", "pthread.h", "type_traits", "vector")
)

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
    _dispatch.clear_calls()  # cached calls hold kernels of the former level
    _current = level
    # O3 is the shipped level.
    faster = _faster() if level == "O0" else ()
    os.environ["CUNORM_CXXFLAGS"] = "" if level == "O3" else " ".join((f"-{level}", *faster))


def prepare() -> None:
    """Precompile the system's headers for O0: that halves the 0.6 to 0.7 s that a build takes."""
    cxx, headers = compiler(), _headers()
    if cxx is None or not cxx.is_gcc or headers.exists():
        return
    optional = _compiler.optional(cxx, _compile._OPTIONS, headers.parent)
    with _files.temporary(headers) as folder:
        source = folder / "headers.h"
        source.write_text(_SYSTEM_HEADERS)
        command = [*cxx.command, *optional, *_compile._OPTIONS, "-O0", "-x", "c++-header"]
        subprocess.run([*command, source, "-o", f"{source}.gch"], check=True)
        Path(f"{source}.gch").replace(f"{headers}.gch")
        source.replace(headers)


def _faster() -> Iterator[str]:
    """Yield options with which a build takes less time."""
    yield "-pipe"
    if shutil.which("ld.gold"):
        yield "-fuse-ld=gold"
    if _headers().exists():
        yield f"-include {_headers()}"


@cache
def _headers() -> Path:
    digest = _files.digest(compiler(), _compiler.cpu_identity(), _SYSTEM_HEADERS)
    return _files.cache_folder() / f"test-headers-{digest}.h"


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
