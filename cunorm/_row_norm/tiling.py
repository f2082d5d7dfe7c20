# SPDX-License-Identifier: MIT
"""The teams of a GPU: how its threads share the rows of a row norm. A CPU's team is one thread.

A team determines the order in which a row is summed. So it depends only on the width, the operands'
dtypes, the `Formula` and the GPU's features, but not on the number of rows.
"""

from typing import NamedTuple

from cunorm._core.build import Macros
from cunorm._core.caps import NONE, PORTABLE_CLUSTER, Features
from cunorm._core.tensor import WIDEST_ACCESS
from cunorm._row_norm.blocks import BLOCK_STEP
from cunorm._row_norm.kernels import ForwardTypes, RowTypes
from cunorm._row_norm.registers import (
    LARGE_TEAM,
    WARP,
    limits_of,
    of_several,
    of_streamed,
    of_uneven,
    registers_of,
    room_of,
)

PACK_BYTES = 32  # the bytes of a pack in the compute type; a thread has several packs in registers
_TEAMS = (4, 8, 16, *range(32, 513, 32))  # the numbers of threads of a block that may share a row
_CLUSTER_THREADS, _CLUSTERS = 256, (2, 4, 8, 16)  # the most threads of a block; numbers of blocks
_STREAMED_THREADS, _STREAMED_PACKS = 512, 4
_LARGEST_STRIDED_TEAM, _SECTOR = 256, 32  # threads, and the bytes that memory moves at least


class _StridedLimits(NamedTuple):
    """The limits of blocks with strided rows, found with the model of GPUs (bench/plans)."""

    elements: int  # the float32 numbers that a thread loads for a row, or for each of two rows
    registers: int
    preferred_threads: int  # of a block


_STRIDED_FORWARD, _STRIDED_BACKWARD = _StridedLimits(24, 72, 64), _StridedLimits(16, 96, 96)
_MOST_STRIDED_THREADS, _FEW_REGISTERS = 256, 80  # a larger block has few, so that there are two


