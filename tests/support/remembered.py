# SPDX-License-Identifier: MIT
"""The caches of cunorm's calls and plans, and a way to clear them."""

from __future__ import annotations

import gc
from functools import _lru_cache_wrapper
from inspect import signature
from typing import Any

from tests.support import internals  # noqa: F401  # imports the modules with these caches


def caches() -> list[Any]:
    """Return every memoized function of cunorm that takes arguments."""
    found = [one for one in gc.get_objects() if type(one) is _lru_cache_wrapper]
    ours = [one for one in found if str(one.__wrapped__.__module__).startswith("cunorm")]
    return [one for one in ours if signature(one.__wrapped__).parameters]


def clear_plans() -> None:
    """Clear cached calls and plans; kernels stay loaded."""
    for one in caches():
        one.cache_clear()
