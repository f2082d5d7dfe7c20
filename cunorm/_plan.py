# SPDX-License-Identifier: MIT
"""What is compiled (Build) and how it is started (Launch), on a GPU and on a CPU.

A plan depends on shapes, dtypes and the device, never on the number of CPU threads; how a row is
cut into packs depends on its width and the operands' dtypes alone, so that a row's result does not
depend on the rows around it, nor on alignment.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from cunorm._builds import (
    BackwardTypes,
    Build,
    ForwardTypes,
    Launch,
    Macros,
    ParamGradTypes,
    cuda_bool,
)
from cunorm._cpu import last_cache_bytes
from cunorm._dtypes import FLOAT32, FLOAT64, DType
from cunorm._features import DeviceLimits
from cunorm._teams import ACCESS_BYTES, Team, cuda_team

CPU_PACK = 64
GRID_LIMIT = 2**31 - 1


class Walk(NamedTuple):
    """The rows that share a statistic each: in every group of columns there are `rows` of them."""

    rows: int
    width: int
    groups: int = 1

    @property
    def elements(self) -> int:
        """Return how many elements x has."""
        return self.rows * self.width * self.groups

    def not_empty(self) -> Walk:
        """Return this, or one row of it where there is none, for a launch plan."""
        return self if self.rows else self._replace(rows=1)


CPU_TEAM = Team(threads=1, threads_per_row=1, pack=CPU_PACK, packs=16)

# Stores past a CPU's caches pay, also for who reads the result next, where rows are whole cache
# lines and the result has such a share of the last cache, by the bytes of an element (of two, a
# store is half a line; of eight there are none), or so many bytes in any case. Measured with two
# cores and 32 MiB of cache, and with 480 MiB.
_LARGE_SHARE, _LARGE_RESULT, _CACHE_LINE = {4: 4, 2: 2}, 32 << 20, 64
# Bytes of a row of x above which the backward prefetches in both of its passes; measured with the
# former.
_SHORT_ROW = 8 << 10
# Bytes of a row of x above which nothing is prefetched of rows to come, by the bytes of an element:
# of two inputs without a gate, and otherwise. Measured with the latter.
_WIDE_ROW = {True: {2: 512 << 10, 4: 48 << 10}, False: {2: 512 << 10, 4: 128 << 10}}

# Bytes of a row that a CPU's thread keeps in one pass for the next (a row that threads share is
# wider); how many of the widest such rows it takes at once in a backward, or twice as many of half
# their width (`rows_at_once`); and activations that take no longer to compute than to load.
_KEPT_BYTES, _KEPT_ROWS, _QUICK = 128 << 10, 2, ("identity", "relu")

# Packs of a chunk, and chunks of a part of a row that a CPU's cores share, as reduce.cuh has them.
# They share rows wider than this, where there are so many at most.
_CHUNK, _PART_CHUNKS = 16, 32
_CPU_SHARED_WIDTH, CPU_SHARED_ROWS = 1 << 16, 15
# Rows of so many have partial sums of their own each, which those that are shared need.
CPU_SHARED_PARTS = 4

# Blocks of the backward on each multiprocessor at most, by the greatest width they serve: each has
# a row of partial sums, which param_grad reads.
_BLOCKS_PER_SM = ((1024, 8), (2048, 4), (4096, 2))
# Rows on their way to shared memory at most, and bytes of them on a multiprocessor, for which there
# are several; an asynchronous copy is of so many bytes at least, and a thread makes so many of an
# operand's row at most, as each takes registers.
_MOST_STAGES, _STAGED_BYTES, _LEAST_COPY, _MOST_COPIES = 4, 40 << 10, 4, 12
# Bytes of a block's shared memory that the driver takes, and what the kernel has beside; and those
# that each warp of a cluster sends, as wide as float64.
_RESERVED, _SENT = 2 << 10, 48
# Threads of param_grad along columns and along parts, by the greatest width.
_PARAM_THREADS = ((2048, (8, 64)), (1 << 31, (32, 16)))
# Multiprocessors that a backward keeps busy at most: no GPU had more when this was written, and
# so memory for partial sums can be planned before it is known on which one they are taken.
MOST_SMS = 256


@lru_cache(maxsize=4096)
def cuda_forward(types: ForwardTypes, where: Walk, access: int, gpu: DeviceLimits) -> Launch:
    """Plan row_norm_forward on a GPU; `access` is what alignment allows (see `common_access`)."""
    team = cuda_team(types, where.width, gpu.features)
    access = min(access, team.pack)
    if access < team.pack:  # what is loaded in parts takes more registers
        team = team._replace(blocks_per_sm=-(-team.blocks_per_sm // 2))
    macros = types.macros() + team.macros(where.width, where.groups, access)
    blocks_of_all = where.groups * team.cluster
    parts = min(-(-where.rows // team.rows_per_block), GRID_LIMIT // blocks_of_all)
    if where.width > team.chunk:
        parts = min(parts, max(1, _streamed_rows(types, where.width, gpu) // blocks_of_all))
    return Launch(Build("row_norm_forward", macros), parts * blocks_of_all, team.threads)


def _streamed_rows(types: ForwardTypes, width: int, gpu: DeviceLimits) -> int:
    """Return how many streamed rows there are at a time: the second pass is to meet the cache."""
    read_again = (types.new_residual or types.x, types.gate)
    row = width * sum(dtype.itemsize for dtype in read_again if dtype is not None)
    return max(gpu.sm_count, min(2 * gpu.sm_count, gpu.l2_bytes // 2 // row))


@lru_cache(maxsize=4096)
def cuda_backward(types: BackwardTypes, where: Walk, access: int, gpu: DeviceLimits) -> Launch:
    """Plan row_norm_backward on a GPU."""
    team = cuda_team(types, where.width, gpu.features)
    access = min(access, team.pack)
    sums = (types.dweight or types.dbias) > 0
    blocks = _cuda_parts(where, gpu.sm_count) // team.cluster if sums else GRID_LIMIT
    blocks = min(blocks, gpu.sm_count * team.blocks_per_sm // (where.groups * team.cluster))
    parts = min(-(-where.rows // team.rows_per_block), max(1, blocks))
    memory = _shared_memory(types, team, where.width, access, gpu)
    while team.rows_per_block > 1 and not memory.sums:  # its teams meet in shared memory
        team = team._replace(blocks_per_sm=team.blocks_per_sm - 1)
        memory = _shared_memory(types, team, where.width, access, gpu)
    macros = (
        *types.macros(),
        *team.macros(where.width, where.groups, access),
        ("STAGES", str(memory.stages)),
        ("SUMS_IN_SHARED", cuda_bool(memory.sums)),
    )
    return Launch(
        Build("row_norm_backward", macros),
        parts * where.groups * team.cluster,
        team.threads,
        parts,
        sums_pitch(where, twice=where.width > team.chunk and not memory.sums),
        memory.bytes,
    )


class _SharedMemory(NamedTuple):
    """What a block of the backward has in shared memory that its launch gives."""

    bytes: int
    stages: int  # rows on their way there
    sums: bool  # over rows


def _shared_memory(
    types: BackwardTypes, team: Team, width: int, access: int, gpu: DeviceLimits
) -> _SharedMemory:
    """Return how shared memory is used: for sums first, then for rows to come."""
    reserved = _RESERVED + (team.threads_per_row // 32 * _SENT if team.cluster > 1 else 0)
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
    is_copied = access * min(itemsizes) >= _LEAST_COPY and copies <= _MOST_COPIES
    if is_streamed or not gpu.features.async_copies or not is_copied:
        return _SharedMemory(used, 0, in_shared)
    wanted = min(_MOST_STAGES, -(-_STAGED_BYTES // (stage * team.blocks_per_sm)))
    stages = max(0, min(wanted, (left - used) // stage))
    return _SharedMemory(used + stages * stage, stages, in_shared)


def _cuda_parts(where: Walk, sm_count: int) -> int:
    """Return how many rows of partial sums there are at most, for each group."""
    blocks_per_sm = next((blocks for limit, blocks in _BLOCKS_PER_SM if where.width <= limit), 1)
    return max(1, min(sm_count, MOST_SMS) * blocks_per_sm // where.groups)


@lru_cache(maxsize=1024)
def cuda_param_grad(types: ParamGradTypes, width: int) -> Launch:
    """Plan param_grad on a GPU."""
    columns, parts = next(threads for limit, threads in _PARAM_THREADS if width <= limit)
    macros = (
        *types.macros(),
        ("COLUMN_THREADS", str(columns)),
        ("PART_THREADS", str(parts)),
        ("PACK", "1"),
    )
    grid = -(-width // columns) * _gradients(types)
    return Launch(Build("param_grad", macros), grid, columns * parts)


def _gradients(types: ParamGradTypes) -> int:
    return (types.dweight is not None) + (types.dbias is not None)


@lru_cache(maxsize=4096)
def cpu_forward(types: ForwardTypes, where: Walk) -> Launch:
    """Plan row_norm_forward on a CPU."""
    macros = types.macros() + CPU_TEAM.macros(width=0, groups=0, access=1)
    macros += _cpu_rows(where, types.x, types.gate is None and types.residual is not None)
    macros += _cpu_stores(where, types.y, types.compute)
    if types.formula.pre_gate:
        macros += _cpu_kept(types, where, types.compute.itemsize, rows=1)
    return Launch(Build("row_norm_forward", macros), _cpu_blocks(where.rows) * where.groups, 1)


def cpu_forward_parts(where: Walk) -> int:
    """Return into how many parts rows are cut, of few and long ones that blocks share; else 0."""
    return _parts(where.width) if _is_shared(where) else 0


def cpu_backward_parts(where: Walk) -> int:
    """Return the same of a backward, where each row has partial sums of its own."""
    is_shared = _is_shared(where) and where.rows == _cpu_parts(where.rows)
    return _parts(where.width) if is_shared else 0


def _parts(width: int) -> int:
    """Return into how many parts of so many chunks `Row` cuts a row; the first chunk is a pack."""
    packs, cut = divmod(width, CPU_PACK)
    chunks = 1 - (1 - packs) // _CHUNK + bool(cut)
    return -(-chunks // _PART_CHUNKS)


def _is_shared(where: Walk) -> bool:
    few = 0 < where.rows * where.groups <= CPU_SHARED_ROWS
    return few and where.width > _CPU_SHARED_WIDTH


def cpu_shared(launch: Launch, where: Walk) -> Launch:
    """Plan rows that threads share, each of which is a block."""
    build = Build(launch.build.kernel, (*launch.build.macros, ("SHARED_ROWS", "true")))
    return replace(launch, build=build, grid=where.rows * where.groups)


@lru_cache(maxsize=4096)
def cpu_backward(types: BackwardTypes, where: Walk) -> Launch:
    """Plan row_norm_backward on a CPU."""
    row = types.x or types.dy
    macros = types.macros() + CPU_TEAM.macros(width=0, groups=0, access=1)
    macros += (("STAGES", "0"), ("SUMS_IN_SHARED", "false"))
    macros += _cpu_rows(where, row, types.gate is None)
    if where.width * row.itemsize > _SHORT_ROW:
        macros += (("LONG_PASSES", "true"),)
    largest = types.dx or types.dgate
    if largest is not None:
        macros += _cpu_stores(where, largest, types.compute)
    if types.dgate is not None:
        macros += _cpu_kept(types, where, 2 * types.compute.itemsize, _KEPT_ROWS)
    parts = _cpu_parts(where.rows) if types.dweight or types.dbias else _cpu_blocks(where.rows)
    build = Build("row_norm_backward", macros)
    return Launch(build, parts * where.groups, 1, parts, sums_pitch(where, twice=True))


@lru_cache(maxsize=1024)
def cpu_param_grad(types: ParamGradTypes, width: int) -> Launch:
    """Plan param_grad on a CPU."""
    macros = (
        *types.macros(),
        ("COLUMN_THREADS", "1"),
        ("PART_THREADS", "1"),
        ("PACK", str(CPU_PACK)),
    )
    return Launch(Build("param_grad", macros), -(-width // CPU_PACK) * _gradients(types), 1)


def _cpu_rows(where: Walk, row: DType, two_inputs: bool) -> Macros:
    """Return the macro of rows so wide that none of those to come is prefetched."""
    widest = _WIDE_ROW[two_inputs].get(row.itemsize)
    is_wide = widest is not None and where.width * row.itemsize > widest
    return (("WIDE_ROWS", "true"),) if is_wide else ()


def _cpu_kept(types: ForwardTypes | BackwardTypes, where: Walk, itemsize: int, rows: int) -> Macros:
    """Return the macro of rows of which a thread keeps what an activation took long to compute.

    Where the gate has more than 16 bits memory takes longer still.
    """
    packs = _KEPT_BYTES // (CPU_PACK * itemsize)
    is_narrow = types.gate is not None and types.gate.itemsize == 2 and types.compute is FLOAT32
    is_slow = is_narrow and types.formula.activation not in _QUICK
    is_kept = is_slow and where.width <= packs * CPU_PACK
    return (("HELD_PACKS", str(rows * packs)),) if is_kept else ()


def _cpu_stores(where: Walk, result: DType, compute: DType) -> Macros:
    return cpu_stores(where.elements, where.width, result, compute)


def cpu_stores(elements: int, row: int, result: DType, compute: DType) -> Macros:
    """Return the macro that sends stores past the caches, for large results of whole lines."""
    itemsize = result.itemsize
    share = _LARGE_SHARE.get(itemsize)
    if share is None or compute is FLOAT64 or row * itemsize % _CACHE_LINE:
        return ()
    large = min(_LARGE_RESULT, last_cache_bytes() // share)
    return (("NON_TEMPORAL", "true"),) if elements * itemsize >= large else ()


def _cpu_blocks(rows: int) -> int:
    """Return how many runs of rows a CPU's threads share; results do not depend on it."""
    return min(rows, 256)


