# SPDX-License-Identifier: MIT
"""What callers say by themselves, checked once for all who say the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")

Spelled = tuple[Any, type, str] | None


def remembered(check: Callable[..., T]) -> Callable[..., T]:
    """Remember what a function makes of what callers say, which may be wrong or unhashable."""
    cached = lru_cache(maxsize=1024, typed=True)(check)  # 1 is no bool, and True no int

    def checked(*said: object) -> T:
        try:
            return cached(*said)
        except TypeError:  # wrong, or nothing that could be remembered
            pass
        return check(*said)

    return checked


def spelled(number: Any) -> Spelled:
    """Return a number, which may be None, as what is remembered by its type and sign, too.

    0.0 equals -0.0, and 2 a Decimal.
    """
    return None if number is None else (number, type(number), str(number))
