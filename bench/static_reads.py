# SPDX-License-Identifier: MIT
"""What the SASS of a row norm says of its speed: late loads, instructions, reads in flight.

What is counted, along the way of a row (static_paths.py):

- A late load reads a row operand, weight or bias after the row's first store to a row result (y,
  new_residual, dx, dresidual, dgate); stores of mean, rstd and partial sums do not count, nor do
  loads of those, nor asynchronous copies, which are of a row to come.
- Instructions are the warp instructions of a row and, of kernels whose blocks walk several rows,
  their share of what the block executes but once; predicated ones count, slow paths do not.
- Loads of row operands are in flight together until one of them is needed; what is loaded after
  that waits anew. Bytes in flight are those of a row over the number of such waits. Of staged rows,
  that are copied while others are computed, `stages` are in flight together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bench.static_paths import Step, Weights, way_of_a_row
from bench.static_pointers import LOADS, STORES, pointers_of, registers, results
from bench.static_sass import Instruction, blocks


class Operands(NamedTuple):
    """The places of pointers among a kernel's arguments, and the rows that a thread shares.

    Attributes
    ----------
    rows
        Bytes of an element of the arrays as large as x, by the places of their pointers.
    parameters
        The places of weight and bias.
    others
        Those of all other pointers.
    share
        Elements of a row for each thread of its team.
    """

    rows: dict[int, int]
    parameters: frozenset[int]
    others: frozenset[int]
    share: float


class Found(NamedTuple):
    """What was counted, for one thread and a row of its team.

    Attributes
    ----------
    late_loads
        As they stand in the SASS.
    instructions, instructions_once
        Of the way of a row, and of what a block executes but once.
    loaded
        Bytes of row operands that are loaded to registers.
    waits
        How often those are waited for.
    """

    late_loads: int
    instructions: float
    instructions_once: float
    loaded: float
    waits: float


def read(text: str, architecture: str, operands: Operands) -> Found:
    """Count what stands in a kernel's disassembly."""
    code = blocks(text)
    every = operands.parameters | operands.others | set(operands.rows)
    found = pointers_of(code, architecture, every)
    are_staged = any(one.name == "LDGSTS" for one in found)
    reached = {
        one: _operand(places, operands, prefers_rows=not are_staged or one.name not in LOADS)
        for one, places in found.items()
    }
    rows = {one for one, place in reached.items() if place in operands.rows}
    wanted = rows | {one for one, place in reached.items() if place in operands.parameters}
    weights = Weights(
        {one: one.bytes for one in wanted},
        lambda steps: _trips(steps, reached, operands),
        frozenset(one for one in rows if one.name in STORES),
    )
    way = way_of_a_row(code, weights)
    loads = {one for one in rows if one.name in LOADS}
    return Found(
        _late_loads(way.row, wanted, weights.stores),
        sum(step.times for step in way.row),
        sum(step.times for step in way.once),
        sum(step.instruction.bytes * step.times for step in way.row if step.instruction in loads),
        waits(way.row, loads),
    )


def _operand(places: frozenset[int], operands: Operands, prefers_rows: bool) -> int | None:
    """Return the pointer that an access is by; of several, that of a row operand.

    Or that of another, for a plain load where rows are staged: those are of a row's statistics.
    """
    return min(
        places, key=lambda place: ((place in operands.rows) != prefers_rows, place), default=None
    )


def _trips(
    steps: Iterable[Step], reached: dict[Instruction, int | None], operands: Operands
) -> float:
    """Return how often a loop is executed until it accessed the thread's share of a row."""
    elements: dict[tuple[int, bool], float] = {}
    for one, times in steps:
        place = reached.get(one)
        if place in operands.rows and place is not None and one.name != "LDGSTS":
            key = (place, one.name in STORES)
            elements[key] = elements.get(key, 0.0) + times * one.bytes / operands.rows[place]
    return max(1.0, operands.share / max(elements.values())) if elements else 1.0


def _late_loads(row: list[Step], wanted: set[Instruction], stores: frozenset[Instruction]) -> int:
    stored = late = 0
    for one, _ in row:
        stored += one in stores
        late += bool(stored) and one in wanted and one.name in LOADS
    return late


def waits(row: Iterable[Step], loads: set[Instruction]) -> float:
    """Return how often loads are waited for on a way: whenever a value in flight is needed."""
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


def loads_at_once(text: str, architecture: str, place: int, pointers: frozenset[int]) -> float:
    """Return how many loads of an argument's array are in flight together, where it is read most.

    That is in the block of most such loads: a loop's, which the compiler unrolled.
    """
    code = blocks(text)
    loads = {
        one
        for one, places in pointers_of(code, architecture, pointers).items()
        if place in places and one.name in LOADS
    }
    most = max(code, key=lambda block: sum(one in loads for one in block.instructions))
    count = sum(one in loads for one in most.instructions)
    return count / max(1.0, waits([Step(one, 1.0) for one in most.instructions], loads))
