# SPDX-License-Identifier: MIT
"""What an example printed: the sentence at the end, and the path of its picture."""

from __future__ import annotations

import re
from pathlib import Path


def figures(printed: str, sentence: str) -> list[float]:
    """Return the numbers of the last line: the groups of the regex that it matches."""
    last = printed.splitlines()[-1]
    found = re.fullmatch(sentence, last)
    assert found, last
    return [float(group) for group in found.groups() if group is not None]


def shows_picture(printed: str, path: str | Path, folder: str | Path = "") -> bool:
    """Return whether the last line but one is a path, relative to a folder, of a PNG."""
    assert printed.splitlines()[-2] == f"picture: {path}"
    return Path(folder, path).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
