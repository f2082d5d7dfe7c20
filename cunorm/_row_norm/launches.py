# SPDX-License-Identifier: MIT
"""Launch plans of the row norms, on a GPU and on a CPU."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from cunorm._core.build import KernelBuild, Launch, Macros, cpu_stores, cuda_bool
from cunorm._core.caps import MAX_SMS, MIN_ASYNC_COPY_BYTES, CpuCaps, GpuCaps
from cunorm._core.dtypes import FLOAT32, DType
from cunorm._core.param_grad import CPU_PACK
from cunorm._core.plan import GRID_LIMIT
from cunorm._row_norm.geometry import RowShape
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes, RowTypes
from cunorm._row_norm.tiling import Team, blocks_with_room, cuda_team

# The most blocks of a backward on a multiprocessor, by the most columns of a block: each writes
# partial sums of its columns, which param_grad reads.
_BLOCKS_PER_SM = ((1024, 8), (2048, 4), (4096, 2))
# The most rows on their way to shared memory, their bytes wanted on a multiprocessor, and the most
# copies of a thread for an operand's row, as each takes registers.
_MOST_STAGES, _STAGED_BYTES, _MOST_COPIES = 4, 40 << 10, 12
# Bytes of a block's shared memory for the driver and the kernel's own variables, and those that
# each warp of a cluster sends, as wide as float64.
_RESERVED_BYTES, _SENT_BYTES = 2 << 10, 48


def cuda_forward(
    types: ForwardTypes, where: RowShape, access: int, gpu: GpuCaps, axes: int = 1
) -> Launch:
    """Plan row_norm_forward; alignment allows `access` elements (see `vector_width`)."""
    team = _team(types, where.width, gpu)
    blocks_of_all = where.groups * team.cluster
    parts = min(-(-where.rows // team.rows_per_block), GRID_LIMIT // blocks_of_all)
    if where.width > team.chunk:
        blocks = _streamed_blocks(types, where.width, team, gpu)
        parts = min(parts, max(1, blocks // blocks_of_all))
    access = min(access, team.pack)
    if access < team.pack or axes > 1:  # loads in parts, or from anywhere, take more registers
        team = team._replace(blocks_per_sm=-(-team.blocks_per_sm // 2))
    macros = types.macros() + team.macros(where.width, where.groups, access, axes)
    return Launch(KernelBuild("row_norm_forward", macros), parts * blocks_of_all, team.threads)


def _team(types: RowTypes, width: int, gpu: GpuCaps) -> Team:
    """Return how threads share rows, with no more blocks on a multiprocessor than its threads."""
    team = cuda_team(types, width, gpu.features)
    most = max(1, gpu.max_threads_per_sm // team.threads)
    if int(gpu.compute_capability) >= 100:
        most = min(most, blocks_with_room(types, team))
    return team._replace(blocks_per_sm=min(team.blocks_per_sm, most))


def _streamed_blocks(types: ForwardTypes, width: int, team: Team, gpu: GpuCaps) -> int:
    """Return how many blocks stream rows: two on each multiprocessor, if they fit.

    There is one where the second passes of two blocks' rows would miss the cache.
    """
    read_again = (types.new_residual or types.x, types.gate)
    of_block = width * sum(dtype.itemsize for dtype in read_again if dtype) // team.cluster
    are_cached = 2 * gpu.sm_count * of_block <= gpu.l2_bytes // 2
    return gpu.sm_count * (2 if are_cached and team.blocks_per_sm > 1 else 1)


def cuda_backward(
    types: BackwardTypes, where: RowShape, access: int, gpu: GpuCaps, axes: int = 1
) -> Launch:
    team = _team(types, where.width, gpu)
    access = min(access, team.pack)
    sums = (types.dweight or types.dbias) > 0
    blocks = cuda_parts(where, gpu.sm_count, team.cluster) // team.cluster if sums else GRID_LIMIT
    memory = _shared_memory(types, team, where.width, access, gpu)
    while team.rows_per_block > 1 and not memory.sums:  # its teams meet in shared memory
        team = team._replace(blocks_per_sm=team.blocks_per_sm - 1)
        memory = _shared_memory(types, team, where.width, access, gpu)
    blocks = min(blocks, gpu.sm_count * team.blocks_per_sm // (where.groups * team.cluster))
    parts = min(-(-where.rows // team.rows_per_block), max(1, blocks))
    macros = (
        *types.macros(),
        *team.macros(where.width, where.groups, access, axes),
        ("STAGES", str(memory.stages)),
        ("SUMS_IN_SHARED", cuda_bool(memory.sums)),
    )
    return Launch(
        KernelBuild("row_norm_backward", macros),
        parts * where.groups * team.cluster,
        team.threads,
        parts,
        where.sums_pitch(twice=where.width > team.chunk and not memory.sums),
        memory.bytes,
    )


class _SharedMemory(NamedTuple):
    """The shared memory that a launch gives to a block of the backward."""

    bytes: int
    stages: int  # rows on their way there
    sums: bool  # over rows


def _shared_memory(
    types: BackwardTypes, team: Team, width: int, access: int, gpu: GpuCaps
) -> _SharedMemory:
    """Return how shared memory is used: for sums first, then for rows to come."""
    sent = team.threads_per_row // 32 * _SENT_BYTES if team.cluster > 1 else 0
    reserved = _RESERVED_BYTES + sent
    left = gpu.shared_memory_per_sm // team.blocks_per_sm - reserved
    left = min(left, gpu.shared_memory_per_block_optin - reserved)
    is_streamed = width > team.chunk
    held = -(-width // team.chunk) * team.chunk // team.cluster * team.rows_per_block
    sums = held * (types.dweight + types.dbias) * types.compute.itemsize
    in_shared = sums <= left
    used = sums if in_shared else 0
    inputs = (types.dy, types.x, types.gate, types.d_residual)
    itemsizes = [dtype.itemsize for dtype in inputs if dtype is not None]
    stage = held * sum(itemsizes)
    copies = team.packs * team.pack // access
    is_copied = access * min(itemsizes) >= MIN_ASYNC_COPY_BYTES and copies <= _MOST_COPIES
    if is_streamed or not gpu.features.async_copies or not is_copied:
        return _SharedMemory(used, 0, in_shared)
    wanted = min(_MOST_STAGES, -(-_STAGED_BYTES // (stage * team.blocks_per_sm)))
    stages = max(0, min(wanted, (left - used) // stage))
    return _SharedMemory(used + stages * stage, stages, in_shared)


def cuda_parts(where: RowShape, sm_count: int, cluster: int = 1) -> int:
    """Return the most blocks of a group, each of which has columns of a row of partial sums.

    With a cluster of one that is the most rows of partial sums.
    """
    width = where.width // cluster
    blocks_per_sm = next((blocks for limit, blocks in _BLOCKS_PER_SM if width <= limit), 1)
    return max(1, min(sm_count, MAX_SMS) * blocks_per_sm // where.groups)


# --- on a CPU -------------------------------------------------------------------------------------

CPU_TEAM = Team(threads=1, threads_per_row=1, pack=CPU_PACK, packs=16)
_CPU_BLOCKS = 256  # the most runs of rows that threads share; no result depends on it

# Bytes of a row above which both passes of the backward prefetch, and, of more than 2 bytes an
# element, where all rows take as much as the last cache: measured, 2 cores, 32 MiB cache.
_SHORT_ROW, _SHORT_ROW_OF_MANY = 8 << 10, 256
# Bytes of a row above which the next rows are not prefetched, for two inputs without a gate or not,
# by the bytes of an element: measured, 2 cores, 480 MiB cache; the first one with 32 MiB.
_WIDE_ROW = {True: {2: 384 << 10, 4: 48 << 10}, False: {2: 512 << 10, 4: 128 << 10}}

# Bytes of a row that a thread keeps for its next pass; how many of the widest such rows it takes at
# once in a backward (`rows_at_once`); and activations that compute as fast as they load.
_KEPT_BYTES, _KEPT_ROWS, _QUICK = 128 << 10, 2, ("identity", "relu")
_SHORT_KEPT_ROW = 2 << 10  # bytes above which both passes of a forward that keeps them prefetch

# Packs of a chunk, and chunks of a part of a row that cores share, as in host/reduce.cuh. They
# share at most so many rows, of at least so many parts; other rows have partial sums for so many
# threads.
_CHUNK, _PART_CHUNKS = 16, 8
CPU_SHARED_ROWS, _FEWEST_ROW_PARTS, _FEWEST_SUMS = 15, 3, 4


def cpu_launch(types: RowTypes, where: RowShape, caps: CpuCaps) -> tuple[Launch, int]:
    """Plan a kernel; return also the parts of each row, if threads share rows, else 0.

    Of a forward each row is a block then; those of a backward are one, with one row of sums.
    """
    if isinstance(types, ForwardTypes):
        launch, grid = cpu_forward(types, where, caps), where.rows * where.groups
    else:
        launch, grid = cpu_backward(types, where.not_empty(), caps), where.groups
    begins_with_pack = isinstance(types, ForwardTypes) and types.formula.center
    parts = cpu_row_parts(where, launch.grid, begins_with_pack=begins_with_pack)
    if not parts:
        return launch, 0
    build = KernelBuild(launch.build.kernel, (*launch.build.macros, ("SHARED_ROWS", "true")))
    return replace(launch, build=build, grid=grid), parts


def cpu_forward(types: ForwardTypes, where: RowShape, caps: CpuCaps) -> Launch:
    macros = types.macros() + CPU_TEAM.macros(width=0, groups=0, access=1)
    macros += _cpu_rows(where, types.x, types.gate is None and types.residual is not None)
    macros += _cpu_stores(types, where, [types.y], caps)  # a new residual is read again
    if types.formula.pre_gate:
        kept = _cpu_kept(types, where, types.compute.itemsize, rows=1)
        is_long = kept and where.width * types.x.itemsize > _SHORT_KEPT_ROW
        macros += kept + ((("LONG_IF_HELD", "true"),) if is_long else ())
    build = KernelBuild("row_norm_forward", macros)
    return Launch(build, min(where.rows, _CPU_BLOCKS) * where.groups, 1)


def cpu_row_parts(where: RowShape, blocks: int, *, begins_with_pack: bool) -> int:
    """Return the parts into which `Row` cuts rows that threads share, else 0.

    They share a few long rows which have as many parts as there would be blocks. None is empty: in
    Kahan's sum a zero may count.
    """
    packs, cut = divmod(where.width, CPU_PACK)
    chunks = begins_with_pack - -packs // _CHUNK + bool(cut)
    parts = -(-chunks // _PART_CHUNKS)
    is_few = 0 < where.rows * where.groups <= CPU_SHARED_ROWS
    return parts if is_few and parts >= max(blocks, _FEWEST_ROW_PARTS) else 0


def cpu_backward(types: BackwardTypes, where: RowShape, caps: CpuCaps) -> Launch:
    row = types.x or types.dy
    macros = types.macros() + CPU_TEAM.macros(width=0, groups=0, access=1)
    macros += (("STAGES", "0"), ("SUMS_IN_SHARED", "false"))
    macros += _cpu_rows(where, row, types.gate is None)
    are_many = row.itemsize > 2 and where.elements * row.itemsize >= caps.last_cache_bytes
    if where.width * row.itemsize > (_SHORT_ROW_OF_MANY if are_many else _SHORT_ROW):
        macros += (("LONG_PASSES", "true"),)
    macros += _cpu_stores(types, where, [types.dx, types.dresidual, types.dgate], caps)
    if types.dgate is not None:
        macros += _cpu_kept(types, where, 2 * types.compute.itemsize, _KEPT_ROWS)
    parts = cpu_sums(where) if types.dweight or types.dbias else min(where.rows, _CPU_BLOCKS)
    build = KernelBuild("row_norm_backward", macros)
    return Launch(build, parts * where.groups, 1, parts, where.sums_pitch(twice=True))


def _cpu_stores(
    types: RowTypes, where: RowShape, results: Sequence[DType | None], caps: CpuCaps
) -> Macros:
    moved = [getattr(types, name) for name in types.rows]
    return cpu_stores(moved, results, where.elements, where.width, types.compute, caps)


def _cpu_rows(where: RowShape, row: DType, two_inputs: bool) -> Macros:
    """Return the macro of rows too wide to prefetch the next one."""
    widest = _WIDE_ROW[two_inputs].get(row.itemsize)
    is_wide = widest is not None and where.width * row.itemsize > widest
    return (("WIDE_ROWS", "true"),) if is_wide else ()


def _cpu_kept(types: RowTypes, where: RowShape, itemsize: int, rows: int) -> Macros:
    """Return the macro of rows whose activations a thread keeps, as they are slow to compute."""
    packs = _KEPT_BYTES // (CPU_PACK * itemsize)
    has_gate = types.gate is not None and types.compute is FLOAT32
    is_slow = has_gate and types.formula.activation not in _QUICK
    is_kept = is_slow and where.width <= packs * CPU_PACK
    return (("HELD_PACKS", str(rows * packs)),) if is_kept else ()


def cpu_sums(where: RowShape) -> int:
    """Return the number of rows of partial sums: enough to share, few enough to cost nothing.

    Rows that threads share have one.
    """
    enough_to_share = min(where.rows, max(_FEWEST_SUMS, min(32, where.rows // 32)))
    sums = max(enough_to_share, -(-where.rows // 256))
    are_shared = cpu_row_parts(where, sums * where.groups, begins_with_pack=False)
    return 1 if are_shared else sums
