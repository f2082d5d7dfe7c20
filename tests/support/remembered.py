# SPDX-License-Identifier: MIT
"""The caches of cunorm's calls and plans, and a way to clear them."""

from __future__ import annotations

import gc
import sys
from functools import _lru_cache_wrapper, lru_cache, partial
from inspect import signature
from typing import Any

from tests.support import internals  # noqa: F401  # imports the modules with these caches


def caches() -> list[Any]:
    """Return every memoized function of cunorm that takes arguments."""
    found = [one for one in gc.get_objects() if type(one) is _lru_cache_wrapper]
    return [one for one in found if name(one).startswith("cunorm") and signature(one).parameters]


def name(cache: Any) -> str:
    """Return the name of a memoized function; a partial has its function's name."""
    function = cache.__wrapped__
    if isinstance(function, partial):
        function = function.func
    return f"{function.__module__}.{function.__qualname__}"


@lru_cache(maxsize=1)
def _caches_of(modules: int) -> list[Any]:
    """Return the caches, searched again only if the number of imported modules has changed."""
    return caches()


def clear_plans() -> None:
    """Clear cached calls and plans; kernels stay loaded."""
    for one in _caches_of(sum(name.startswith("cunorm") for name in sys.modules)):
        one.cache_clear()
