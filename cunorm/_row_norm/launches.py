# SPDX-License-Identifier: MIT
"""The launch plans of row norms on a GPU and on a CPU."""

import math
from collections.abc import Callable
from typing import NamedTuple

from cunorm._core.build import KernelBuild, Launch, Macros, cuda_bool, streaming_stores
from cunorm._core.caps import MAX_SMS, MIN_ASYNC_COPY_BYTES, CpuCaps, GpuCaps
from cunorm._core.dtypes import FLOAT32, DType
from cunorm._core.param_grad import CPU_PACK
from cunorm._core.plan import GRID_LIMIT
from cunorm._row_norm.geometry import RowShape
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes, RowTypes
from cunorm._row_norm.registers import room_of
from cunorm._row_norm.tiling import Team, cuda_team

# (columns of a block, blocks): a backward that sums over rows, with at most so many columns in a
# block, has at most so many blocks on a multiprocessor, because each block writes a row of sums.
_BLOCKS_PER_SM = ((1024, 8), (2048, 4), (4096, 2))
_PART_ROWS = 32  # the fewest rows of a segment that a GPU's block adds up
_CPU_PART_ROWS = 16  # and a CPU's core
_MAX_STAGES = 4  # the most rows on their way to shared memory
_STAGED_BYTES = 40 << 10  # the bytes of such rows that a multiprocessor should have
_MAX_COPIES = 12  # the most copies of a thread for an operand's row; each copy takes registers
_RESERVED_BYTES = 2 << 10  # bytes of a block's shared memory for the driver and variables
_SENT_BYTES = 48  # bytes that a warp of a cluster sends: in each of two turns three float64 values


class RowsOf(NamedTuple):
    """What a launch needs to know of parameters that have several rows."""

    macros: Macros = ()
    segments: int | None = None  # of a backward; None if all rows share their parameters

    @property
    def number(self) -> int:
        return 1 if self.segments is None else max(1, self.segments)


_SHARED = RowsOf()


class RowLaunch(NamedTuple):
    """A launch, and how the launch depends on the number of rows."""

    launch: Launch
    # Takes a number of rows; returns the number of runs into which they are cut, the parts of each
    # row if a CPU's threads share rows (else 0), and the macros that depend on the number of rows.
    # Numbers of rows with equal macros have the same build.
    cut: Callable[[int], tuple[int, int, Macros]]
    blocks_per_part: int  # the blocks of a run


