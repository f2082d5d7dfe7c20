# SPDX-License-Identifier: MIT
"""The system's headers, compiled once: to read them is half of what a quick compile takes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from cunorm._cpu import _compile
from tests.emulation.build import unavailable

HEADERS = """#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>
"""
# A macro that is also a name in those headers has to be what it was when they were compiled.
MACROS: tuple[tuple[str, ...], ...] = ((), ("-DWIDTH=0",))


@cache
def headers(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return options that let GCC take the headers as they are compiled with these; else none.

    Where it cannot, as with other options, it reads their text. The processes of a run share them.
    """
    found = _compile.compiler()
    shared = os.environ.get("CUNORM_TEST_HEADERS")
    if unavailable() or shared is None or found is None or "clang" in found.version.lower():
        return ()
    command = (*found.command, *options, *_compile._optional()[0])
    folder = Path(shared, hashlib.sha256("\0".join(command).encode()).hexdigest()[:32])
    if not folder.exists() and not _made(folder, command):
        return ()
    return ("-include", str(folder / "headers.h"))


def _made(folder: Path, command: tuple[str, ...]) -> bool:
    """Compile the headers with each set of macros; return whether the compiler does."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary, "made")
        (made / "headers.h.gch").mkdir(parents=True)
        (made / "headers.h").write_text(HEADERS, encoding="utf-8")
        for number, macros in enumerate(MACROS):
            inputs = ("-x", "c++-header", str(made / "headers.h"))
            output = ("-o", str(made / "headers.h.gch" / str(number)))
            done = subprocess.run([*command, *macros, *inputs, *output], capture_output=True)
            if done.returncode != 0:
                return False
        try:
            made.replace(folder)
        except OSError:  # another process was first
            return folder.exists()
    return True
