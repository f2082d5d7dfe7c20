# SPDX-License-Identifier: MIT
"""Calls that are made again: their kernels run at once, nothing is checked or planned anew.

What a call does follows from what its caller said, and from the shape, strides, dtype, device and
alignment of each array; where memory is given for results, from where all of them lie, too, as they
may not overlap. When that comes again, so does what it did: results of the same forms are made, and
the same kernels run, on a GPU on the stream that is current then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from cunorm._arguments import Kernels, Pointers
from cunorm._arrays import Framework, Operand, framework_of

_LIMIT = 1024  # calls that are remembered

Key = tuple[Hashable, ...]


class Call(NamedTuple):
    """A call that was not made before, as far as it can be told from its arrays."""

    key: Key
    facts: Sequence[Any]
    framework: Framework
    pointers: Pointers
    known: dict[Key, _Known]  # of its time: another after `forget`


class Ran(NamedTuple):
    """Kernels that ran, and where their arrays were."""

    pointers: Pointers
    kernels: Kernels


class Made(NamedTuple):
    """A result that a call makes: its place, what makes it, and of which array it is given."""

    place: int
    make: Callable[[Any], Any]
    like: int


class _Known(NamedTuple):
    facts: Sequence[Any]
    made: tuple[Made, ...]
    kernels: Kernels
    pointer_of: Callable[[Any], int]


_known: dict[Key, _Known] = {}


def run_again(
    asked: Hashable, numbers: Hashable, arrays: tuple[Any, ...], first_result: int, results: int
) -> tuple[Call | None, list[Any] | None]:
    """Make a call again, and return its results; or the call, where it was not made before.

    `arrays` are inputs, then an array or None for each of the results, and for a workspace. Neither
    is returned for a call that is not to be remembered, as the first on a type of array.
    """
    framework = framework_of(arrays[0])
    if framework is None:
        return None, None
    found = framework.call(asked, numbers, arrays, first_result)
    if found is not None:
        return None, found
    recognised = framework.recognise(arrays)
    if recognised is None:
        return None, None
    facts, pointers = recognised
    given = any(pointers[first_result:])
    key = (asked, numbers, *(pointers if given else facts))
    known = _known.get(key)
    if given and known is not None and known.facts != facts:  # quicker than as a part of the key
        key = (*key, *facts)
        known = _known.get(key)
    if known is None:
        return Call(key, facts, framework, tuple(pointers), _known), None
    _, made, kernels, pointer_of = known
    results_given = arrays[first_result : first_result + results]
    found = [*results_given]
    for place, make, like in made:
        array = found[place - first_result] = make(arrays[like])
        pointers[place] = pointer_of(array)
    kernels(pointers)
    if given:
        framework.mark_changed(results_given)
    return None, found


def run(kernels: Kernels, pointers: Pointers) -> Ran:
    """Run the kernels of a call that was not made before."""
    kernels(pointers)
    return Ran(pointers, kernels)


def remember(
    call: Call | None, ran: Ran | None, operands: Sequence[Operand | None], made: Sequence[int]
) -> None:
    """Remember what a call ran, where that was on its own arrays; `made` are places of results."""
    if call is None or ran is None:
        return
    if any(its and its != used for its, used in zip(call.pointers, ran.pointers, strict=True)):
        return
    known = call.known
    if len(known) >= _LIMIT:
        known.clear()
    framework = call.framework
    how_made = tuple(_made(framework, operands, place) for place in made)
    known[call.key] = _Known(call.facts, how_made, ran.kernels, framework.pointer)


def _made(framework: Framework, operands: Sequence[Operand | None], place: int) -> Made:
    """Return how to make a result again: like another array, which is quicker, where one is."""
    result = operands[place]
    assert result is not None
    for like, operand in enumerate(operands):
        if operand is not None and operand.form == result.form and not operand.fresh:
            return Made(place, framework.maker(result.form, has_model=True), like)
    return Made(place, framework.maker(result.form, has_model=False), 0)


def forget() -> None:
    """Let the next call of every kind be checked and planned anew; one in progress is not kept."""
    global _known
    before, _known = _known, {}
    before.clear()
