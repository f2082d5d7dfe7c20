# SPDX-License-Identifier: MIT
"""What the SASS of a group norm's launches says of their speed, as columns of the static table.

`instructions` is of a thread for each element of x that it has. Bytes in flight are what the blocks
of a multiprocessor copy at once, times the share of their time in which that is on its way.
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
    """A launch as the model sees it."""

    gpu: Gpu
    blocks: Blocks
    blocks_per_sm: int
    grid: int
    moved: Traffic  # to and from memory, for each element of x
    elements: int
    bytes_in_flight: float
    shares: Shares

    def time(self) -> float:
        """Return the seconds among other launches."""
        moved = self.elements * self.moved.total
        return launch_time(self.gpu, moved, self.shares.prediction, self.blocks)

    def small_time(self) -> float:
        """Return the seconds where a multiprocessor has few blocks."""
        copied = self.elements * self.moved.total / self.gpu.copy
        return LAUNCH + max(copied, grid_time(self.gpu, self.blocks, self.grid, self.blocks_per_sm))


def speed_of_groups(
    plan: Plan, sass_of: Sass, blocks_of: BlocksPerSm, param_grad: ParamGrad | None
) -> Columns:
    """Return the columns; empty ones where nothing is known.

    Parameters
    ----------
    plan
        A launch.
    sass_of, blocks_of
        Return a launch's disassembly, and its blocks on a multiprocessor.
    param_grad
        What follows a backward.
    """
    found = counted(plan, sass_of(plan))
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
    return columns | _of_call(plan, launch, sass_of, blocks_of, param_grad)


def _of_call(
    plan: Plan, launch: _Launch, sass_of: Sass, blocks_of: BlocksPerSm, param_grad: ParamGrad | None
) -> Columns:
    """Return the share of the limit that a call reaches, in the line of its last launch.

    The limit is the bytes at copy speed that a call must move.
    """
    if plan.step == "find" or (plan.before is None and plan.direction == "forward"):
        return {}
    gpu, elements = launch.gpu, plan.samples * _sample(plan)
    limit = elements * call_traffic(plan).total / gpu.copy
    time = param_grad_time(gpu, param_grad)
    if plan.before is None:
        time += limit / launch.shares.prediction
    else:
        first = _launch(plan.before, _known(plan.before, sass_of), blocks_of(plan.before))
        time += ceil(plan.samples / plan.chunk) * (first.time() + launch.time()) - LAUNCH
    return {"call_prediction": f"{limit / time:.3f}"}


def small_time(
    launches: list[Plan], sass_of: Sass, blocks_of: BlocksPerSm, param_grad: ParamGrad | None
) -> float:
    """Return the seconds of a call whose launches have few blocks."""
    times = [_launch(one, _known(one, sass_of), blocks_of(one)).small_time() for one in launches]
    chunks = ceil(launches[0].samples / launches[0].chunk)
    return chunks * sum(times) + param_grad_time(GPUS[launches[0].architecture], param_grad)


def call_traffic(plan: Plan) -> Traffic:
    """Return what a call must move: of two launches, x twice if L2 has not room for one sample."""
    own = plan.traffic()
    again = plan.before is not None and not _fits_l2(plan, 1)
    return Traffic(own.reads * (2 if again else 1), own.writes)


def counted(plan: Plan, sass: str) -> Executed | None:
    """Return what a warp executes; None where that is not known."""
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
    """Return the elements of x that a block has, on average."""
    return plan.chunk * _sample(plan) / plan.grid


def _known(plan: Plan, sass_of: Sass) -> Executed:
    found = counted(plan, sass_of(plan))
    assert found is not None
    return found


def _launch(plan: Plan, found: Executed, blocks_per_sm: int) -> _Launch:
    """Return what the model asks of a launch."""
    gpu, own = GPUS[plan.architecture], plan.traffic()
    elements = block_elements(plan)
    of_thread = elements / plan.threads
    from_l2 = plan.before is not None and _fits_l2(plan, plan.chunk)
    moved = Traffic(0 if from_l2 else own.reads, 0 if plan.step == "find" else own.writes)
    blocks = Blocks(
        elements * own.reads,
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
        own.reads,
        found.special / of_thread,
    )
    return _Launch(
        gpu,
        blocks,
        blocks_per_sm,
        plan.grid,
        moved,
        plan.chunk * _sample(plan),
        bytes_a_second * blocks.latency,
        ceilings._replace(traffic=1.0),
    )


def _fits_l2(plan: Plan, samples: int) -> bool:
    """Whether L2 keeps what is read of so many samples."""
    return l2_keeps(plan.architecture, samples * _sample(plan) * plan.traffic().reads)


def _sample(plan: Plan) -> int:
    return prod(map(int, plan.shape.split("x")))
