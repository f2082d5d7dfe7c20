# SPDX-License-Identifier: MIT
"""Counts from the SASS of a kernel: instructions; of a row norm also late loads and waits.

The counts of a row norm are along the path of a row (paths.py):

- A late load reads a row operand, weight or bias after the row's first store to a row result (y,
  residual_out, dx, dresidual, dgate). Stores and loads of mean, rstd and partial sums do not count.
  Asynchronous copies, which read a later row, do not count, either.
- Instructions are the warp instructions of a row. If blocks walk several rows, each row also gets
  its share of the instructions that a block runs once. Predicated instructions count; slow paths do
  not.
- Loads of row operands are in flight together until a value is needed; later loads wait again.

A thread of a group norm copies its packs of a tile to shared memory and loops over them. The
compiler unrolls each loop and adds code for the remaining packs. So several pieces of code between
two barriers may access the packs of the same operands. Of these, only the piece that takes most
packs at a time counts, as if it took all packs of the thread. Code without packs counts once. Slow
paths do not count: blocks that call a function, and the shuffles of diverged warps. Code that only
some warps run, for a group or a channel, counts as if all warps ran it. Packs are recognised by
accesses to arrays as large as x in global memory, and by loads from shared memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from bench.plans.model import Work
from bench.plans.paths import Step, Weights, components, row_path, work_of
from bench.plans.sass import LOADS, STORES, Block, Instruction, Slots, registers, results, traced

MIN_BYTES = 8  # of a pack: smaller loads from shared memory may be those of sums


class Operands(NamedTuple):
    """The offsets of pointers in a kernel's arguments, and a thread's share of a row."""

    rows: dict[int, int]  # bytes of an element of each array as large as x, by its offset
    parameters: Slots  # weight and bias
    pointers: Slots  # all
    share: float  # elements of a row for each thread of its team


class Counts(NamedTuple):
    """The counts of one thread, for a row of its team."""

    late_loads: int  # in the SASS, each counted once
    work: Work  # on the path of a row
    work_once: Work  # outside of the path, which a block does once
    loaded: float  # bytes of row operands that are loaded to registers
    waits: float  # how often the thread waits for loads of row operands
    parameter_waits: float  # and further for weight and bias
    waits_once: float  # for any of them, outside of the path


def read(text: str, architecture: str, operands: Operands) -> Counts:
    """Return the counts of a kernel's disassembly."""
    code, found = traced(text, architecture, operands.pointers)
    are_staged = any(one.name == "LDGSTS" for one in found)
    # If several pointers are possible, an access is to a row operand; but if rows are staged, a
    # plain load prefers other pointers, because it reads statistics.
    reached: dict[Instruction, int] = {}
    for one, slots in found.items():
        prefers_rows = not are_staged or one.name not in LOADS
        if slots:
            reached[one] = min(slots, key=lambda s: ((s in operands.rows) != prefers_rows, s))
    rows = {one for one, slot in reached.items() if slot in operands.rows}
    wanted = rows | {one for one, slot in reached.items() if slot in operands.parameters}
    stores = frozenset(one for one in rows if one.name in STORES)
    sizes = {one: one.bytes for one in wanted}
    weights = Weights(sizes, lambda steps: _trips(steps, reached, operands), stores)
    row, once = row_path(code, weights)
    loads = {one for one in rows if one.name in LOADS}
    all_loads = {one for one in wanted if one.name in LOADS}
    path = [one for one, _ in row]
    first_store = next((index for index, one in enumerate(path) if one in stores), len(path))
    of_rows = waits(row, loads)
    return Counts(
        sum(one in all_loads for one in path[first_store:]),
        work_of(row),
        work_of(once),
        sum(one.bytes * times for one, times in row if one in loads),
        of_rows,
        max(0.0, waits(row, all_loads) - of_rows),
        waits(once, all_loads),
    )


def _trips(steps: Iterable[Step], reached: dict[Instruction, int], operands: Operands) -> float:
    """Return how often a loop runs until it has accessed the thread's share of a row."""
    elements: Counter[tuple[int, bool]] = Counter()
    for one, times in steps:
        slot = reached.get(one, -1)
        if slot in operands.rows and one.name != "LDGSTS":
            elements[slot, one.name in STORES] += times * one.bytes / operands.rows[slot]
    return max(1.0, operands.share / max(elements.values())) if elements else 1.0


def waits(row: Iterable[Step], loads: set[Instruction]) -> float:
    """Return how often a path waits for loads: whenever it needs a value in flight."""
    pending: set[str] = set()
    count, times = 0.0, 1.0
    for one, often in row:
        if pending & set(registers(one.operands)):
            count += times
            pending.clear()
        if one in loads:
            times = often
            pending.update(results(one))
    return count + (times if pending else 0.0)


def loads_at_once(text: str, architecture: str, slot: int, pointers: Slots) -> float:
    """Return how many loads of an argument's array are in flight together, in the main loop.

    The main loop is the block with most such loads, because the compiler unrolls it.
    """
    code, found = traced(text, architecture, pointers)
    loads = {one for one, slots in found.items() if slot in slots and one.name in LOADS}
    most = max(code, key=lambda block: sum(one in loads for one in block.instructions))
    count = sum(one in loads for one in most.instructions)
    return count / max(1.0, waits([Step(one, 1.0) for one in most.instructions], loads))


# --- group norms ----------------------------------------------------------------------------------


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
