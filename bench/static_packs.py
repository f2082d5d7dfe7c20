# SPDX-License-Identifier: MIT
"""What the SASS of a group norm says of its speed: how often its instructions are executed.

A thread copies its packs of a tile to shared memory and goes over them in loops, each of which the
compiler unrolled and gave code for the packs that are left over. The rule: between two barriers, of
the code that accesses the packs of the same operands, that which takes most of them at a time
counts, as often as it takes for all packs of the thread; the rest there is left out. All other
instructions count once, but for slow paths: what calls a function, and diverged warps' shuffles. So
what some warps alone do, for a group or a channel, counts as if all did.

Packs are known by loads from and stores to row operands, and by loads from shared memory that are
wider than those of sums, so of packs of less than eight bytes nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bench.static_paths import components
from bench.static_pointers import STORES, pointers_of
from bench.static_sass import Block, Instruction, blocks

LEAST_BYTES = 8
_SPECIAL = "MUFU"


class Packs(NamedTuple):
    """The packs of a thread.

    Attributes
    ----------
    bytes
        Of a pack of an array as large as x, by the place of its pointer among the arguments.
    shared
        Of what shared memory holds of a pack: of all arrays that are read.
    of_thread
        How many of them a thread has.
    """

    bytes: dict[int, int]
    shared: int
    of_thread: float


class Executed(NamedTuple):
    """What a warp executes for its packs."""

    instructions: float
    special: float  # of them, roots, powers, reciprocals and the like


class _Part(NamedTuple):
    """A loop, or a block outside of loops, as it stands between two barriers."""

    code: list[Instruction]
    is_loop: bool
    barriers: int  # before it
    packs: dict[tuple[str, int], float]  # that it takes at a time, by kind of access

    @property
    def at_a_time(self) -> float:
        """The packs that it takes at a time."""
        return max(self.packs.values(), default=0.0)


def executed(text: str, architecture: str, pointers: frozenset[int], packs: Packs) -> Executed:
    """Count what a warp executes, given the places of all pointers; no packs: ValueError."""
    code = blocks(text)
    reached = pointers_of(code, architecture, pointers)
    parts = list(_parts(code, reached, packs))
    seen: dict[int, set[tuple[str, int]]] = {}
    counted: list[tuple[list[Instruction], float]] = []
    for part in sorted(
        parts, key=lambda part: (-max(part.packs.values(), default=0), -part.is_loop)
    ):
        if not part.packs:
            counted.append((part.code, 1.0))
        elif not part.packs.keys() & seen.setdefault(part.barriers, set()):
            seen[part.barriers] |= part.packs.keys()
            counted.append((part.code, packs.of_thread / max(part.packs.values())))
    if not any(seen.values()):
        raise ValueError("no loops over packs were found")
    return Executed(
        sum(times * len(found) for found, times in counted),
        sum(times * sum(one.name == _SPECIAL for one in found) for found, times in counted),
    )


def _parts(
    code: list[Block], reached: dict[Instruction, frozenset[int]], packs: Packs
) -> Iterator[_Part]:
    """Yield the parts of the code that are not slow paths."""
    before = [0]
    for block in code:
        before.append(before[-1] + sum(one.name == "BAR" for one in block.instructions))
    usual = _usual(code)
    for numbers in components(usual, lambda number: _next(code[number])):
        instructions = [one for number in sorted(numbers) for one in code[number].instructions]
        if any(one.is_call for one in instructions) and len(numbers) == 1:
            continue
        is_loop = any(other in numbers for number in numbers for other in _next(code[number]))
        yield _Part(
            instructions, is_loop, before[min(numbers)], dict(_taken(instructions, reached, packs))
        )


def _taken(
    code: list[Instruction], reached: dict[Instruction, frozenset[int]], packs: Packs
) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield the kinds of accesses to packs, and how many packs they access together."""
    moved: dict[tuple[str, int], float] = {}
    for one in code:
        places = reached.get(one, frozenset())
        if places and places <= packs.bytes.keys():
            place = min(places)
            kind = ("store" if one.name in STORES else "load", place)
            moved[kind] = moved.get(kind, 0.0) + one.bytes / packs.bytes[place]
        elif one.name == "LDS" and one.bytes >= LEAST_BYTES:
            moved["shared", 0] = moved.get(("shared", 0), 0.0) + one.bytes / packs.shared
    yield from moved.items()


def _usual(code: list[Block]) -> frozenset[int]:
    """Return the blocks that are reached without slow paths."""
    found, left = {0}, [0]
    while left:
        new = set(_next(code[left.pop()])) - found
        found |= new
        left += new
    return frozenset(found)


def _next(block: Block) -> list[int]:
    """Return where a block goes on, unless a warp has diverged."""
    diverges = block.instructions and block.instructions[-1].code.startswith("BRA.DIV")
    return block.next[1:] if diverges else block.next
