# SPDX-License-Identifier: MIT
"""The path of a warp through a kernel's SASS for one row, and how often it repeats each part.

The path is the one that accesses most bytes of row operands and parameters. Among equals it is the
one that calls fewest slow paths (divisions and roots at the limits of a format, 64-bit divisions of
row indices), then the shortest. So it skips code that does not run for every row: the guards at a
row's end, and code for groups and partial sums.

A loop repeats until its accesses to a row operand make up the thread's share of the row. Of a pass
over a streamed row, only the innermost loop is on the path: the rest, which handles remainders, is
left out. The loop over rows, and a loop that accesses no row operand, run once.

`work_of` counts the work along a path: the time of a lone warp, and the use of the pipes of the
CUDA C++ Programming Guide's table of arithmetic throughput. An instruction in none of the lists
takes only an issue slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from bench.plans.model import Work
from bench.plans.sass import Block, Instruction, registers, results

_FMA = {"FFMA", "FMUL", "FADD", "HFMA2", "HMUL2", "HADD2"}
_HALF_FMA = {"FFMA2", "FMUL2", "FADD2", "IMAD"}  # half as many start per clock
_INTEGER = {
    *("IADD3", "VIADD", "LOP3", "LEA", "SHF", "SHL", "PRMT", "ISETP", "FSETP", "SEL", "FSEL"),
    *("FMNMX", "IMNMX", "VIMNMX", "HMNMX2", "IABS", "PLOP3", "F2FP", "MOV"),
}
_SPECIAL = {"MUFU", "I2F", "F2I", "F2F", "POPC", "FLO", "REDUX", "CREDUX"}
_SHARED = {"LDS", "STS", "LDSM", "LDG", "STG", "LDGSTS", "STAS"}
_BANK_BYTES = 128  # bytes that a multiprocessor's shared memory and L1 move per clock
# Clocks until a result of arithmetic or of another unit can be used (published microbenchmarks
# since Volta: 4; 18 to 33 for special functions, shuffles, shared memory).
_ARITHMETIC, _UNIT, _UNITS = 4.0, 30.0, _SPECIAL | {"LDS", "LDSM", "SHFL"}
_BARRIER = 30.0  # clocks until warps go on after a barrier (published microbenchmarks)

Part = frozenset[int]  # the numbers of some blocks: one block, or a loop


class Step(NamedTuple):
    """An instruction on the path, and how often it runs for a row."""

    instruction: Instruction
    times: float


class Weights(NamedTuple):
    """The weights of instructions in the comparison of paths."""

    bytes: Mapping[Instruction, int]  # of row operands and parameters, for a thread
    trips: Callable[[list[Step]], float]  # how often a loop runs; 1 without row operands
    stores: frozenset[Instruction]  # to row operands


def row_path(code: list[Block], weights: Weights) -> tuple[list[Step], list[Step]]:
    """Return the steps of a row, and those that a block runs once, before and after its rows."""
    finder = _Finder(code, weights)
    path = finder.path(frozenset(range(len(code))), 0)
    row_loop = next((part for part in path if finder.walks_rows(part)), None)
    once = [step for part in path if part is not row_loop for step in finder.steps(part, 0)]
    return (once, []) if row_loop is None else (finder.body(row_loop), once)


class _Finder:
    """Finds paths through a region of blocks, the kernel or a loop, from its `entry`."""

    def __init__(self, code: list[Block], weights: Weights) -> None:
        self.code = code
        self.weights = weights

    def walks_rows(self, part: Part) -> bool:
        """Whether a part of the whole kernel is the loop over rows."""
        if not (self.is_loop(part, 0) and self._stores(part)):
            return False
        inner = self.path(part, self.header(part))
        nested = any(len(other) > 1 and self._stores(other) for other in inner)
        return nested or self.weights.trips(self.body(part)) < 1.5

    def body(self, loop: Part) -> list[Step]:
        """Return the steps of the best path through a loop."""
        header = self.header(loop)
        return [step for part in self.path(loop, header) for step in self.steps(part, header)]

    def steps(self, part: Part, entry: int) -> list[Step]:
        """Return the steps of a block or a loop."""
        if not self.is_loop(part, entry):
            return [Step(one, 1.0) for one in self._instructions(part)]
        body = self.body(self._innermost(part))
        trips = self.weights.trips(body)
        return [Step(step.instruction, step.times * trips) for step in body]

    def path(self, region: Part, entry: int) -> list[Part]:
        """Return the best path from `entry` to an end of the kernel; in a loop, back to `entry`."""
        is_loop = any(entry in self.code[n].next for n in region)
        parts = self._components(region, entry)
        part_of = {number: part for part in parts for number in part}
        best: dict[Part, tuple[tuple[int, int, int], list[Part]]] = {
            part_of[entry]: ((0, 0, 0), [])
        }
        ends = []
        for part in parts:  # in topological order
            if part not in best:
                continue
            before, path = best[part]
            own = self._key(self.steps(part, entry))
            key, path = (before[0] + own[0], before[1] + own[1], before[2] + own[2]), [*path, part]
            successors = {m for n in part for m in self.code[n].next}
            if entry in successors if is_loop else any(self.code[n].is_end for n in part):
                ends.append((key, path))
            others = {part_of[m] for m in successors if m in part_of and m != entry}
            for other in others - {part}:
                if other not in best or key > best[other][0]:
                    best[other] = (key, path)
        return max(ends, key=lambda end: end[0])[1] if ends else [part_of[entry]]

    def header(self, loop: Part) -> int:
        """Return the block in which a loop begins: the first that is reached from outside."""
        after = {m for n, block in enumerate(self.code) if n not in loop for m in block.next}
        return min(loop & after, default=min(loop))

    def is_loop(self, part: Part, entry: int) -> bool:
        """Whether a part of a region is a loop, without the edges to the region's entry."""
        return any(m in part and m != entry for n in part for m in self.code[n].next)

    def _components(self, region: Part, entry: int) -> list[Part]:
        return components(region, lambda n: [m for m in self.code[n].next if m != entry])

    def _innermost(self, loop: Part) -> Part:
        """Return the innermost loop that accesses most bytes; `loop` if none in it accesses any."""
        entry = self.header(loop)
        inner = [part for part in self._components(loop, entry) if self.is_loop(part, entry)]
        most = max(inner, key=self._bytes, default=None)
        return self._innermost(most) if most is not None and self._bytes(most) else loop

    def _instructions(self, part: Part) -> list[Instruction]:
        return [one for number in sorted(part) for one in self.code[number].instructions]

    def _bytes(self, part: Part) -> int:
        return sum(self.weights.bytes.get(one, 0) for one in self._instructions(part))

    def _stores(self, part: Part) -> bool:
        return not self.weights.stores.isdisjoint(self._instructions(part))

    def _key(self, steps: Iterable[Step]) -> tuple[int, int, int]:
        moved = calls = count = 0
        for one, times in steps:
            moved += round(self.weights.bytes.get(one, 0) * times)
            calls += one.is_call
            count += round(times)
        return moved, -calls, -count