class Team(NamedTuple):
    """The way in which threads share rows: the constants of `struct Team` in reduce.cuh."""

    threads: int  # the threads of a block
    threads_per_row: int  # more than `threads` if a cluster of blocks shares a row
    pack: int
    packs: int  # the packs that a thread holds at a time
    blocks_per_sm: int = 1  # the blocks for which registers leave room
    registers: int = 0  # an estimate of a thread's registers
    pack_rows: int = 1  # the rows of a pack; if there are several, a pack has one column

    @property
    def rows_per_block(self) -> int:
        """Return how many rows a block, or a cluster of blocks, takes at a time."""
        return max(1, self.threads // self.threads_per_row) * self.pack_rows

    @property
    def cluster(self) -> int:
        """Return how many blocks share a row."""
        return max(1, self.threads_per_row // self.threads)

    @property
    def chunk(self) -> int:
        """Return how many elements of a row its team holds at a time."""
        return self.threads_per_row * self.packs * self.pack // self.pack_rows

    def macros(self, width: int, groups: int, access: int, axes: int = 3) -> Macros:
        """Return the macros of a build that say how threads walk over rows.

        A width of 0, or 0 groups, means that the kernel gets the number at run time. `axes` is the
        largest number of leading axes of an operand.
        """
        return (
            ("WIDTH", str(width)),
            ("GROUPS", str(groups)),
            ("THREADS", str(self.threads)),
            ("THREADS_PER_ROW", str(self.threads_per_row)),
            ("PACK", str(self.pack)),
            ("PACKS", str(self.packs)),
            ("ACCESS", str(access)),
            ("BLOCKS_PER_SM", str(self.blocks_per_sm)),
            *((("ROW_AXES", "1"),) if axes == 1 else ()),
            *((("CLUSTER", str(self.cluster)),) if self.cluster > 1 else ()),
        )


def cuda_team(types: RowTypes, width: int, features: Features = NONE, pack_rows: int = 1) -> Team:
    """Return the team in which a GPU's threads share rows of a width."""
    if types.strided:
        return strided_team(types, width, pack_rows)
    itemsizes = [dtype.itemsize for name in types.lines() if (dtype := getattr(types, name))]
    pack = min(
        WIDEST_ACCESS // min(itemsizes), PACK_BYTES // types.compute.itemsize, width & -width
    )
    limits = limits_of(types)
    few = max(pack, limits.preferred_elements * 4 // types.compute.itemsize)
    largest = features.largest_cluster if features.clusters else 1
    is_wide = min(types.held_itemsizes()) >= 4
    most = limits.most_elements * (3 if is_wide else 4) // 4
    # While a forward's block waits, a second block computes. A backward's block copies rows ahead.
    least = 2 if isinstance(types, ForwardTypes) else 1
    return (
        _of_block(types, width, pack, few, least)
        or _of_cluster(types, width, pack, largest, 2)
        or _of_block(types, width, pack, few, 1)
        or _of_cluster(types, width, pack, largest, 1)
        or _of_block(types, width, pack, most, 1)
        or _streamed(types, pack, largest)
    )


def _of_block(types: RowTypes, width: int, pack: int, most: int, least: int) -> Team | None:
    """Return how a block, or some of its lanes, hold a row, or None if the row is too long.

    A thread holds at most `most` elements, or half as many in a team within a warp, so that more
    lanes are busy. A team of one warp, which needs no barrier, may hold more. So may a large team
    without a gate of which two blocks have room: more elements share the instructions of barriers
    and addresses. At least `least` blocks have room on a multiprocessor.
    """
    limits = limits_of(types)
    for threads_per_row in _TEAMS:
        is_large = threads_per_row >= LARGE_TEAM
        elements, limit = _held(width, threads_per_row, pack), max(pack, most)
        if threads_per_row <= WARP:
            threads, more = limits.block_threads, of_several(types)
            of_warp = limits.of_warp * 4 // types.compute.itemsize
            limit = max(pack, most // 2) if threads_per_row < WARP else max(limit, of_warp)
        else:
            threads, more = threads_per_row, of_uneven(types, width, threads_per_row, pack)
            if is_large and least > 1 and isinstance(types, ForwardTypes) and types.gate is None:
                limit = max(limit, limits.most_elements * 4 // types.compute.itemsize)
        registers = registers_of(types, elements, pack, more, in_large_block=is_large)
        room = room_of(registers, threads)
        if elements <= limit and room >= least:
            return Team(threads, threads_per_row, pack, elements // pack, room, registers)
    return None


def _of_cluster(types: RowTypes, width: int, pack: int, largest: int, least: int) -> Team | None:
    """Return how a cluster holds a row, if `least` of its blocks have room on a multiprocessor.

    The cluster is as small as possible, or as large as possible if `least` is 1. A block has no
    more warps than the row fills. If a GPU has no room for the cluster but enough registers, half
    as many blocks with twice the threads add up the row in the same order.
    """
    if largest == 1:
        return None
    for blocks in _CLUSTERS if least > 1 else _CLUSTERS[::-1]:
        elements = _held(width, blocks * _CLUSTER_THREADS, pack)
        if elements > limits_of(types).most_elements:
            continue
        of_block = -(-width // (blocks * elements * WARP)) * WARP
        threads_per_row = blocks * of_block
        threads = threads_per_row // min(blocks, largest)
        registers = registers_of(types, elements, pack)
        room = room_of(registers, threads)
        if room and room_of(registers, of_block) >= least:
            return Team(threads, threads_per_row, pack, elements // pack, room, registers)
    return None


def _streamed(types: RowTypes, pack: int, largest: int) -> Team:
    """Return how a block, or the largest cluster, streams a row that is too long to be held."""
    threads_per_row = threads = _STREAMED_THREADS * 4 // types.compute.itemsize
    if largest >= PORTABLE_CLUSTER:
        threads_per_row = _CLUSTERS[-1] * threads // 2
        threads = threads_per_row // largest

    def registers(packs: int) -> int:
        elements = packs * pack
        return registers_of(types, elements, pack, of_streamed(types, elements))

    # A pack of 4 float32 is one access. Smaller packs of x do not make room, and a warp has to hold
    # a block of columns that share a scale.
    least = BLOCK_STEP if types.compute.itemsize == 4 else 1
    while True:
        rooms = [
            (packs * room_of(registers(packs), threads), packs)
            for packs in range(1, _STREAMED_PACKS + 1)
        ]
        held, packs = max(rooms)
        if held or pack <= least:
            packs = packs if held else 1
            room = max(1, held // packs)
            return Team(threads, threads_per_row, pack, packs, room, registers(packs))
        pack //= 2


def strided_team(types: RowTypes, width: int, pack_rows: int) -> Team:
    """Return how a block holds rows that lie side by side: `teams` rows or pairs of rows.

    Small blocks overlap their loads with other blocks' work, but a warp should read whole sectors
    of each column. How many rows are a pack changes no sum.
    """
    limits = _STRIDED_FORWARD if isinstance(types, ForwardTypes) else _STRIDED_BACKWARD
    itemsizes = [dtype.itemsize for dtype in types.loaded() if dtype]
    numbers, sector_rows = types.compute.itemsize // 4, _SECTOR // min(itemsizes)
    columns = max(1, limits.elements // len(itemsizes) // numbers)
    of_row = min(-(-width // (4 * columns)) * 4, _LARGEST_STRIDED_TEAM)
    teams = 16
    while of_row * teams > limits.preferred_threads and teams * 2 > sector_rows:
        teams //= 2
    if of_row * teams > _MOST_STRIDED_THREADS and of_row % 8 == 0:
        teams = 4
    threads = of_row * teams
    of_thread = limits.registers if threads <= _MOST_STRIDED_THREADS else _FEW_REGISTERS
    registers, columns = of_thread * numbers, _held(width, of_row, 1)
    room = max(1, room_of(registers, threads))
    return Team(threads, of_row, pack_rows, columns, room, registers, pack_rows)


def _held(width: int, threads: int, pack: int) -> int:
    """Return how many elements of a row a thread holds, which are whole packs."""
    return -(-width // (threads * pack)) * pack
