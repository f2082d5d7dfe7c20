# SPDX-License-Identifier: MIT
"""Bounded caches of functions, all emptied by one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")

TypedKey = tuple[Any, type, str] | None

_clears: list[Callable[[], object]] = []
on_clear: Callable[[Callable[[], object]], None] = _clears.append  # for `clear_all` to call


def clear_all() -> None:
    """Empty every cache of calls and kernels."""
    for clear in _clears:
        clear()


def memoize(maxsize: int = 1024, *, typed: bool = False) -> Callable[[Callable[..., T]], Any]:
    """Return a decorator like `functools.lru_cache`, whose cache `clear_all` empties."""

    def decorate(function: Callable[..., T]) -> Any:
        cached = lru_cache(maxsize, typed)(function)
        on_clear(cached.cache_clear)
        return cached

    return decorate


def typed_key(number: Any) -> TypedKey:
    """Return a number or None with its type and sign, as 0.0 equals -0.0 and Decimals."""
    return None if number is None else (number, type(number), str(number))
