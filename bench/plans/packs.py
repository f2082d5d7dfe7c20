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

from collections import Counter
from typing import NamedTuple

from bench.plans.model import Work
from bench.plans.paths import Step, components, work_of
from bench.plans.pointers import STORES, Slots, traced
from bench.plans.sass import Block, Instruction

MIN_BYTES = 8


class Packs(NamedTuple):
    """The packs of a thread."""

    bytes: dict[int, int]  # of a pack of each array as large as x, by the pointer's offset
    shared: int  # bytes of a pack in shared memory: the sum over all arrays that are read
    of_thread: float  # how many packs a thread has


def executed(text: str, architecture: str, pointers: Slots, packs: Packs) -> Work:
    """Return the work of a warp, given all pointers' offsets; ValueError if no packs are found."""
    code, reached = traced(text, architecture, pointers)
    barriers = [0]  # before each block
    for block in code:
        barriers.append(barriers[-1] + sum(one.name == "BAR" for one in block.instructions))
    parts = []  # loops, and blocks outside of loops
    for numbers in components(_fast_path(code), lambda number: _successors(code[number])):
        instructions = [one for number in sorted(numbers) for one in code[number].instructions]
        if len(numbers) > 1 or not any(one.is_call for one in instructions):
            taken = _taken(instructions, reached, packs)
            is_loop = any(m in numbers for number in numbers for m in _successors(code[number]))
            most = max(taken.values(), default=0.0)
            parts.append((-most, -is_loop, barriers[min(numbers)], taken, instructions))
    seen: set[tuple[int, str, int]] = set()
    steps: list[Step] = []
    for most, _, barrier, taken, instructions in sorted(parts, key=lambda part: part[:2]):
        kinds = {(barrier, *kind) for kind in taken}
        if kinds.isdisjoint(seen):
            seen |= kinds
            times = packs.of_thread / -most if taken else 1.0
            steps += [Step(one, times) for one in instructions]
    if not seen:
        raise ValueError("no loops over packs were found")
    return work_of(steps)


def _taken(
    code: list[Instruction], reached: dict[Instruction, Slots], packs: Packs
) -> dict[tuple[str, int], float]:
    """Return how many packs some code takes at a time, by kind of access."""
    taken: Counter[tuple[str, int]] = Counter()
    for one in code:
        slots = reached.get(one, frozenset())
        if slots and slots <= packs.bytes.keys():
            slot = min(slots)
            kind = "store" if one.name in STORES else "load"
            taken[kind, slot] += one.bytes / packs.bytes[slot]
        elif one.name == "LDS" and one.bytes >= MIN_BYTES:
            taken["shared", 0] += one.bytes / packs.shared
    return taken


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
