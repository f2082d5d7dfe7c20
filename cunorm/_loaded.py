# SPDX-License-Identifier: MIT
"""What a process has loaded, each once, whoever asks for it at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from threading import Lock
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_LIMIT = 1024  # results that a `Cached` keeps


class Loaded(Generic[K, V]):
    """Values by key; of threads that ask for one at once, the first loads it."""

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self._loading: dict[K, Lock] = {}
        if hasattr(os, "register_at_fork"):
            # No thread of a forked child would release a lock that another thread of its parent
            # held.
            os.register_at_fork(after_in_child=self._loading.clear)

    def get(self, key: K) -> V | None:
        """Return a value, None where it is not loaded."""
        return self._values.get(key)

    def ready(self, key: K, load: Callable[[], tuple[V, bool]]) -> tuple[V, bool]:
        """Return a value, and what `load` said beside it, False where it was loaded before."""
        with self._loading.setdefault(key, Lock()):
            values = self._values  # forget() puts another in its place
            value = values.get(key)
            if value is not None:
                return value, False
            value, said = load()
            values[key] = value
            return value, said

    def forget(self) -> None:
        """Let everything be loaded anew; what is being loaded is forgotten too."""
        self._values = {}

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[K]:
        return iter(tuple(self._values))


class Cached(Generic[V]):
    """A function with an `lru_cache`; `cache_clear` drops what is being made, too.

    An `lru_cache` would keep that, though it was made of what is forgotten.
    """

    def __init__(self, function: Callable[..., V]) -> None:
        self.__wrapped__ = function
        self.cache_clear()

    def __call__(self, *arguments: Hashable) -> V:
        """Return what the function made of the arguments, now or before."""
        return self._cached(*arguments)

    def cache_clear(self) -> None:
        """Let everything be made anew."""
        self._cached = lru_cache(maxsize=_LIMIT)(self.__wrapped__)

    def cache_info(self) -> Any:
        """Return what `lru_cache` says of itself."""
        return self._cached.cache_info()
