# SPDX-License-Identifier: MIT
"""Columns of the static table from the SASS of a plan, with predictions for the model's GPUs.

`instructions` are a warp's instructions for one row, times 32, divided by the warp's elements of
the row: a thread's instructions per element. If blocks walk several rows, the instructions that run
once are divided among these rows.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from bench.plans.columns import COLUMNS, call_columns, launch_columns
from bench.plans.groups import speed_of_groups
from bench.plans.model import LAUNCH, MODELLED, Gpu, ParamGrad, Traffic, param_grad_time
from bench.plans.occupancy import ARCHITECTURES
from bench.plans.plan import PARAM_GRAD, STREAMED, Plan
from bench.plans.reads import Counts, Operands, loads_at_once, read
from bench.plans.rounds import Grid, Round, round_of, seconds, shares
from cunorm._core.build import KernelBuild

_PARTIAL_SUMS = (("DWEIGHT_T", 0), ("DBIAS_T", 8))  # macros; offsets of param_grad's pointers

Sass = Callable[[KernelBuild, str], str]


def speed(
    plan: Plan, gpu: Gpu | None, blocks_of: Callable[[Plan], int], sass_of: Sass
) -> dict[str, str]:
    """Return the columns; unknown ones are empty.

    Parameters
    ----------
    plan
        A launch.
    gpu
        The GPU, if the model has it.
    blocks_of
        Returns how many of a launch's blocks fit a multiprocessor.
    sass_of
        Returns the disassembly of a build on an architecture; empty without a disassembler.
    """
    columns = dict.fromkeys(COLUMNS, "")
    blocks_per_sm, sass = blocks_of(plan), sass_of(plan.build, plan.architecture)
    if not sass or plan.regime == PARAM_GRAD or not blocks_per_sm:
        return columns
    params = param_grad_of(plan, sass_of)
    if not plan.is_row_norm:
        return columns | speed_of_groups(
            plan, gpu, lambda one: sass_of(one.build, one.architecture), blocks_of, params
        )
    found = read(sass, plan.architecture, _operands(plan))
    if found.work.total == 0 or (found.loaded == 0 and plan.stages == 0):
        raise ValueError(f"no loads of a row were found in the SASS of {plan}")
    instructions = found.work.plus(found.work_once, 1 / _passes(plan)).total / _share(plan)
    columns |= {"late_loads": str(found.late_loads), "instructions": f"{instructions:.1f}"}
    if gpu is None:
        return columns
    grid = _grid(plan, gpu, blocks_per_sm)
    one = _round(plan, gpu, found, grid)
    moved = plan.rows * int(plan.shape) * plan.traffic().total
    time = LAUNCH + seconds(gpu, one, grid) + param_grad_time(gpu, params)
    return columns | launch_columns(shares(gpu, one, grid)) | call_columns(gpu, moved, time)


def _operands(plan: Plan) -> Operands:
    rows = {slot: dtype.itemsize for slot, (_, dtype) in plan.row_operands().items()}
    others = plan.pointers() - plan.parameters() - set(rows)
    return Operands(rows, plan.parameters(), others, _share(plan))


def _grid(plan: Plan, gpu: Gpu, blocks_per_sm: int) -> Grid:
    """Return how rounds are distributed over multiprocessors; a block takes a row or walks rows."""
    of_block = plan.threads / _team(plan)
    most = ceil(plan.grid / gpu.sm_count)
    return Grid(
        plan.rows * plan.number("THREADS_PER_ROW") / _team(plan),
        most * of_block * ceil(_passes(plan)),
        min(blocks_per_sm, most) * of_block,
        plan.grid,
    )


def _round(plan: Plan, gpu: Gpu, found: Counts, grid: Grid) -> Round:
    """Return the round of a block of a row's team, or of a warp that has several rows."""
    traffic, passes, elements = plan.traffic(), _passes(plan), _team(plan) * _share(plan)
    reads = float(traffic.reads)
    resident = grid.at_once * gpu.sm_count * elements * reads
    if plan.regime == STREAMED and resident > ARCHITECTURES[plan.architecture].l2:
        reads = max(reads, found.loaded / _share(plan))
    # The second read of a row comes from L2, unless L2 overflows. Parameters come from L2, too,
    # unless all blocks start together.
    read_twice = 0.0
    if plan.regime == STREAMED:
        read_twice = 1 - min(1.0, reads * _share(plan) / found.loaded)
    row_latency = gpu.latency + read_twice * (gpu.l2_latency - gpu.latency)
    are_first = grid.rounds <= grid.at_once * gpu.sm_count
    parameters = found.parameter_waits + found.waits_once / passes
    return round_of(
        gpu,
        found.work.plus(found.work_once, 1 / passes),
        _team(plan) / 32,
        found.waits * row_latency + parameters * (gpu.latency if are_first else gpu.l2_latency),
        elements * traffic.total,
        Traffic(elements * reads, elements * traffic.writes),
        min(plan.stages, ceil(passes)),
    )


def _team(plan: Plan) -> int:
    """Return the threads that work together: a block, or a warp that has several rows."""
    return max(32, min(plan.threads, plan.number("THREADS_PER_ROW")))


def _share(plan: Plan) -> float:
    """Return the elements of a row for each thread of its team."""
    return int(plan.shape) / plan.number("THREADS_PER_ROW")


def _passes(plan: Plan) -> float:
    """Return the rows that a team walks."""
    return max(1.0, plan.rows / plan.rows_at_once)


def param_grad_of(plan: Plan, sass_of: Sass) -> ParamGrad | None:
    """Return the param_grad launch after a backward, on GPUs of the model, if there is one."""
    launch = plan.param_grad
    if launch is None or plan.architecture not in MODELLED:
        return None
    macros = dict(launch.build.macros)
    sums = [slot for name, slot in _PARTIAL_SUMS if macros[name] != "absent"]
    pointers = frozenset(range(0, 32, 8))
    sass = sass_of(launch.build, plan.architecture)
    of_thread = plan.parts / int(macros["PART_THREADS"])
    at_once = [max(1.0, loads_at_once(sass, plan.architecture, slot, pointers)) for slot in sums]
    serial = sum(max(1.0, of_thread / count) for count in at_once)
    itemsize = 8 if macros["COMPUTE_T"] == "fp64" else 4
    return ParamGrad(len(sums) * plan.parts * plan.sums_pitch * itemsize, serial)
