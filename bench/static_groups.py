# SPDX-License-Identifier: MIT
"""Columns of the static table from the SASS of a group norm's launches.

`instructions` are a thread's, for each of its elements of x. Bytes in flight are the bytes that the
blocks of a multiprocessor copy at once, times the share of their time that the copies take.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod
from typing import NamedTuple

from bench.model import (
    GPUS,
    LAUNCH,
    Blocks,
    Gpu,
    ParamGrad,
    Shares,
    Traffic,
    block_time,
    grid_time,
    launch_time,
    param_grad_time,
    shares,
)
from bench.static_occupancy import l2_keeps
from bench.static_packs import LEAST_BYTES, Executed, Packs, executed
from bench.static_plan import Plan

Sass = Callable[[Plan], str]
BlocksPerSm = Callable[[Plan], int]
Columns = dict[str, str]


class _Launch(NamedTuple):
    """The model's inputs and ceilings of a launch."""

    gpu: Gpu
    blocks: Blocks
    blocks_per_sm: int
    grid: int
    moved: Traffic  # to and from memory, for each element of x
    elements: int
    bytes_in_flight: float
    shares: Shares

    def time(self) -> float:
        """Return the seconds of the launch in a sequence of launches."""
        moved = self.elements * self.moved.total
        return launch_time(self.gpu, moved, self.shares.prediction, self.blocks)

    def small_time(self) -> float:
        """Return the seconds of the launch if a multiprocessor has few blocks."""
        copied = self.elements * self.moved.total / self.gpu.copy
        return LAUNCH + max(copied, grid_time(self.gpu, self.blocks, self.grid, self.blocks_per_sm))


def speed_of_groups(
    plan: Plan, sass_of: Sass, blocks_of: BlocksPerSm, param_grad: ParamGrad | None
) -> Columns:
    """Return the columns that are known.

    Parameters
    ----------
    plan
        A launch.
    sass_of, blocks_of
        Return a launch's disassembly, and its blocks on a multiprocessor.
    param_grad
        The launch that follows a backward.
    """
    found = count_executed(plan, sass_of(plan))
    if found is None:
        return {}
    elements = block_elements(plan) / plan.threads
    columns = {"instructions": f"{found.instructions / elements:.1f}"}
    if plan.architecture not in GPUS:
        return columns
    launch = _launch(plan, found, blocks_of(plan))
    columns |= {
        "bytes_in_flight": f"{launch.bytes_in_flight:.0f}",
        "issue_share": f"{launch.shares.issue:.2f}",
        "latency_share": f"{launch.shares.latency:.2f}",
        "traffic_share": f"{launch.shares.traffic:.2f}",
        "prediction": f"{launch.shares.prediction:.3f}",
    }
    return columns | _call_columns(plan, launch, sass_of, blocks_of, param_grad)


def _call_columns(
    plan: Plan, launch: _Launch, sass_of: Sass, blocks_of: BlocksPerSm, param_grad: ParamGrad | None
) -> Columns:
    """Return `call_prediction`, in the line of a call's last launch.

    It is the time of the call's necessary bytes at copy speed, over the time of the call.
    """
    if plan.step == "find" or (plan.before is None and plan.direction == "forward"):
        return {}
    gpu, elements = launch.gpu, plan.samples * _sample_elements(plan)
    limit = elements * call_traffic(plan).total / gpu.copy
    time = param_grad_time(gpu, param_grad)
    if plan.before is None:
        time += limit / launch.shares.prediction
    else:
        first = _launch(plan.before, _counts(plan.before, sass_of), blocks_of(plan.before))
        time += ceil(plan.samples / plan.chunk) * (first.time() + launch.time()) - LAUNCH
    return {"call_prediction": f"{limit / time:.3f}"}


def small_time(
    launches: list[Plan], sass_of: Sass, blocks_of: BlocksPerSm, param_grad: ParamGrad | None
) -> float:
    """Return the seconds of a call whose launches have few blocks each."""
    times = [_launch(one, _counts(one, sass_of), blocks_of(one)).small_time() for one in launches]
    chunks = ceil(launches[0].samples / launches[0].chunk)
    return chunks * sum(times) + param_grad_time(GPUS[launches[0].architecture], param_grad)


def call_traffic(plan: Plan) -> Traffic:
    """Return the necessary bytes of a call; two launches read x twice if no sample fits L2."""
    traffic = plan.traffic()
    reads_twice = plan.before is not None and not _fits_l2(plan, 1)
    return Traffic(traffic.reads * (2 if reads_twice else 1), traffic.writes)


def count_executed(plan: Plan, sass: str) -> Executed | None:
    """Return what a warp runs; None without a disassembly or with packs that are too small."""
    operands, pack = plan.row_operands(), plan.number("PACK")
    if not sass or pack * min(dtype.itemsize for _, dtype in operands.values()) < LEAST_BYTES:
        return None
    sharing = plan.number("CHANNEL_THREADS") * plan.number("POSITION_THREADS")
    packs = Packs(
        {place: pack * dtype.itemsize for place, (_, dtype) in operands.items()},
        pack * plan.traffic().reads,
        block_elements(plan) / sharing / pack,
    )
    return executed(sass, plan.architecture, plan.pointers(), packs)


def block_elements(plan: Plan) -> float:
    """Return the mean number of elements of x in a block."""
    return plan.chunk * _sample_elements(plan) / plan.grid


def _counts(plan: Plan, sass_of: Sass) -> Executed:
    found = count_executed(plan, sass_of(plan))
    assert found is not None
    return found


def _launch(plan: Plan, found: Executed, blocks_per_sm: int) -> _Launch:
    """Return the model's inputs and ceilings of a launch."""
    gpu, traffic = GPUS[plan.architecture], plan.traffic()
    elements = block_elements(plan)
    of_thread = elements / plan.threads
    from_l2 = plan.before is not None and _fits_l2(plan, plan.chunk)
    moved = Traffic(0 if from_l2 else traffic.reads, 0 if plan.step == "find" else traffic.writes)
    blocks = Blocks(
        elements * traffic.reads,
        found.instructions,
        plan.threads // 32,
        gpu.l2_latency if from_l2 else gpu.latency,
    )
    resident = min(blocks_per_sm, plan.grid / gpu.sm_count)
    bytes_a_second = resident * blocks.tile / block_time(gpu, blocks)
    ceilings = shares(
        gpu,
        moved,
        found.instructions / of_thread,
        bytes_a_second * gpu.latency,
        traffic.reads,
        found.special / of_thread,
    )
    return _Launch(
        gpu,
        blocks,
        blocks_per_sm,
        plan.grid,
        moved,
        plan.chunk * _sample_elements(plan),
        bytes_a_second * blocks.latency,
        ceilings._replace(traffic=1.0),
    )


def _fits_l2(plan: Plan, samples: int) -> bool:
    """Whether L2 keeps what a launch reads of so many samples."""
    return l2_keeps(plan.architecture, samples * _sample_elements(plan) * plan.traffic().reads)


def _sample_elements(plan: Plan) -> int:
    return prod(map(int, plan.shape.split("x")))
