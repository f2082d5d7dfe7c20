# SPDX-License-Identifier: MIT
"""The list of mistakes is one of the source as it is."""

from __future__ import annotations

from tests.tooling import breakages


def test_what_is_broken_stands_once_in_its_file():
    for one in breakages.breakages():
        one.broken((breakages.ROOT / one.file).read_text("utf-8"))  # else a ValueError
