# SPDX-License-Identifier: MIT
"""Bounded caches of functions, and maps of values that are loaded once. `clear_all` empties all."""

import os
from collections.abc import Callable, Hashable
from functools import lru_cache
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_clears: list[Callable[[], object]] = []
on_clear: Callable[[Callable[[], object]], None] = _clears.append  # `clear_all` calls the argument


def clear_all() -> None:
    for clear in _clears:
        clear()


def memoize(maxsize: int = 1024, *, typed: bool = False) -> Callable[[Callable[..., T]], Any]:
    """Return a decorator like `functools.lru_cache`; `clear_all` empties its cache."""

    def decorate(function: Callable[..., T]) -> Any:
        cached = lru_cache(maxsize, typed)(function)
        on_clear(cached.cache_clear)
        return cached

    return decorate


def typed_key(number: Any) -> tuple[Any, type, str] | None:
    """Return a key that also tells equal numbers apart by type and sign: 0.0, -0.0, Decimal(0)."""
    return None if number is None else (number, type(number), str(number))


def axis_key(axis: Any) -> Any:
    """Return an axis or, if it is no int, a key that also tells the items of tuples apart by type.

    `axis_of` returns the axis.
    """
    if type(axis) is int:
        return axis
    is_several = isinstance(axis, tuple | list)
    items = tuple(axis) if is_several else (axis,)
    return (items if is_several else axis, *(str(type(item)) for item in items))


def axis_of(key: Any) -> Any:
    return key if type(key) is int else key[0]


class OnceMap(Generic[K, V]):
    """A map of values; the first thread that needs a value loads it for the process."""

    def __init__(self) -> None:
        self.values: dict[K, V] = {}
        self._loading: dict[K, Lock] = {}
        on_clear(self.clear)
        if hasattr(os, "register_at_fork"):
            # A forked child does not have the threads that would release these locks.
            os.register_at_fork(after_in_child=self._loading.clear)

    def load_once(self, key: K, load: Callable[[], tuple[V, bool]]) -> tuple[V, bool]:
        """Return a value and a flag: that of `load`, or False if the value was already there."""
        try:
            with self._loading.setdefault(key, Lock()):
                values = self.values  # clear() replaces this dict
                value = values.get(key)
                if value is not None:
                    return value, False
                value, flag = load()
                values[key] = value
                return value, flag
        finally:
            self._loading.pop(key, None)  # threads that wait for this lock find the value

    def clear(self) -> None:
        """Forget all values, also values that other threads are loading now."""
        self.values = {}
