# SPDX-License-Identifier: MIT
"""The launch plans of row norms on a GPU."""

from collections.abc import Callable
from typing import NamedTuple

from cunorm._core.build import KernelBuild, Launch, Macros, cuda_bool
from cunorm._core.caps import MAX_SMS, MIN_ASYNC_COPY_BYTES, GpuCaps
from cunorm._core.plan import GRID_LIMIT
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes, RowTypes
from cunorm._row_norm.registers import room_of
from cunorm._row_norm.shape import RowShape
from cunorm._row_norm.tiling import Team, cuda_team

# (columns of a block, blocks): a backward that sums over rows, with at most so many columns in a
# block, has at most so many blocks on a multiprocessor, because each block writes a row of sums.
_BLOCKS_PER_SM = ((1024, 8), (2048, 4), (4096, 2))
_PART_ROWS = 32  # the fewest rows of a segment that a GPU's block adds up
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


SHARED = RowsOf()


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
    rows_of: RowsOf = SHARED,
) -> RowLaunch:
    """Plan a forward or a jvp; alignment allows `access` elements (see `Kernel.access_to`)."""
    team = _team(types, shape.width, gpu, access)
    access, blocks_per_part = min(access, team.pack), shape.groups * team.cluster
    max_parts = GRID_LIMIT // blocks_per_part
    if shape.width > team.chunk:
        blocks = _streamed_blocks(types, shape.width, team, gpu)
        max_parts = min(max_parts, max(1, blocks // blocks_per_part))
    # Loads in parts, or from several axes, need more registers.
    if (access < team.pack or axes > 1) and not types.strided:
        team = team._replace(blocks_per_sm=-(-team.blocks_per_sm // 2))
    macros = types.macros() + team.macros(shape.width, shape.groups, access, axes) + rows_of.macros
    return _cuda_launch(KernelBuild(types.kernel, macros), team, shape, max_parts)


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


def _team(types: RowTypes, width: int, gpu: GpuCaps, access: int) -> Team:
    """Return how threads share rows; limit `blocks_per_sm` to what a multiprocessor can run."""
    team = cuda_team(types, width, gpu.features, access)
    most = max(1, gpu.max_threads_per_sm // team.threads)
    more, capability = 0, int(gpu.compute_capability)
    if isinstance(types, ForwardTypes):
        more = types.more_registers(team.threads, capability)
        if capability >= 100:
            # Two more, in float64 four; instructions for pairs of rows take 16 more.
            more += 16 if types.strided else types.compute.itemsize // 2
    if more:
        most = min(most, max(1, room_of(team.registers + more, team.threads)))
    return team._replace(blocks_per_sm=min(team.blocks_per_sm, most))


def _streamed_blocks(types: ForwardTypes, width: int, team: Team, gpu: GpuCaps) -> int:
    """Return how many blocks stream rows: two on each multiprocessor, if two fit.

    There is only one if the rows of two blocks would not stay in L2 until their second pass.
    """
    of_block = width * sum(one.itemsize for one in types.read_again() if one) // team.cluster
    are_cached = 2 * gpu.sm_count * of_block <= gpu.l2_bytes // 2
    return gpu.sm_count * (2 if are_cached and team.blocks_per_sm > 1 else 1)


def cuda_backward(
    types: BackwardTypes,
    shape: RowShape,
    access: int,
    gpu: GpuCaps,
    axes: int = 1,
    rows_of: RowsOf = SHARED,
) -> RowLaunch:
    team = _team(types, shape.width, gpu, access)
    access = min(access, team.pack)
    sums = types.sum_count > 0
    most = cuda_parts(shape, gpu.sm_count, team.cluster, has_segments=rows_of.segments is not None)
    blocks = most // team.cluster if sums else GRID_LIMIT
    shared = _shared_memory(types, team, shape.width, access, gpu)
    # Several teams need sums in shared memory, unless rows are strided.
    while team.rows_per_block > 1 and not shared.sums and not types.strided:
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
    build, parts = KernelBuild(types.kernel, macros), max(1, min(blocks, resident))
    is_streamed = shape.width > team.chunk and not types.strided
    pitch = shape.sums_pitch(twice=is_streamed and not shared.sums)
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
    in_shared = sums <= left and not types.strided  # of strided rows, threads have few sums
    used = sums if in_shared else 0
    itemsizes = [dtype.itemsize for dtype in types.loaded() if dtype is not None]
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
