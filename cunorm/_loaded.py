# SPDX-License-Identifier: MIT
"""What a process has loaded, each once, whoever asks for it at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


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
