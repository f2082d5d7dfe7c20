# SPDX-License-Identifier: MIT
"""What the tests of memory and of cached calls share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.calls import empty_call_cache
from tests.support.internals import _dispatch


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Empty the cache of calls; return a list that gets the arguments of each planned call."""
    empty_call_cache(monkeypatch)
    calls: list[Any] = []
    plan = _dispatch._planned
    monkeypatch.setattr(_dispatch, "_planned", lambda *given: calls.append(given) or plan(*given))
    return calls
