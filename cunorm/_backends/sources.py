# SPDX-License-Identifier: MIT
"""The source text of kernels: local includes are inlined, because CuPy's cache ignores headers."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from cunorm._core.memo import memoize

_LOCAL_INCLUDE = re.compile(r'^#include "([^"]+)"$')


@cache
def kernel_folder() -> Path:
    """Return the folder of the `.cu` files: in the package if it is installed, else beside it."""
    here = Path(__file__).parent.parent
    for folder in (here / "kernels_cu", here.parent / "kernels_cu"):
        if (folder / "row.cuh").is_file():
            return folder
    raise FileNotFoundError(f"cunorm: no kernels_cu folder in or beside {here}; reinstall cunorm")


@memoize(maxsize=64)
def source_text(kernel: str, include: tuple[Path, ...] = ()) -> str:
    """Return the text of `kernel` with local includes inlined; search `include` first."""
    seen: set[Path] = set()
    return "\n".join(_inlined(f"{kernel}.cu", (*include, kernel_folder()), seen)) + "\n"


def _inlined(name: str, folders: tuple[Path, ...], seen: set[Path]) -> list[str]:
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"cunorm: {name} is in none of {', '.join(map(str, folders))}")
    if path in seen:
        return []
    seen.add(path)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        include = _LOCAL_INCLUDE.match(line)
        if include:
            lines += [*_inlined(include[1], folders, seen), f'#line {number + 1} "{name}"']
        else:
            lines.append("" if line == "#pragma once" else line)
    return lines


def error_lines(log: Iterable[str]) -> list[str]:
    """Return a log's first lines with "error", or its first lines if no line contains that."""
    lines = [f"  {line}" for line in log if line.strip()]
    return ([line for line in lines if "error" in line] or lines)[:8]
