# SPDX-License-Identifier: MIT
"""What tests of the backends share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import caches, described
from tests.support.internals import KernelBuild


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Have an empty cache of compiled kernels."""
    with caches.separate_cache(tmp_path) as cache:
        yield cache


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[KernelBuild]:
    """List what is loaded for a CPU, and compile nothing."""
    return described.loads(monkeypatch)
