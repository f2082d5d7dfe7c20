# SPDX-License-Identifier: MIT
"""Counts from the SASS of a row norm: late loads, instructions, waits for loads.

All counts are along the path of a row (paths.py):

- A late load reads a row operand, weight or bias after the row's first store to a row result (y,
  residual_out, dx, dresidual, dgate). Stores and loads of mean, rstd and partial sums do not count.
  Asynchronous copies, which read a later row, do not count, either.
- Instructions are the warp instructions of a row. If blocks walk several rows, each row also gets
  its share of the instructions that a block runs once. Predicated instructions count; slow paths do
  not.
- Loads of row operands are in flight together until a value is needed; later loads wait again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from bench.plans.model import Work
from bench.plans.paths import Step, Weights, row_path, work_of
from bench.plans.pointers import LOADS, STORES, Slots, registers, results, traced
from bench.plans.sass import Instruction


class Operands(NamedTuple):
    """The offsets of pointers in a kernel's arguments, and a thread's share of a row."""

    rows: dict[int, int]  # bytes of an element of each array as large as x, by its offset
    parameters: Slots  # weight and bias
    others: Slots
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
    all_pointers = operands.parameters | operands.others | set(operands.rows)
    code, found = traced(text, architecture, all_pointers)
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
