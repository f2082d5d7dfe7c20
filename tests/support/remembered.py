# SPDX-License-Identifier: MIT
"""All that cunorm remembers of calls and plans, which a test can have it forget."""

from __future__ import annotations

import gc
from functools import _lru_cache_wrapper
from inspect import signature
from typing import Any

from tests.support import internals  # noqa: F401  # imports the modules whose caches these are


def caches() -> list[Any]:
    """Return every function of cunorm's that remembers what it made of its arguments."""
    found = [one for one in gc.get_objects() if type(one) is _lru_cache_wrapper]
    ours = [one for one in found if str(one.__wrapped__.__module__).startswith("cunorm")]
    return [one for one in ours if signature(one.__wrapped__).parameters]


def clear_plans() -> None:
    """Have calls checked and planned anew; kernels stay loaded."""
    for one in caches():
        one.cache_clear()
