# SPDX-License-Identifier: MIT
"""A map of what a process has loaded, each value once, by one of the threads that need it."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from threading import Lock
from typing import Generic, TypeVar

from cunorm._core.memo import on_clear

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class OnceMap(Generic[K, V]):
    """Values by key; of threads that need one at once, the first loads it."""

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        self._loading: dict[K, Lock] = {}
        on_clear(self.clear)
        if hasattr(os, "register_at_fork"):
            # A forked child has no thread to release a lock that one of its parent's held.
            os.register_at_fork(after_in_child=self._loading.clear)

    def get(self, key: K) -> V | None:
        """Return a value, None where it is not loaded."""
        return self._values.get(key)

    def load_once(self, key: K, load: Callable[[], tuple[V, bool]]) -> tuple[V, bool]:
        """Return a value, and the flag of `load`, False where it was loaded before."""
        try:
            with self._loading.setdefault(key, Lock()):
                values = self._values  # clear() puts another in its place
                value = values.get(key)
                if value is not None:
                    return value, False
                value, flag = load()
                values[key] = value
                return value, flag
        finally:
            self._loading.pop(key, None)  # a thread that waits for this lock finds the value

    def clear(self) -> None:
        """Load everything anew from now on; what is being loaded is not kept."""
        self._values = {}

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[K]:
        return iter(tuple(self._values))