def _cpu_parts(rows: int) -> int:
    """Return how many partial sums there are: enough to share, few enough to cost nothing."""
    enough_to_share = min(rows, max(CPU_SHARED_PARTS, min(32, rows // 32)))
    return max(enough_to_share, -(-rows // 256))


def workspace_size(compute: DType, where: Walk, sm_count: int | None) -> int:
    """Return the bytes that partial sums for one parameter take at most; None: on a CPU."""
    rows = where.not_empty().rows
    parts = _cpu_parts(rows) if sm_count is None else min(rows, _cuda_parts(where, sm_count))
    return parts * sums_pitch(where, twice=True) * compute.itemsize


def sums_pitch(where: Walk, *, twice: bool) -> int:
    """Return the elements of a row of partial sums, with a row of recent ones or without.

    A row of sums is whole cache lines: `sum_pitch` in C++.
    """
    pitch = -(-where.width * where.groups // 16) * 16
    return 2 * pitch if twice else pitch


def common_access(width: int, operands: list[tuple[int, int, tuple[int, ...]]]) -> int:
    """Return how many elements every operand lets a thread move in one access, a power of two.

    Each operand is its pointer, its itemsize, and the strides between its rows in elements. Of
    elements larger than others, one access takes fewer, so alignment counts up to 16 bytes.
    """
    access = min(ACCESS_BYTES, width & -width)
    for pointer, itemsize, strides in operands:
        while access > 1:
            bytes_at_once = min(access * itemsize, ACCESS_BYTES)
            if pointer % bytes_at_once == 0 and not any(
                stride * itemsize % bytes_at_once for stride in strides
            ):
                break
            access //= 2
    return access
