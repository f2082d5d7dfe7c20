# SPDX-License-Identifier: MIT
"""Arguments of kernels that are made once, and into which addresses of arrays are added later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

WORD = 8  # bytes, of which all arguments are multiples

Pointers = Sequence[int]  # of arrays in the order of a call's, 0 for none
Kernels = Callable[[Pointers], object]  # runs all that a call launches


class Place(NamedTuple):
    """A word of the arguments, and the array whose address is a summand of it."""

    word: int
    array: int


def template(
    arguments: Callable[[Pointers], bytes], arrays: int
) -> tuple[bytes, tuple[Place, ...]]:
    """Return the arguments of arrays at 0, and where addresses are to be added.

    `arguments` must be a sum: in each word the address of at most one array is a summand.
    """
    plain = arguments([0] * arrays)
    places = [
        Place(word, array)
        for array in range(arrays)
        for word in _differing(plain, arguments([int(i == array) for i in range(arrays)]))
    ]
    return plain, tuple(places)


def _differing(a: bytes, b: bytes) -> list[int]:
    """Return which words differ."""
    words = zip(memoryview(a).cast("q"), memoryview(b).cast("q"), strict=True)
    return [place for place, (one, other) in enumerate(words) if one != other]
