# SPDX-License-Identifier: MIT
"""Columns of the static table from the SASS of a plan, with predictions for the model's GPUs.

`instructions` are a thread's instructions for each of its elements of x. If the blocks of a row
norm walk several rows, the instructions that run once are divided among these rows.
"""

from __future__ import annotations

from math import ceil, prod

from bench.plans.compiled import compiled
from bench.plans.model import (
    ARCHITECTURES,
    L1_CLOCKS,
    LAUNCH,
    Gpu,
    Traffic,
    Work,
    between,
    copy_time,
    l2_keeps,
    occupancy,
    param_grad_time,
)
from bench.plans.plan import PARAM_GRAD, STREAMED, Plan
from bench.plans.reads import MIN_BYTES, Counts, Operands, Packs, executed, loads_at_once, read
from bench.plans.rounds import Grid, Round, prediction, round_of, seconds
from bench.plans.sass import traced

Columns = dict[str, str]
_PARTIAL_SUMS = (("DWEIGHT_T", 0), ("DBIAS_T", 8))  # macros; offsets of param_grad's pointers


def speed(plan: Plan, gpu: Gpu | None) -> Columns:
    """Return the columns of a launch, and of its call if this is the last launch but param_grad.

    Without a GPU, only counts are there. Packs of a group norm that are too small have no counts.
    """
    if plan.regime == PARAM_GRAD or not blocks_per_sm(plan):
        return {}
    of_kernel = _of_rows if plan.build.kernel.startswith("row_norm") else _of_groups
    return of_kernel(plan, gpu)


def blocks_per_sm(plan: Plan) -> int:
    """Return how many blocks of a launch fit a multiprocessor."""
    usage = compiled(plan.build, plan.architecture)
    limits = ARCHITECTURES[plan.architecture]
    return occupancy(limits, plan.threads, usage.registers, usage.shared + plan.launch.shared)


def narrowest_access(plan: Plan) -> int:
    """Return the bytes of the narrowest access to arrays as large as x; 0 without such arrays.

    Accesses that may also be to other arrays, such as statistics, do not count. Nearly every array
    as large as x has others.
    """
    sass = compiled(plan.build, plan.architecture).sass
    _, found = traced(sass, plan.architecture, plan.pointers)
    rows = plan.row_operands.keys()
    return min((one.bytes for one, slots in found.items() if slots and slots <= rows), default=0)


def _predictions(gpu: Gpu, launch: tuple[Round, Grid], moved: float, time: float) -> Columns:
    """Return the predictions of a launch and, if it has a time, of its call, which moves bytes."""
    share, limit = prediction(gpu, *launch)
    columns = {"prediction": f"{share:.3f}", "limit": limit}
    if time:
        columns["call_prediction"] = f"{min(1.0, copy_time(gpu, moved) / time):.3f}"
        columns["microseconds"] = f"{1e6 * time:.1f}"
    return columns


# --- row norms ------------------------------------------------------------------------------------


def _of_rows(plan: Plan, gpu: Gpu | None) -> Columns:
    rows = {slot: dtype.itemsize for slot, (_, dtype) in plan.row_operands.items()}
    operands = Operands(rows, plan.parameters, plan.pointers, _share(plan))
    found = read(compiled(plan.build, plan.architecture).sass, plan.architecture, operands)
    if found.work.total == 0 or (found.loaded == 0 and not plan.number("STAGES", 0)):
        raise ValueError(f"no loads of a row were found in the SASS of {plan}")
    instructions = found.work.plus(found.work_once, 1 / _passes(plan)).total / _share(plan)
    columns = {"late_loads": str(found.late_loads), "instructions": f"{instructions:.1f}"}
    if gpu is None:
        return columns
    grid = _grid(plan, gpu)
    launch = _round(plan, gpu, found, grid), grid
    moved = plan.rows * plan.row_width * plan.traffic.total
    time = LAUNCH + seconds(gpu, *launch) + _param_grad(plan, gpu)
    return columns | _predictions(gpu, launch, moved, time)


def _grid(plan: Plan, gpu: Gpu) -> Grid:
    """Return how rounds are distributed over multiprocessors; a block takes a row or walks rows."""
    of_block = plan.threads / _team(plan)
    most = ceil(plan.launch.grid / gpu.sm_count)
    return Grid(
        plan.rows * plan.number("THREADS_PER_ROW") / _team(plan) / plan.pack_rows,
        most * of_block * ceil(_passes(plan)),
        min(blocks_per_sm(plan), most) * of_block,
        plan.launch.grid,
    )


def _round(plan: Plan, gpu: Gpu, found: Counts, grid: Grid) -> Round:
    """Return the round of a block of a row's team, or of a warp that has several rows."""
    traffic, passes, elements = plan.traffic, _passes(plan), _team(plan) * _share(plan)
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
    of_parameters = gpu.latency if are_first else gpu.l2_latency
    if plan.is_strided:  # the rows of a block share each element
        of_parameters = L1_CLOCKS / gpu.clock
    parameters = found.parameter_waits + found.waits_once / passes
    return round_of(
        gpu,
        found.work.plus(found.work_once, 1 / passes),
        _team(plan) / 32,
        found.waits * row_latency + parameters * of_parameters,
        elements * traffic.total,
        Traffic(elements * reads, elements * traffic.writes),
        min(plan.number("STAGES", 0), ceil(passes)),
    )


