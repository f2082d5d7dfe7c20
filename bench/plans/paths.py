# SPDX-License-Identifier: MIT
"""The path of a warp through a kernel's SASS for one row, and how often it repeats each part.

The path is the one that accesses most bytes of row operands and parameters. Among equals it is the
one that calls fewest slow paths (divisions and roots at the limits of a format, 64-bit divisions of
row indices), then the shortest. So it skips code that does not run for every row: the guards at a
row's end, and code for groups and partial sums.

A loop repeats until its accesses to a row operand make up the thread's share of the row. Of a pass
over a streamed row, only the innermost loop is on the path: the rest, which handles remainders, is
left out. The loop over rows, and a loop that accesses no row operand, run once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from bench.plans.sass import Block, Instruction

Key = tuple[int, int, int]


class Step(NamedTuple):
    """An instruction on the path, and how often it runs for a row."""

    instruction: Instruction
    times: float


class RowPath(NamedTuple):
    """The instructions of a row, and those that a block runs once, before and after its rows."""

    row: list[Step]
    once: list[Step]


class Weights(NamedTuple):
    """The weights of instructions in the comparison of paths.

    Attributes
    ----------
    bytes
        Bytes of row operands and parameters that an instruction accesses, for a thread.
    trips
        How often a loop runs, given its instructions; 1 if they access no row operand.
    stores
        The stores to row operands.
    """

    bytes: Mapping[Instruction, int]
    trips: Callable[[list[Step]], float]
    stores: frozenset[Instruction]


def row_path(code: list[Block], weights: Weights) -> RowPath:
    """Return the path of a row through a kernel's blocks."""
    finder = _Finder(code, weights)
    all_lines = frozenset(range(len(code)))
    path, row_loop = finder.row_loop(all_lines, 0)
    once = [
        step
        for part in path
        if part is not row_loop
        for step in finder.steps(part, looped=finder.is_loop(part, all_lines, 0, None))
    ]
    if row_loop is None:
        return RowPath(once, [])
    return RowPath(finder.flatten(row_loop, finder.header(row_loop), inside=True), once)


