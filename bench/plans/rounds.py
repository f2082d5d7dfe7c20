# SPDX-License-Identifier: MIT
"""The time of a launch, by the model of GPUs in model.py.

A multiprocessor runs several teams at a time: blocks that have a row, warps that have some rows, or
blocks that have a tile of a group norm. In a `Round` a team waits for its loads, computes, waits
for sums, and stores. Teams compete for the memory and for the multiprocessor's pipes; `rate` says
how many rounds end in a second. The prediction is the time of a copy of as many bytes divided by
the launch's time. Four ceilings show what limits a launch. Each is a share of copy speed, and at
least 1 if it is not a limit:

- issue: the share if the busiest pipe never waits;
- overlap: the share if no team waits for memory or pipes that others use, only for its latencies;
- traffic: the operator's bytes divided by the launch's bytes: rows may be read twice from memory;
- waves: the rounds of the average multiprocessor, divided by the rounds of the busiest.
"""

from __future__ import annotations

from typing import NamedTuple

from bench.plans.model import EXCHANGE, SLOTS, Gpu, Traffic, Work, issue_clocks

_NEAR = 0.95  # a launch that reaches this share of the waves ceiling has no other limit


class Round(NamedTuple):
    """The work of a team for its row or tile, in bytes and seconds.

    `alone` is the whole round if the team has the multiprocessor to itself, without the time of its
    bytes at copy speed and, if rows are copied ahead, without the latency of copies.
    """

    needed: float  # bytes that the operator must move
    moved: Traffic  # bytes that the team moves from and to memory
    issued: float  # seconds of the busiest pipe, for all warps of the team
    alone: float
    copied_ahead: int  # rows that are copied while the team computes one; 0: it waits for its loads
    pipe: str  # the busiest


def round_of(
    gpu: Gpu, work: Work, warps: float, waits: float, needed: float, moved: Traffic, ahead: int = 0
) -> Round:
    """Return the round of a team of some warps, each with that work; it waits so long for loads.

    A scheduler with n warps, each ready in a fraction p of the clocks, starts an instruction in
    1 - (1 - p)**n of the clocks. So a few warps do not fill their share of the slots.
    """
    clocks = issue_clocks(gpu, work)
    pipe = max(clocks, key=lambda name: clocks[name])
    issued = warps * clocks[pipe]
    of_scheduler = max(1.0, warps / SLOTS)
    started = 1 - (1 - work.total / work.alone) ** of_scheduler
    computed = max(issued, work.total * of_scheduler / started)
    alone = computed / gpu.clock + EXCHANGE * work.exchanges + waits
    return Round(needed, moved, issued / gpu.clock, alone, ahead, pipe)


class Grid(NamedTuple):
    """How the rounds of a launch are distributed over multiprocessors."""

    rounds: float  # in all
    busiest: float  # rounds of the multiprocessor that has most
    at_once: float  # teams on the busiest multiprocessor at a time
    blocks: int  # of the launch


class Times(NamedTuple):
    """Seconds of a round: of memory and pipes, for which teams compete, and all other seconds."""

    reads: float
    writes: float
    pipes: float
    own: float

    @property
    def memory(self) -> float:
        """Seconds of the round's bytes at copy speed."""
        return self.reads + self.writes


def times_of(gpu: Gpu, one: Round, grid: Grid) -> tuple[Times, float]:
    """Return the seconds of a round, and how many rounds a multiprocessor has at once.

    A team whose rows are copied ahead has several rounds at once but computes one at a time, for
    `alone` seconds. So the `pipes` of a round are at least `alone` divided by the number of teams.
    """
    bandwidth = min(gpu.sm_bytes * gpu.clock, gpu.copy / min(gpu.sm_count, grid.blocks))
    reads, writes = one.moved.reads / bandwidth, one.moved.writes / bandwidth
    if not one.copied_ahead:
        return Times(reads, writes, one.issued, one.alone - one.issued), grid.at_once
    pipes = max(one.issued, one.alone / grid.at_once)
    times = Times(reads, writes, pipes, gpu.latency + one.alone - pipes)
    return times, min(grid.busiest, grid.at_once * (1 + one.copied_ahead))


def rate(times: Times, at_once: float) -> float:
    """Return a multiprocessor's rounds per second with `at_once` rounds: mean value analysis.

    Memory and pipes are shared equally among the rounds that use them. A new round finds the
    average queue of a system with one round fewer (Reiser and Lavenberg, 1980). Only the means of
    the times matter (Baskett, Chandy, Muntz and Palacios, 1975). No round waits for its writes, but
    the memory does not serve reads while it writes.
    """
    reading = computing = found = 0.0
    for rounds in range(1, round(at_once) + 1):
        read = times.reads and times.reads * (1 + reading) / (1 - found * times.writes)
        computed = times.pipes * (1 + computing)
        found = min(rounds / (times.own + read + computed), 1 / max(times.memory, times.pipes))
        reading, computing = found * read, found * computed
    return found


def seconds(gpu: Gpu, one: Round, grid: Grid) -> float:
    """Return the seconds of a launch, from its first load to its last store.

    The busiest multiprocessor runs its rounds at its `rate`. The launch takes at least the `memory`
    or `pipes` of all these rounds, whichever is longer, plus the other seconds of one round.
    """
    times, at_once = times_of(gpu, one, grid)
    least = grid.busiest * max(times.memory, times.pipes) + times.own
    return max(grid.busiest / rate(times, at_once), least + min(times.memory, times.pipes))


def prediction(gpu: Gpu, one: Round, grid: Grid) -> tuple[float, str]:
    """Return a launch's share of copy speed, and its limit.

    The limit is the lowest ceiling, waves, or copy if nothing limits.
    """
    times, at_once = times_of(gpu, one, grid)
    copied = one.needed * gpu.sm_count / gpu.copy
    overlap = copied * at_once / (times.memory + times.pipes + times.own)
    if one.copied_ahead:
        overlap = min(overlap, copied / times.pipes)
    copy = gpu.latency + grid.rounds * one.needed / gpu.copy
    share = min(1.0, copy / seconds(gpu, one, grid))
    waves = grid.rounds / gpu.sm_count / grid.busiest
    if share >= _NEAR * min(1.0, waves):
        return share, "waves" if waves < _NEAR else "copy"
    ceilings = {one.pipe: copied / one.issued, "overlap": overlap}
    if one.moved.total > one.needed:
        ceilings["traffic"] = one.needed / one.moved.total
    return share, min(ceilings, key=lambda name: ceilings[name])
