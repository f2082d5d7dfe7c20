# SPDX-License-Identifier: MIT
"""Columns of the static table from the SASS of a plan.

`instructions` are a warp's instructions for one row, times 32 over the warp's elements of the row:
a thread's instructions for each element. If blocks walk several rows, the instructions that run
once are spread over these; a forward's block takes one row.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.model import GPUS, Gpu, ParamGrad, call_prediction, overlap_share, shares
from bench.static_groups import speed_of_groups
from bench.static_occupancy import ARCHITECTURES
from bench.static_plan import PARAM_GRAD, STREAMED, Plan
from bench.static_reads import Counts, Operands, loads_at_once, read
from cunorm._core.build import KernelBuild

COLUMNS = (
    *("late_loads", "instructions", "bytes_in_flight", "issue_share", "latency_share"),
    *("traffic_share", "overlap_share", "prediction", "call_prediction"),
)
_PARTIAL_SUMS = (("DWEIGHT_T", 0), ("DBIAS_T", 8))  # types, and offsets of param_grad's sums

Sass = Callable[[KernelBuild, str], str]


def speed(plan: Plan, blocks_of: Callable[[Plan], int], sass_of: Sass) -> dict[str, str]:
    """Return the columns; unknown ones are empty.

    Parameters
    ----------
    plan
        A launch.
    blocks_of
        Returns how many of a launch's blocks fit a multiprocessor.
    sass_of
        Returns the disassembly of a build on an architecture; empty without a disassembler.
    """
    columns = dict.fromkeys(COLUMNS, "")
    blocks_per_sm, sass = blocks_of(plan), sass_of(plan.build, plan.architecture)
    if not sass or plan.regime == PARAM_GRAD or not blocks_per_sm:
        return columns
    if not plan.is_row_norm:
        return columns | speed_of_groups(
            plan,
            lambda one: sass_of(one.build, one.architecture),
            blocks_of,
            param_grad_of(plan, sass_of),
        )
    share = _width(plan) / plan.number("THREADS_PER_ROW")
    rows = {place: dtype.itemsize for place, (_, dtype) in plan.row_operands().items()}
    others = plan.pointers() - plan.parameters() - set(rows)
    found = read(sass, plan.architecture, Operands(rows, plan.parameters(), others, share))
    if found.instructions == 0 or (found.loaded == 0 and plan.stages == 0):
        raise ValueError(f"no loads of a row were found in the SASS of {plan}")
    passes = max(1.0, plan.rows / plan.rows_at_once)
    instructions = (found.instructions + found.instructions_once / passes) / share
    in_flight = _bytes_in_flight(plan, found, share, blocks_per_sm)
    columns |= {
        "late_loads": str(found.late_loads),
        "instructions": f"{instructions:.1f}",
        "bytes_in_flight": f"{in_flight:.0f}",
    }
    return columns | _prediction_columns(
        plan, found, instructions, in_flight, blocks_per_sm, sass_of
    )


def _prediction_columns(
    plan: Plan,
    found: Counts,
    instructions: float,
    in_flight: float,
    blocks_per_sm: int,
    sass_of: Sass,
) -> dict[str, str]:
    gpu = GPUS.get(plan.architecture)
    if gpu is None:
        return {}
    traffic = plan.traffic()
    resident = plan.threads * _resident(plan, blocks_per_sm) * gpu.sm_count
    resident *= _width(plan) / plan.number("THREADS_PER_ROW") * traffic.reads
    reads = float(traffic.reads)
    if plan.regime == STREAMED and resident > ARCHITECTURES[plan.architecture].l2:
        reads = max(reads, found.loaded / (_width(plan) / plan.number("THREADS_PER_ROW")))
    ceilings = shares(gpu, traffic, instructions, in_flight, reads)
    columns = {
        "issue_share": f"{ceilings.issue:.2f}",
        "latency_share": f"{ceilings.latency:.2f}",
        "traffic_share": f"{ceilings.traffic:.2f}",
        "overlap_share": f"{_overlap(plan, gpu, found, blocks_per_sm):.2f}",
        "prediction": f"{ceilings.prediction:.3f}",
    }
    if plan.direction == "backward":
        params = param_grad_of(plan, sass_of)
        whole = call_prediction(gpu, traffic, ceilings.prediction, params)
        columns["call_prediction"] = f"{whole:.3f}"
    return columns


def _bytes_in_flight(plan: Plan, found: Counts, share: float, blocks_per_sm: int) -> float:
    """Return the bytes of reads in flight on a multiprocessor.

    A row's reads take as many latencies as the thread waits for them. The copies of staged rows
    take one latency, which the rows in flight share.
    """
    threads = plan.threads * _resident(plan, blocks_per_sm)
    if plan.stages == 0:
        return threads * found.loaded / max(1.0, found.waits)
    loaded = share * plan.traffic().reads
    return threads * loaded / max((1 + found.waits) / plan.stages, found.waits)


def _overlap(plan: Plan, gpu: Gpu, found: Counts, blocks_per_sm: int) -> float:
    """Return the share of copy speed if each block waits, then computes, and blocks overlap."""
    passes = max(1.0, plan.rows / plan.rows_at_once)
    warps = plan.threads / 32
    issued = (found.instructions + found.instructions_once / passes) * max(1.0, warps / 4)
    period = max(1.0, found.waits) * gpu.latency + issued / gpu.clock
    read = _width(plan) / plan.number("THREADS_PER_ROW") * plan.traffic().reads
    if plan.stages:
        period = found.waits * gpu.latency + issued / gpu.clock
        period = max((gpu.latency + period) / plan.stages, period)
    of_sm = plan.threads * _resident(plan, blocks_per_sm)
    return overlap_share(gpu, plan.traffic(), of_sm * read, period)


def _resident(plan: Plan, blocks_per_sm: int) -> float:
    """Return the blocks on a multiprocessor: as many as fit, or the grid's share of them."""
    return min(blocks_per_sm, plan.grid / ARCHITECTURES[plan.architecture].sm_count)


def param_grad_of(plan: Plan, sass_of: Sass) -> ParamGrad | None:
    """Return the param_grad launch after a backward, if there is one and the model has the GPU."""
    launch = plan.param_grad
    if launch is None or plan.architecture not in GPUS:
        return None
    macros = dict(launch.build.macros)
    sums = [place for name, place in _PARTIAL_SUMS if macros[name] != "absent"]
    pointers = frozenset(range(0, 32, 8))
    sass = sass_of(launch.build, plan.architecture)
    of_thread = plan.parts / int(macros["PART_THREADS"])
    at_once = [max(1.0, loads_at_once(sass, plan.architecture, place, pointers)) for place in sums]
    serial = sum(max(1.0, of_thread / count) for count in at_once)
    itemsize = 8 if macros["COMPUTE_T"] == "fp64" else 4
    return ParamGrad(len(sums) * plan.parts * plan.sums_pitch * itemsize, serial)


def _width(plan: Plan) -> int:
    return int(plan.shape)
