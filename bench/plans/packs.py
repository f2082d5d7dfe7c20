# SPDX-License-Identifier: MIT
"""How often a group norm runs the instructions of its SASS.

A thread copies its packs of a tile to shared memory and loops over them. The compiler unrolls each
loop and adds code for the remaining packs. So several pieces of code between two barriers may
access the packs of the same operands. Of these, only the piece that takes most packs at a time
counts, as if it took all packs of the thread. Code without packs counts once. Slow paths do not
count: blocks that call a function, and the shuffles of diverged warps. Code that only some warps
run, for a group or a channel, counts as if all warps ran it.

Packs are recognised by accesses to arrays as large as x in global memory, and by loads from shared
memory. Loads of less than eight bytes may be those of sums, so smaller packs cannot be counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bench.plans.model import Work
from bench.plans.paths import Step, components
from bench.plans.pointers import STORES, traced
from bench.plans.sass import Block, Instruction
from bench.plans.work import work_of

MIN_BYTES = 8


class Packs(NamedTuple):
    """The packs of a thread.

    Attributes
    ----------
    bytes
        Bytes of a pack of each array as large as x, by the offset of its pointer in the arguments.
    shared
        Bytes of a pack in shared memory: the sum over all arrays that are read.
    of_thread
        How many packs a thread has.
    """

    bytes: dict[int, int]
    shared: int
    of_thread: float


class _Part(NamedTuple):
    """A loop, or a block outside of loops, between two barriers."""

    code: list[Instruction]
    is_loop: bool
    barriers: int  # before it
    packs: dict[tuple[str, int], float]  # taken at a time, by kind of access


def executed(text: str, architecture: str, pointers: frozenset[int], packs: Packs) -> Work:
    """Return the work of a warp, given all pointers' offsets; ValueError if no packs are found."""
    code, reached = traced(text, architecture, pointers)
    parts = list(_split(code, reached, packs))
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
    steps = (Step(one, times) for found, times in counted for one in found)
    return work_of(steps)


def _split(
    code: list[Block], reached: dict[Instruction, frozenset[int]], packs: Packs
) -> Iterator[_Part]:
    """Yield the parts of the code that are not slow paths."""
    before = [0]
    for block in code:
        before.append(before[-1] + sum(one.name == "BAR" for one in block.instructions))
    usual = _fast_path(code)
    for numbers in components(usual, lambda number: _successors(code[number])):
        instructions = [one for number in sorted(numbers) for one in code[number].instructions]
        if any(one.is_call for one in instructions) and len(numbers) == 1:
            continue
        is_loop = any(other in numbers for number in numbers for other in _successors(code[number]))
        yield _Part(
            instructions,
            is_loop,
            before[min(numbers)],
            dict(_accesses(instructions, reached, packs)),
        )


def _accesses(
    code: list[Instruction], reached: dict[Instruction, frozenset[int]], packs: Packs
) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield each kind of access to packs, and how many packs it accesses in all."""
    moved: dict[tuple[str, int], float] = {}
    for one in code:
        slots = reached.get(one, frozenset())
        if slots and slots <= packs.bytes.keys():
            slot = min(slots)
            kind = ("store" if one.name in STORES else "load", slot)
            moved[kind] = moved.get(kind, 0.0) + one.bytes / packs.bytes[slot]
        elif one.name == "LDS" and one.bytes >= MIN_BYTES:
            moved["shared", 0] = moved.get(("shared", 0), 0.0) + one.bytes / packs.shared
    yield from moved.items()


def _fast_path(code: list[Block]) -> frozenset[int]:
    """Return the blocks that are reachable without slow paths."""
    found, worklist = {0}, [0]
    while worklist:
        new = set(_successors(code[worklist.pop()])) - found
        found |= new
        worklist += new
    return frozenset(found)


def _successors(block: Block) -> list[int]:
    """Return the successors of a block, without the branch of a diverged warp."""
    diverges = block.instructions and block.instructions[-1].code.startswith("BRA.DIV")
    return block.next[1:] if diverges else block.next