def components(region: Part, successors: Callable[[int], Iterable[int]]) -> list[Part]:
    """Return the strongly connected components of a region in topological order."""
    reached = {number: 1 << number for number in region}  # a bit for each block
    before: dict[int, int] = {}
    while before != reached:
        before = dict(reached)
        for number in sorted(region, reverse=True):
            for other in region.intersection(successors(number)):
                reached[number] |= reached[other]
    parts: dict[int, set[int]] = {}  # the blocks of a component reach the same blocks
    for number in sorted(region):
        parts.setdefault(reached[number], set()).add(number)
    return [frozenset(parts[bits]) for bits in sorted(parts, key=int.bit_count, reverse=True)]


def work_of(steps: Iterable[Step]) -> Work:
    """Return the work of a warp along a path.

    A lone warp issues in order, and waits for its operands. Its waits for loads from global memory
    and for predicates are left out.
    """
    ready: dict[str, float] = {}
    clock = 0.0
    found = Work()
    for one, times in steps:
        before = clock
        clock = max([clock + 1, *(ready.get(name, 0.0) for name in registers(one.operands))])
        if one.name == "BAR":
            clock += _BARRIER
        latency = _UNIT if one.name in _UNITS else _ARITHMETIC
        ready |= dict.fromkeys(results(one), clock + latency)
        found = found.plus(_of_instruction(one, clock - before), times)
    return found


def _of_instruction(one: Instruction, alone: float) -> Work:
    return Work(
        total=1,
        alone=alone,
        fma=one.name in _FMA,
        half_fma=one.name in _HALF_FMA,
        integer=one.name in _INTEGER,
        special=one.name in _SPECIAL,
        shuffles=one.name == "SHFL",
        shared=max(1.0, 32 * one.bytes / _BANK_BYTES) if one.name in _SHARED else 0.0,
        exchanges=one.code.startswith("SYNCS.PHASECHK"),
    )