def _team(plan: Plan) -> int:
    """Return the threads that work together: a block, or a warp that has several rows."""
    if plan.is_strided:
        return plan.threads
    return max(32, min(plan.threads, plan.number("THREADS_PER_ROW")))


def _share(plan: Plan) -> float:
    """Return the elements of a row, or of its rows, for each thread of a team."""
    return plan.row_width * plan.pack_rows / plan.number("THREADS_PER_ROW")


def _passes(plan: Plan) -> float:
    """Return the rows that a team walks."""
    teams = plan.launch.grid * plan.threads / plan.number("THREADS_PER_ROW")
    return max(1.0, plan.rows / (teams * plan.pack_rows))


def _param_grad(plan: Plan, gpu: Gpu) -> float:
    """Return the seconds of the param_grad launch after a backward, 0 if there is none."""
    launch, architecture = plan.param_grad, plan.architecture
    if launch is None:
        return 0.0
    macros = dict(launch.build.macros)
    sums = [slot for name, slot in _PARTIAL_SUMS if macros[name] != "absent"]
    pointers = frozenset(range(0, 32, 8))
    sass, parts = compiled(launch.build, architecture).sass, plan.launch.parts
    of_thread = parts / int(macros["PART_THREADS"])
    at_once = [max(1.0, loads_at_once(sass, architecture, slot, pointers)) for slot in sums]
    serial = sum(max(1.0, of_thread / count) for count in at_once)
    itemsize = 8 if macros["COMPUTE_T"] == "fp64" else 4
    return param_grad_time(gpu, len(sums) * parts * plan.launch.sums_pitch * itemsize, serial)


# --- group norms ----------------------------------------------------------------------------------


def _of_groups(plan: Plan, gpu: Gpu | None) -> Columns:
    found = _executed(plan)
    if found is None:
        return {}
    instructions = found.total * plan.threads / block_elements(plan)
    columns = {"instructions": f"{instructions:.1f}"}
    if gpu is None:
        return columns
    launches = [_launch(one, gpu) for one in (plan.before, plan) if one is not None]
    if plan.step == "find":
        return columns | _predictions(gpu, launches[-1], 0, 0)
    times = [seconds(gpu, *one) for one in launches]
    of_chunk = LAUNCH + between(gpu) * (len(times) - 1) + sum(times)
    time = ceil(plan.rows / plan.chunk) * of_chunk + _param_grad(plan, gpu)
    moved = plan.rows * _sample_elements(plan) * call_traffic(plan).total
    return columns | _predictions(gpu, launches[-1], moved, time)


def call_traffic(plan: Plan) -> Traffic:
    """Return the necessary bytes of a group norm's call for each element of x.

    If the call has two launches and L2 does not keep a sample, the reads count twice.
    """
    reads_twice = plan.before is not None and not _fits_l2(plan, 1)
    return Traffic(plan.traffic.reads * (2 if reads_twice else 1), plan.traffic.writes)


def block_elements(plan: Plan) -> float:
    """Return the mean number of elements of x in a group norm's block."""
    return plan.chunk * _sample_elements(plan) / plan.launch.grid


def _executed(plan: Plan) -> Work | None:
    """Return the work of a warp; None if packs are too small."""
    pack = plan.number("PACK")
    sizes = {slot: pack * dtype.itemsize for slot, (_, dtype) in plan.row_operands.items()}
    if min(sizes.values()) < MIN_BYTES:
        return None
    sharing = plan.number("CHANNEL_THREADS") * plan.number("POSITION_THREADS")
    packs = Packs(sizes, pack * plan.traffic.reads, block_elements(plan) / sharing / pack)
    sass = compiled(plan.build, plan.architecture).sass
    return executed(sass, plan.architecture, plan.pointers, packs)


def _launch(plan: Plan, gpu: Gpu) -> tuple[Round, Grid]:
    """Return the work of a block, and how blocks are distributed over multiprocessors."""
    found = _executed(plan)
    assert found is not None  # packs of both launches are equal
    traffic, elements = plan.traffic, block_elements(plan)
    from_l2 = plan.before is not None and _fits_l2(plan, plan.chunk)
    writes = 0 if plan.step == "find" else traffic.writes
    moved = Traffic(0 if from_l2 else elements * traffic.reads, elements * writes)
    waits = gpu.latency
    if from_l2:
        waits = gpu.l2_latency + elements * traffic.reads / (gpu.sm_bytes * gpu.clock)
    one = round_of(gpu, found, plan.threads / 32, waits, moved.total, moved)
    most = ceil(plan.launch.grid / gpu.sm_count)
    return one, Grid(plan.launch.grid, most, min(blocks_per_sm(plan), most), plan.launch.grid)


def _fits_l2(plan: Plan, samples: int) -> bool:
    """Whether L2 keeps the arrays that a launch reads for that many samples."""
    return l2_keeps(plan.architecture, samples * _sample_elements(plan) * plan.traffic.reads)


def _sample_elements(plan: Plan) -> int:
    return prod(map(int, plan.shape.split("x")))
