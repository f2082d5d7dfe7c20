# SPDX-License-Identifier: MIT
"""Checks of an example's output: the sentence at its end, and the path of its picture."""

from __future__ import annotations

import re
from pathlib import Path


def figures(printed: str, sentence: str) -> list[float]:
    """Match the last line with a regex, and return the groups as numbers."""
    last = printed.splitlines()[-1]
    found = re.fullmatch(sentence, last)
    assert found, last
    return [float(group) for group in found.groups() if group is not None]


def shows_picture(printed: str, path: str | Path, folder: str | Path = "") -> bool:
    """Check that the line before the last names a path; return whether a PNG is there."""
    assert printed.splitlines()[-2] == f"picture: {path}"
    return Path(folder, path).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
