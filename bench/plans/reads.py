# SPDX-License-Identifier: MIT
"""Counts from the SASS of a row norm: late loads, instructions, waits for loads.

All counts are along the path of a row (static_paths.py):

- A late load reads a row operand, weight or bias after the row's first store to a row result (y,
  residual_out, dx, dresidual, dgate). Stores and loads of mean, rstd and partial sums do not count.
  Asynchronous copies, which read a later row, do not count, either.
- Instructions are the warp instructions of a row. If blocks walk several rows, each row also gets
  its share of the instructions that a block runs once. Predicated instructions count; slow paths do
  not.
- Loads of row operands are in flight together until a value is needed; later loads wait again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bench.plans.model import Work
from bench.plans.paths import Step, Weights, row_path
from bench.plans.pointers import LOADS, STORES, registers, results, traced
from bench.plans.sass import Instruction
from bench.plans.work import work_of


class Operands(NamedTuple):
    """The offsets of pointers in a kernel's arguments, and a thread's share of a row.

    Attributes
    ----------
    rows
        Bytes of an element of each array as large as x, by the offset of its pointer.
    parameters
        The offsets of weight and bias.
    others
        The offsets of all other pointers.
    share
        Elements of a row for each thread of its team.
    """

    rows: dict[int, int]
    parameters: frozenset[int]
    others: frozenset[int]
    share: float


class Counts(NamedTuple):
    """The counts of one thread, for a row of its team.

    Attributes
    ----------
    late_loads
        Late loads in the SASS, each counted once.
    work, work_once
        The work on the path of a row, and the work outside of the path, which a block does once.
    loaded
        Bytes of row operands that are loaded to registers.
    waits
        How often the thread waits for loads of row operands.
    parameter_waits, waits_once
        Further waits, for weight and bias, on the path of a row, and all waits outside of it.
    """

    late_loads: int
    work: Work
    work_once: Work
    loaded: float
    waits: float
    parameter_waits: float
    waits_once: float


def read(text: str, architecture: str, operands: Operands) -> Counts:
    """Return the counts of a kernel's disassembly."""
    all_pointers = operands.parameters | operands.others | set(operands.rows)
    code, found = traced(text, architecture, all_pointers)
    are_staged = any(one.name == "LDGSTS" for one in found)
    reached = {
        one: _operand(slots, operands, prefers_rows=not are_staged or one.name not in LOADS)
        for one, slots in found.items()
    }
    rows = {one for one, slot in reached.items() if slot in operands.rows}
    wanted = rows | {one for one, slot in reached.items() if slot in operands.parameters}
    weights = Weights(
        {one: one.bytes for one in wanted},
        lambda steps: _trips(steps, reached, operands),
        frozenset(one for one in rows if one.name in STORES),
    )
    path = row_path(code, weights)
    loads = {one for one in rows if one.name in LOADS}
    all_loads = {one for one in wanted if one.name in LOADS}
    of_rows = waits(path.row, loads)
    return Counts(
        _late_loads(path.row, wanted, weights.stores),
        work_of(path.row),
        work_of(path.once),
        sum(step.instruction.bytes * step.times for step in path.row if step.instruction in loads),
        of_rows,
        max(0.0, waits(path.row, all_loads) - of_rows),
        waits(path.once, all_loads),
    )


def _operand(slots: frozenset[int], operands: Operands, prefers_rows: bool) -> int | None:
    """Return the pointer of an access; if several are possible, that of a row operand.

    If rows are staged, a plain load prefers other pointers, because it reads statistics.
    """
    return min(
        slots, key=lambda slot: ((slot in operands.rows) != prefers_rows, slot), default=None
    )


def _trips(
    steps: Iterable[Step], reached: dict[Instruction, int | None], operands: Operands
) -> float:
    """Return how often a loop runs until it has accessed the thread's share of a row."""
    elements: dict[tuple[int, bool], float] = {}
    for one, times in steps:
        slot = reached.get(one)
        if slot in operands.rows and slot is not None and one.name != "LDGSTS":
            key = (slot, one.name in STORES)
            elements[key] = elements.get(key, 0.0) + times * one.bytes / operands.rows[slot]
    return max(1.0, operands.share / max(elements.values())) if elements else 1.0


def _late_loads(row: list[Step], wanted: set[Instruction], stores: frozenset[Instruction]) -> int:
    stored = late = 0
    for one, _ in row:
        stored += one in stores
        late += bool(stored) and one in wanted and one.name in LOADS
    return late


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


def loads_at_once(text: str, architecture: str, slot: int, pointers: frozenset[int]) -> float:
    """Return how many loads of an argument's array are in flight together, in the main loop.

    The main loop is the block with most such loads, because the compiler unrolls it.
    """
    code, found = traced(text, architecture, pointers)
    loads = {one for one, slots in found.items() if slot in slots and one.name in LOADS}
    most = max(code, key=lambda block: sum(one in loads for one in block.instructions))
    count = sum(one in loads for one in most.instructions)
    return count / max(1.0, waits([Step(one, 1.0) for one in most.instructions], loads))
