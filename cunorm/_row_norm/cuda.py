# SPDX-License-Identifier: MIT
"""Launch plans of the row norms on a GPU."""

from __future__ import annotations

from typing import NamedTuple

from cunorm._core.build import KernelBuild, Launch, cuda_bool
from cunorm._core.caps import LEAST_COPY, MOST_SMS, GpuCaps
from cunorm._core.plan import GRID_LIMIT
from cunorm._row_norm.geometry import RowShape
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes, RowTypes
from cunorm._row_norm.tiling import Team, cuda_team

# The most blocks of a backward on a multiprocessor, by the greatest width: each has a row of
# partial sums, which param_grad reads.
_BLOCKS_PER_SM = ((1024, 8), (2048, 4), (4096, 2))
# The most rows on their way to shared memory, their bytes wanted on a multiprocessor, and the most
# copies of a thread for an operand's row, as each takes registers.
_MOST_STAGES, _STAGED_BYTES, _MOST_COPIES = 4, 40 << 10, 12
# Bytes of a block's shared memory for the driver and the kernel's own variables, and those that
# each warp of a cluster sends, as wide as float64.
_RESERVED_BYTES, _SENT_BYTES = 2 << 10, 48


def cuda_forward(types: ForwardTypes, where: RowShape, access: int, gpu: GpuCaps) -> Launch:
    """Plan row_norm_forward on a GPU; alignment allows `access` elements (see `vector_width`)."""
    team = _team(types, where.width, gpu)
    access = min(access, team.pack)
    if access < team.pack:  # loads in parts take more registers
        team = team._replace(blocks_per_sm=-(-team.blocks_per_sm // 2))
    macros = types.macros() + team.macros(where.width, where.groups, access)
    blocks_of_all = where.groups * team.cluster
    parts = min(-(-where.rows // team.rows_per_block), GRID_LIMIT // blocks_of_all)
    if where.width > team.chunk:
        parts = min(parts, max(1, _streamed_blocks(types, where.width, gpu) // blocks_of_all))
    return Launch(KernelBuild("row_norm_forward", macros), parts * blocks_of_all, team.threads)


def _team(types: RowTypes, width: int, gpu: GpuCaps) -> Team:
    """Return how threads share rows, with no more blocks on a multiprocessor than its threads."""
    team = cuda_team(types, width, gpu.features)
    most = max(1, gpu.max_threads_per_sm // team.threads)
    return team._replace(blocks_per_sm=min(team.blocks_per_sm, most))


def _streamed_blocks(types: ForwardTypes, width: int, gpu: GpuCaps) -> int:
    """Return how many blocks stream rows: two on each multiprocessor.

    There are fewer, down to one, where the second passes of their rows would miss the cache.
    """
    read_again = (types.new_residual or types.x, types.gate)
    row = width * sum(dtype.itemsize for dtype in read_again if dtype is not None)
    return max(gpu.sm_count, min(2 * gpu.sm_count, gpu.l2_bytes // 2 // row))


def cuda_backward(types: BackwardTypes, where: RowShape, access: int, gpu: GpuCaps) -> Launch:
    """Plan row_norm_backward on a GPU."""
    team = _team(types, where.width, gpu)
    access = min(access, team.pack)
    sums = (types.dweight or types.dbias) > 0
    blocks = cuda_parts(where, gpu.sm_count) // team.cluster if sums else GRID_LIMIT
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
    is_copied = access * min(itemsizes) >= LEAST_COPY and copies <= _MOST_COPIES
    if is_streamed or not gpu.features.async_copies or not is_copied:
        return _SharedMemory(used, 0, in_shared)
    wanted = min(_MOST_STAGES, -(-_STAGED_BYTES // (stage * team.blocks_per_sm)))
    stages = max(0, min(wanted, (left - used) // stage))
    return _SharedMemory(used + stages * stage, stages, in_shared)


def cuda_parts(where: RowShape, sm_count: int) -> int:
    """Return the most rows of partial sums for each group."""
    blocks_per_sm = next((blocks for limit, blocks in _BLOCKS_PER_SM if where.width <= limit), 1)
    return max(1, min(sm_count, MOST_SMS) * blocks_per_sm // where.groups)
