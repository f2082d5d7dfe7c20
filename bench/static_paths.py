# SPDX-License-Identifier: MIT
"""The way that a warp takes through a kernel's SASS for one row, and how often it repeats a part.

The rule: of all ways, the one that accesses most bytes of row operands and parameters; among those
the one that calls fewest slow paths (divisions and roots of the edges of a format, 64-bit divisions
of row indices), and of those the shortest. So the guards of a row's end are passed by, the rows of
groups and parts of partial sums that are not written with every row are left out.

A loop is taken as often as its accesses to a row operand make up the thread's share of the row; of
a pass over a streamed row that is the innermost loop alone, its rest being remainders. A loop that
accesses no row operand is taken once, and so is the loop over rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from bench.static_sass import Block, Instruction

Key = tuple[int, int, int]


class Step(NamedTuple):
    """An instruction on the way, and how often it is executed for a row."""

    instruction: Instruction
    times: float


class Way(NamedTuple):
    """The instructions of a row, and those that a block executes but once: before and after."""

    row: list[Step]
    once: list[Step]


class Weights(NamedTuple):
    """What instructions count when ways are compared.

    Attributes
    ----------
    bytes
        What an instruction accesses of row operands and parameters, for a thread.
    trips
        How often a loop is executed, given its instructions; 1 where they access no row operand.
    stores
        The stores to row operands.
    """

    bytes: Mapping[Instruction, int]
    trips: Callable[[list[Step]], float]
    stores: frozenset[Instruction]


def way_of_a_row(code: list[Block], weights: Weights) -> Way:
    """Return the way through a kernel's blocks."""
    finder = _Finder(code, weights)
    every = frozenset(range(len(code)))
    path, row_loop = finder.row_loop(every, 0)
    once = [
        step
        for part in path
        if part is not row_loop
        for step in finder.steps(part, looped=finder.is_loop(part, every, 0, None))
    ]
    if row_loop is None:
        return Way(once, [])
    header, body = finder.entered(row_loop, every)
    return Way(finder.flat(body, header, inside=True), once)


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
        """Return the way as blocks and whole loops, and the loop over rows that is among them."""
        path = self.path(region, entry, None)
        for part in path:
            if self.is_loop(part, region, entry, None) and self._stores(part):
                inner = self.path(part, self.entered(part, region)[0], part)
                nested = any(len(other) > 1 and self._stores(other) for other in inner)
                header = self.entered(part, region)[0]
                whole = self.weights.trips(self.flat(part, header, inside=True)) < 1.5
                if nested or whole:
                    return path, part
        return path, None

    def flat(self, region: frozenset[int], entry: int, *, inside: bool) -> list[Step]:
        """Return the steps of the best way through a region; inside a loop, to its end."""
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
        core = self._core(part)
        header = self.entered(core, frozenset(range(len(self.code))))[0]
        body = self.flat(core, header, inside=True)
        trips = self.weights.trips(body)
        return [Step(step.instruction, step.times * trips) for step in body]

    def path(
        self, region: frozenset[int], entry: int, loop: frozenset[int] | None
    ) -> list[frozenset[int]]:
        """Return the best way from an entry to an end of the kernel or, of a loop, back to it."""
        parts = components(region, lambda n: self._within(n, region, entry, loop))
        of = {number: part for part in parts for number in part}
        best: dict[frozenset[int], tuple[Key, frozenset[int] | None]] = {
            of[entry]: ((0, 0, 0), None)
        }
        ends: list[tuple[Key, frozenset[int]]] = []
        for part in parts:  # in the order of their ways
            if part not in best:
                continue
            key = _sum(
                best[part][0],
                self._key(self.steps(part, looped=self.is_loop(part, region, entry, loop))),
            )
            followers = {m for n in part for m in self.code[n].next}
            if entry in followers if loop else any(self.code[n].is_end for n in part):
                ends.append((key, part))
            for other in {of[m] for m in followers if m in of and (m != entry)} - {part}:
                if other not in best or key > best[other][0]:
                    best[other] = (key, part)
        if not ends:
            return [of[entry]]
        _, last = max(ends, key=lambda end: end[0])
        way: list[frozenset[int]] = []
        at: frozenset[int] | None = last
        while at is not None:
            way.append(at)
            at = best[at][1]
        return way[::-1]

    def entered(self, loop: frozenset[int], region: frozenset[int]) -> tuple[int, frozenset[int]]:
        """Return the block in which a loop begins, and the loop."""
        outside = [n for n in sorted(loop) if any(b not in loop for b in self._before[n])]
        return (outside or sorted(loop))[0], loop

    def _within(
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
        """Whether a part of a region is a loop, other than the loop that the region is."""
        if part == loop:  # it is entered at several places: taken as it stands
            return False
        return any(m in part for n in part for m in self._within(n, region, entry, loop))

    def _core(self, loop: frozenset[int]) -> frozenset[int]:
        """Return the innermost loop that accesses most bytes of row operands, or the loop."""
        header = self.entered(loop, loop)[0]
        parts = components(loop, lambda n: self._within(n, loop, header, loop))
        inner = [part for part in parts if self.is_loop(part, loop, header, loop)]
        most = max(inner, key=self._bytes, default=None)
        return self._core(most) if most is not None and self._bytes(most) else loop

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
    region: frozenset[int], following: Callable[[int], Iterable[int]]
) -> list[frozenset[int]]:
    """Return the strongly connected components of a region in the order of its ways (Tarjan)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: list[frozenset[int]] = []
    for root in sorted(region):
        if root in index:
            continue
        work = [(root, iter(list(following(root))))]
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
                    place = stack.index(number)
                    found.append(frozenset(stack[place:]))
                    del stack[place:]
            elif other not in index:
                index[other] = low[other] = len(index)
                stack.append(other)
                work.append((other, iter(list(following(other)))))
            elif other in stack:
                low[number] = min(low[number], index[other])
    return found[::-1]
