# SPDX-License-Identifier: MIT
"""Columns of the static table from the SASS of a group norm's launches.

The column `instructions` counts the instructions of a thread for each of its elements of x.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod

from bench.plans.columns import call_columns, launch_columns
from bench.plans.model import LAUNCH, Gpu, ParamGrad, Traffic, Work, between, param_grad_time
from bench.plans.occupancy import l2_keeps
from bench.plans.packs import MIN_BYTES, Packs, executed
from bench.plans.plan import Plan
from bench.plans.rounds import Grid, Round, round_of, seconds, shares

Sass = Callable[[Plan], str]
BlocksPerSm = Callable[[Plan], int]
Columns = dict[str, str]


def speed_of_groups(
    plan: Plan,
    gpu: Gpu | None,
    sass_of: Sass,
    blocks_of: BlocksPerSm,
    param_grad: ParamGrad | None,
) -> Columns:
    """Return the columns of a launch, and of the call if this is its last launch.

    There are no columns if packs cannot be counted. If `gpu` is None, only `instructions` is there.

    Parameters
    ----------
    plan
        A launch (`Plan` of static_plan.py, not of cunorm).
    gpu
        The GPU, if the model has it.
    sass_of, blocks_of
        `sass_of` returns the disassembly of a launch, `blocks_of` how many of its blocks fit a
        multiprocessor.
    param_grad
        The launch that follows a backward.
    """
    found = count_executed(plan, sass_of(plan))
    if found is None:
        return {}
    columns = {"instructions": f"{found.total * plan.threads / block_elements(plan):.1f}"}
    if gpu is None:
        return columns
    columns |= launch_columns(shares(gpu, *_launch(plan, gpu, found, blocks_of(plan))))
    if plan.step == "find":
        return columns
    launches = [one for one in (plan.before, plan) if one is not None]
    times = [
        seconds(gpu, *_launch(one, gpu, _counts(one, sass_of), blocks_of(one))) for one in launches
    ]
    of_chunk = LAUNCH + between(gpu) * (len(times) - 1) + sum(times)
    time = ceil(plan.samples / plan.chunk) * of_chunk + param_grad_time(gpu, param_grad)
    moved = plan.samples * _sample_elements(plan) * call_traffic(plan).total
    return columns | call_columns(gpu, moved, time)


def call_traffic(plan: Plan) -> Traffic:
    """Return the necessary bytes of a call for each element of x.

    If the call has two launches and L2 does not keep a sample, the reads count twice.
    """
    traffic = plan.traffic()
    reads_twice = plan.before is not None and not _fits_l2(plan, 1)
    return Traffic(traffic.reads * (2 if reads_twice else 1), traffic.writes)


def count_executed(plan: Plan, sass: str) -> Work | None:
    """Return the work of a warp; None without a disassembly, or if packs are too small."""
    operands, pack = plan.row_operands(), plan.number("PACK")
    if not sass or pack * min(dtype.itemsize for _, dtype in operands.values()) < MIN_BYTES:
        return None
    sharing = plan.number("CHANNEL_THREADS") * plan.number("POSITION_THREADS")
    packs = Packs(
        {slot: pack * dtype.itemsize for slot, (_, dtype) in operands.items()},
        pack * plan.traffic().reads,
        block_elements(plan) / sharing / pack,
    )
    return executed(sass, plan.architecture, plan.pointers(), packs)


def block_elements(plan: Plan) -> float:
    """Return the mean number of elements of x in a block."""
    return plan.chunk * _sample_elements(plan) / plan.grid


def _counts(plan: Plan, sass_of: Sass) -> Work:
    found = count_executed(plan, sass_of(plan))
    assert found is not None
    return found


def _launch(plan: Plan, gpu: Gpu, found: Work, blocks_per_sm: int) -> tuple[Round, Grid]:
    """Return the work of a block, and how blocks are distributed over multiprocessors."""
    traffic, elements = plan.traffic(), block_elements(plan)
    from_l2 = plan.before is not None and _fits_l2(plan, plan.chunk)
    writes = 0 if plan.step == "find" else traffic.writes
    moved = Traffic(0 if from_l2 else elements * traffic.reads, elements * writes)
    waits = gpu.latency
    if from_l2:
        waits = gpu.l2_latency + elements * traffic.reads / (gpu.sm_bytes * gpu.clock)
    one = round_of(gpu, found, plan.threads / 32, waits, moved.total, moved)
    most = ceil(plan.grid / gpu.sm_count)
    return one, Grid(plan.grid, most, min(blocks_per_sm, most), plan.grid)


def _fits_l2(plan: Plan, samples: int) -> bool:
    """Whether L2 keeps the arrays that a launch reads for that many samples."""
    return l2_keeps(plan.architecture, samples * _sample_elements(plan) * plan.traffic().reads)


def _sample_elements(plan: Plan) -> int:
    return prod(map(int, plan.shape.split("x")))