class _Finder:
    def __init__(self, code: list[Block], weights: Weights) -> None:
        self.code = code
        self.weights = weights
        self._before: dict[int, list[int]] = {number: [] for number in range(len(code))}
        for number, block in enumerate(code):
            for other in block.next:
                self._before[other].append(number)

    def row_loop(
        self, region: frozenset[int], entry: int
    ) -> tuple[list[frozenset[int]], frozenset[int] | None]:
        """Return the path as blocks and whole loops, and the loop over rows if there is one."""
        path = self.path(region, entry, None)
        for part in path:
            if self.is_loop(part, region, entry, None) and self._stores(part):
                header = self.header(part)
                inner = self.path(part, header, part)
                nested = any(len(other) > 1 and self._stores(other) for other in inner)
                whole = self.weights.trips(self.flatten(part, header, inside=True)) < 1.5
                if nested or whole:
                    return path, part
        return path, None

    def flatten(self, region: frozenset[int], entry: int, *, inside: bool) -> list[Step]:
        """Return the steps of the best path through a region, which is a loop if `inside`."""
        path = self.path(region, entry, region if inside else None)
        loop = region if inside else None
        return [
            step
            for part in path
            for step in self.steps(part, looped=self.is_loop(part, region, entry, loop))
        ]

    def steps(self, part: frozenset[int], *, looped: bool) -> list[Step]:
        """Return the steps of a block or a loop."""
        if not looped:
            code = (one for number in sorted(part) for one in self.code[number].instructions)
            return [Step(one, 1.0) for one in code]
        core = self._innermost(part)
        body = self.flatten(core, self.header(core), inside=True)
        trips = self.weights.trips(body)
        return [Step(step.instruction, step.times * trips) for step in body]

    def path(
        self, region: frozenset[int], entry: int, loop: frozenset[int] | None
    ) -> list[frozenset[int]]:
        """Return the best path from `entry` to an end of the kernel; in a loop, back to `entry`."""
        parts = components(region, lambda n: self._successors_in(n, region, entry, loop))
        part_of = {number: part for part in parts for number in part}
        best: dict[frozenset[int], tuple[Key, frozenset[int] | None]] = {
            part_of[entry]: ((0, 0, 0), None)
        }
        ends: list[tuple[Key, frozenset[int]]] = []
        for part in parts:  # in topological order
            if part not in best:
                continue
            key = _sum(
                best[part][0],
                self._key(self.steps(part, looped=self.is_loop(part, region, entry, loop))),
            )
            successors = {m for n in part for m in self.code[n].next}
            if entry in successors if loop else any(self.code[n].is_end for n in part):
                ends.append((key, part))
            others = {part_of[m] for m in successors if m in part_of and m != entry}
            for other in others - {part}:
                if other not in best or key > best[other][0]:
                    best[other] = (key, part)
        if not ends:
            return [part_of[entry]]
        _, last = max(ends, key=lambda end: end[0])
        path: list[frozenset[int]] = []
        at: frozenset[int] | None = last
        while at is not None:
            path.append(at)
            at = best[at][1]
        return path[::-1]

    def header(self, loop: frozenset[int]) -> int:
        """Return the block in which a loop begins."""
        outside = [n for n in sorted(loop) if any(b not in loop for b in self._before[n])]
        return (outside or sorted(loop))[0]

    def _successors_in(
        self, number: int, region: frozenset[int], entry: int, loop: frozenset[int] | None
    ) -> Iterator[int]:
        for other in self.code[number].next:
            if other in region and not (loop is not None and other == entry):
                yield other

    def is_loop(
        self,
        part: frozenset[int],
        region: frozenset[int],
        entry: int,
        loop: frozenset[int] | None,
    ) -> bool:
        """Whether a part of a region is a loop; edges to `entry` count only without `loop`."""
        return any(m in part for n in part for m in self._successors_in(n, region, entry, loop))

    def _innermost(self, loop: frozenset[int]) -> frozenset[int]:
        """Return the innermost loop that accesses most bytes; `loop` if none in it accesses any."""
        header = self.header(loop)
        parts = components(loop, lambda n: self._successors_in(n, loop, header, loop))
        inner = [part for part in parts if self.is_loop(part, loop, header, loop)]
        most = max(inner, key=self._bytes, default=None)
        return self._innermost(most) if most is not None and self._bytes(most) else loop

    def _bytes(self, part: Iterable[int]) -> int:
        code = (one for number in part for one in self.code[number].instructions)
        return sum(self.weights.bytes.get(one, 0) for one in code)

    def _stores(self, part: Iterable[int]) -> bool:
        return any(
            one in self.weights.stores for number in part for one in self.code[number].instructions
        )

    def _key(self, steps: Iterable[Step]) -> Key:
        moved = calls = count = 0
        for one, times in steps:
            moved += round(self.weights.bytes.get(one, 0) * times)
            calls += one.is_call
            count += round(times)
        return moved, -calls, -count


def _sum(one: Key, other: Key) -> Key:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def components(
    region: frozenset[int], successors: Callable[[int], Iterable[int]]
) -> list[frozenset[int]]:
    """Return the strongly connected components of a region in topological order (Tarjan)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: list[frozenset[int]] = []
    for root in sorted(region):
        if root in index:
            continue
        work = [(root, iter(list(successors(root))))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            number, others = work[-1]
            other = next(others, None)
            if other is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[number])
                if low[number] == index[number]:
                    start = stack.index(number)
                    found.append(frozenset(stack[start:]))
                    del stack[start:]
            elif other not in index:
                index[other] = low[other] = len(index)
                stack.append(other)
                work.append((other, iter(list(successors(other)))))
            elif other in stack:
                low[number] = min(low[number], index[other])
    return found[::-1]
