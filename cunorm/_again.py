# SPDX-License-Identifier: MIT
"""Calls that are made again: their kernels run at once, nothing is checked or planned anew.

What a call on NumPy arrays does follows from what its caller said, and from the address, shape,
strides, dtype and writability of each array. So a call that allocated and copied nothing, as with
`out=` and `workspace=`, runs the same kernels with the same arguments when all of that comes again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cunorm._arrays import data_pointer

_LIMIT = 1024  # calls that are remembered
_TYPES = frozenset({np.ndarray, type(None)})

Kernels = Callable[[], object]  # runs all that a call launches
# An array's address, shape, strides and dtype, and whether it may be written to.
Facts = tuple[int, tuple[int, ...], tuple[int, ...], np.dtype[Any], bool]


class Key(NamedTuple):
    """All that a call follows from."""

    asked: object  # the same one for all who say the same
    numbers: bytes
    arrays: tuple[Facts | None, ...]  # inputs, results, memory for partial sums


class Ran(NamedTuple):
    """Kernels that ran, and where their arrays lie, in the order of a key's; 0 for none."""

    pointers: tuple[int, ...]
    kernels: Kernels


_known: dict[Key, Kernels] = {}


def key_of(asked: object, numbers: bytes, arrays: tuple[Any, ...]) -> Key | None:
    """Return what a call follows from, None where it has arrays that are not NumPy's."""
    if not _TYPES.issuperset(map(type, arrays)):
        return None
    facts = [None if array is None else _facts(array) for array in arrays]
    return Key(asked, numbers, tuple(facts))


def _facts(array: np.ndarray[Any, Any]) -> Facts:
    return data_pointer(array), array.shape, array.strides, array.dtype, array.flags.writeable


def ran_again(key: Key | None) -> bool:
    """Run the kernels of a call that is remembered; return whether it is."""
    kernels = None if key is None else _known.get(key)
    if kernels is None:
        return False
    kernels()
    return True


def remember(key: Key | None, ran: Ran | None) -> None:
    """Remember what a call ran, where that was on its own arrays and no others."""
    if key is None or ran is None:
        return
    if ran.pointers == tuple([0 if facts is None else facts[0] for facts in key.arrays]):
        if len(_known) >= _LIMIT:
            _known.clear()
        _known[key] = ran.kernels


def forget() -> None:
    """Let the next call of every kind be checked and planned anew."""
    _known.clear()
