# SPDX-License-Identifier: MIT
"""Fixtures of the backends' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import caches, described
from tests.support.internals import KernelBuild


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Use an empty cache of compiled kernels; return its folder."""
    with caches.separate_cache(tmp_path) as cache:
        yield cache


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[KernelBuild]:
    """Return a list that gets each build loaded for a CPU; builds are not compiled."""
    return described.loads(monkeypatch)