def cuda_forward(
    types: ForwardTypes,
    shape: RowShape,
    access: int,
    gpu: GpuCaps,
    axes: int = 1,
    rows_of: RowsOf = _SHARED,
) -> RowLaunch:
    """Plan row_norm_forward; alignment allows `access` elements (see `Kernel.access_to`)."""
    team = _team(types, shape.width, gpu)
    access, blocks_per_part = min(access, team.pack), shape.groups * team.cluster
    max_parts = GRID_LIMIT // blocks_per_part
    if shape.width > team.chunk:
        blocks = _streamed_blocks(types, shape.width, team, gpu)
        max_parts = min(max_parts, max(1, blocks // blocks_per_part))
    if access < team.pack or axes > 1:  # loads in parts, or from several axes, need more registers
        team = team._replace(blocks_per_sm=-(-team.blocks_per_sm // 2))
    macros = types.macros() + team.macros(shape.width, shape.groups, access, axes) + rows_of.macros
    return _cuda_launch(KernelBuild("row_norm_forward", macros), team, shape, max_parts)


def _cuda_launch(
    build: KernelBuild,
    team: Team,
    shape: RowShape,
    max_parts: int,
    sums_pitch: int = 0,
    shared: int = 0,
    segments: int = 1,
) -> RowLaunch:
    """Return a launch of at most `max_parts` runs of rows; without partial sums the pitch is 0.

    Each of the segments has so many runs.
    """

    def cut(rows: int) -> tuple[int, int, Macros]:
        return min(-(-rows // team.rows_per_block), max_parts), 0, ()

    (parts, *_), blocks_per_part = cut(shape.rows), shape.groups * team.cluster * segments
    sums = (parts * segments if sums_pitch else 0, sums_pitch)
    launch = Launch(build, parts * blocks_per_part, team.threads, *sums, shared)
    return RowLaunch(launch, cut, blocks_per_part)


def _team(types: RowTypes, width: int, gpu: GpuCaps) -> Team:
    """Return how threads share rows; limit `blocks_per_sm` to what a multiprocessor can run."""
    team = cuda_team(types, width, gpu.features)
    most = max(1, gpu.max_threads_per_sm // team.threads)
    if int(gpu.compute_capability) >= 100:
        # There, a forward takes two registers more (in float64 four) than on GPUs below 10.0.
        more = types.compute.itemsize // 2 if isinstance(types, ForwardTypes) else 0
        most = min(most, max(1, room_of(team.registers + more, team.threads)))
    return team._replace(blocks_per_sm=min(team.blocks_per_sm, most))


def _streamed_blocks(types: ForwardTypes, width: int, team: Team, gpu: GpuCaps) -> int:
    """Return how many blocks stream rows: two on each multiprocessor, if two fit.

    There is only one if the rows of two blocks would not stay in L2 until their second pass.
    """
    read_again = (types.residual_out or types.x, types.gate)
    of_block = width * sum(dtype.itemsize for dtype in read_again if dtype) // team.cluster
    are_cached = 2 * gpu.sm_count * of_block <= gpu.l2_bytes // 2
    return gpu.sm_count * (2 if are_cached and team.blocks_per_sm > 1 else 1)


def cuda_backward(
    types: BackwardTypes,
    shape: RowShape,
    access: int,
    gpu: GpuCaps,
    axes: int = 1,
    rows_of: RowsOf = _SHARED,
) -> RowLaunch:
    team = _team(types, shape.width, gpu)
    access = min(access, team.pack)
    sums = types.sum_count > 0
    most = cuda_parts(shape, gpu.sm_count, team.cluster, has_segments=rows_of.segments is not None)
    blocks = most // team.cluster if sums else GRID_LIMIT
    shared = _shared_memory(types, team, shape.width, access, gpu)
    while team.rows_per_block > 1 and not shared.sums:  # several teams need sums in shared memory
        team = team._replace(blocks_per_sm=team.blocks_per_sm - 1)
        shared = _shared_memory(types, team, shape.width, access, gpu)
    resident = gpu.sm_count * team.blocks_per_sm // (shape.groups * team.cluster)
    macros = (
        *types.macros(),
        *team.macros(shape.width, shape.groups, access, axes),
        ("STAGES", str(shared.stages)),
        ("SUMS_IN_SHARED", cuda_bool(shared.sums)),
        *rows_of.macros,
    )
    build, parts = KernelBuild("row_norm_backward", macros), max(1, min(blocks, resident))
    pitch = shape.sums_pitch(twice=shape.width > team.chunk and not shared.sums)
    return _cuda_launch(build, team, shape, parts, pitch, shared.bytes, rows_of.number)


class _SharedMemory(NamedTuple):
    """The shared memory that a launch gives to a block of the backward."""

    bytes: int
    stages: int  # the rows on their way to shared memory
    sums: bool  # whether the sums over rows are in shared memory


def _shared_memory(
    types: BackwardTypes, team: Team, width: int, access: int, gpu: GpuCaps
) -> _SharedMemory:
    """Return the use of shared memory: first for sums, then for the next rows."""
    sent = team.threads_per_row // 32 * _SENT_BYTES if team.cluster > 1 else 0
    reserved = _RESERVED_BYTES + sent
    left = gpu.shared_memory_per_sm // team.blocks_per_sm - reserved
    left = min(left, gpu.shared_memory_per_block_optin - reserved)
    is_streamed = width > team.chunk
    held = -(-width // team.chunk) * team.chunk // team.cluster * team.rows_per_block
    sums = held * types.sum_count * types.compute.itemsize
    in_shared = sums <= left
    used = sums if in_shared else 0
    inputs = (types.dy, types.x, types.gate, types.dresidual_out, types.branch)
    itemsizes = [dtype.itemsize for dtype in inputs if dtype is not None]
    stage = held * sum(itemsizes)
    copies = team.packs * team.pack // access
    is_copied = access * min(itemsizes) >= MIN_ASYNC_COPY_BYTES and copies <= _MAX_COPIES
    if is_streamed or not gpu.features.async_copies or not is_copied:
        return _SharedMemory(used, 0, in_shared)
    wanted = min(_MAX_STAGES, -(-_STAGED_BYTES // (stage * team.blocks_per_sm)))
    stages = max(0, min(wanted, (left - used) // stage))
    return _SharedMemory(used + stages * stage, stages, in_shared)


def cuda_parts(
    shape: RowShape, sm_count: int, cluster: int = 1, *, has_segments: bool = False
) -> int:
    """Return the most blocks for a group of columns; each block has width / cluster columns.

    For a cluster of 1, this is also the most rows of partial sums. A segment's number depends only
    on its own rows, so that its sums do not depend on other segments.
    """
    width = shape.width // cluster
    blocks_per_sm = next((blocks for limit, blocks in _BLOCKS_PER_SM if width <= limit), 1)
    most = max(1, min(sm_count, MAX_SMS) * blocks_per_sm // shape.groups)
    return min(most, -(-shape.rows // _PART_ROWS) * cluster) if has_segments else most


# --- on a CPU -------------------------------------------------------------------------------------

CPU_TEAM = Team(threads=1, threads_per_row=1, pack=CPU_PACK, packs=16)
_CPU_BLOCKS = 256  # the most runs of rows if there are no sums; no result depends on it

# In rows of more than _SHORT_ROW bytes, both passes of a backward prefetch. _SHORT_ROW_OF_MANY is
# the limit if x is larger than the last cache (measured: 32 MiB) and an element has 4 or 8 bytes.
_SHORT_ROW, _SHORT_ROW_OF_MANY = 8 << 10, 256
# In rows of more bytes, the next rows are not prefetched. True: the inputs are x and residual, or
# those of a backward without a gate. The inner keys are bytes of an element. 384 KiB was
# measured on two cores with 32 MiB of cache, the other limits on two cores with 480 MiB.
_WIDE_ROW = {True: {2: 384 << 10, 4: 48 << 10}, False: {2: 512 << 10, 4: 128 << 10}}
_KEPT_BYTES = 128 << 10  # the most computed bytes of a row that a thread keeps for the next pass
_KEPT_ROWS = 2  # how many rows of _KEPT_BYTES a backward keeps; `rows_at_once` takes so many
_SHORT_KEPT_ROW = 2 << 10  # if a kept row of x has more bytes, both passes of a forward prefetch
_QUICK = ("identity", "relu")  # activations that compute as fast as they load
_CHUNK, _PART_CHUNKS = 16, 8  # packs of a chunk; chunks of a part of a row, as in host/reduce.cuh
CPU_SHARED_ROWS = 15  # the most rows that cores share
_FEWEST_ROW_PARTS = 3  # the fewest parts of a row that cores share
_FEWEST_SUMS = 4  # the fewest rows of partial sums, unless there are fewer rows


class _CpuBuild(NamedTuple):
    """The part of a CPU's build that differs between the directions."""

    macros: Macros
    written: list[DType | None]  # the results that bypass the caches if they are large
    long_elements: float  # both passes prefetch if all rows together have so many elements


def cpu_launch(
    types: RowTypes, shape: RowShape, caps: CpuCaps, rows_of: RowsOf = _SHARED
) -> RowLaunch:
    """Plan a kernel's launch on a CPU.

    If threads share rows, each row is a block of a forward. In a backward, all rows of a group are
    one block, with one row of sums.
    """
    is_forward = isinstance(types, ForwardTypes)
    if isinstance(types, ForwardTypes):
        kernel, has_sums, own = "row_norm_forward", False, _cpu_forward(types, shape)
    else:
        kernel, own = "row_norm_backward", _cpu_backward(types, shape, caps)
        has_sums = types.sum_count > 0
    moved = [getattr(types, name) for name in types.lines()]
    stores = streaming_stores(moved, own.written, shape.width, types.compute, caps)
    begins_with_pack = is_forward and types.formula.center
    row_width, groups = shape.row_width, shape.groups * rows_of.number
    has_segments = rows_of.segments is not None
    least_elements, store_macros = stores

    def cut(rows: int) -> tuple[int, int, Macros]:
        parts = _sums_of(rows, has_segments) if has_sums else min(rows, _CPU_BLOCKS)
        elements, row_parts = rows * row_width * rows_of.number, 0
        macros = store_macros if elements >= least_elements else ()
        if elements >= own.long_elements:
            macros += (("LONG_PASSES", "true"),)
        if rows <= CPU_SHARED_ROWS:
            few = shape._replace(groups=groups)
            row_parts = _row_parts(few, rows, parts * groups, begins_with_pack=begins_with_pack)
        if row_parts:
            parts, macros = rows if is_forward else 1, (*macros, ("SHARED_ROWS", "true"))
        return parts, row_parts, macros

    parts, _, macros = cut(shape.rows)
    macros = (*types.macros(), *CPU_TEAM.macros(width=0, groups=0, access=1), *own.macros, *macros)
    macros += rows_of.macros
    sums = (0, 0) if is_forward else (parts * rows_of.number, shape.sums_pitch(twice=True))
    launch = Launch(KernelBuild(kernel, macros), parts * groups, 1, *sums)
    return RowLaunch(launch, cut, groups)


def _cpu_forward(types: ForwardTypes, shape: RowShape) -> _CpuBuild:
    two_inputs = types.gate is None and types.residual is not None
    macros = _cpu_rows(shape, types.x, two_inputs)
    if types.formula.pre_gate:
        kept = _cpu_kept(types, shape, types.compute.itemsize, rows=1)
        is_long = kept and shape.width * types.x.itemsize > _SHORT_KEPT_ROW
        macros += kept + ((("LONG_IF_HELD", "true"),) if is_long else ())
    return _CpuBuild(macros, [types.y], math.inf)  # without residual_out, which is read again


def _cpu_backward(types: BackwardTypes, shape: RowShape, caps: CpuCaps) -> _CpuBuild:
    row = types.x or types.dy
    row_bytes, long_elements = shape.width * row.itemsize, math.inf
    macros: Macros = (("STAGES", "0"), ("SUMS_IN_SHARED", "false"))
    macros += _cpu_rows(shape, row, types.gate is None)
    if types.dgate is not None and not types.formula.branch_gate:
        macros += _cpu_kept(types, shape, 2 * types.compute.itemsize, _KEPT_ROWS)
    if row_bytes > _SHORT_ROW:
        long_elements = 0
    elif row_bytes > _SHORT_ROW_OF_MANY and row.itemsize > 2:
        long_elements = caps.last_cache_bytes / row.itemsize
    return _CpuBuild(macros, [types.dx, types.dresidual, types.dgate], long_elements)


def cpu_sums(shape: RowShape, *, has_segments: bool = False) -> int:
    """Return the number of rows of partial sums, which is 1 if threads share rows."""
    sums = _sums_of(shape.rows, has_segments)
    blocks = sums * shape.groups
    return 1 if _row_parts(shape, shape.rows, blocks, begins_with_pack=False) else sums


def _sums_of(rows: int, has_segments: bool) -> int:
    """Return a small number of rows of partial sums that is enough for all threads.

    A segment has one row of sums if it has so few rows that threads might share them.
    """
    if has_segments:
        return min(-(-rows // _CPU_PART_ROWS), max(32, -(-rows // 256)))
    for_threads = min(rows, max(_FEWEST_SUMS, min(32, rows // 32)))
    return max(for_threads, -(-rows // 256))


def _row_parts(shape: RowShape, rows: int, blocks: int, *, begins_with_pack: bool) -> int:
    """Return the number of parts into which `Row` cuts each row; 0: threads share no rows.

    Threads share a few long rows if each has at least three parts, and no fewer parts than the
    `blocks` of a launch without sharing. No part is empty: its 0 could change Kahan's sum.
    """
    packs, cut = divmod(shape.width, CPU_PACK)
    chunks = begins_with_pack - -packs // _CHUNK + bool(cut)
    parts = -(-chunks // _PART_CHUNKS)
    is_few = 0 < rows * shape.groups <= CPU_SHARED_ROWS
    return parts if is_few and parts >= max(blocks, _FEWEST_ROW_PARTS) else 0


def _cpu_rows(shape: RowShape, row: DType, two_inputs: bool) -> Macros:
    """Return the macro for rows that are too wide to prefetch the next row."""
    widest = _WIDE_ROW[two_inputs].get(row.itemsize)
    is_wide = widest is not None and shape.width * row.itemsize > widest
    return (("WIDE_ROWS", "true"),) if is_wide else ()


def _cpu_kept(types: RowTypes, shape: RowShape, itemsize: int, rows: int) -> Macros:
    """Return the macro for rows whose slow activations a thread keeps for the next pass."""
    packs = _KEPT_BYTES // (CPU_PACK * itemsize)
    has_gate = types.gate is not None and types.compute is FLOAT32
    is_slow = has_gate and types.formula.activation not in _QUICK
    is_kept = is_slow and shape.width <= packs * CPU_PACK
    return (("HELD_PACKS", str(rows * packs)),) if is_kept else ()
