# SPDX-License-Identifier: MIT
"""How a GPU's threads share the rows of a row norm; a CPU's team is one thread.

It depends on the width, the operands' dtypes and the GPU's features alone: a row's sums are taken
in the order that its team gives them.
"""

from typing import NamedTuple

from cunorm._core.build import Macros
from cunorm._core.caps import NONE, PORTABLE_CLUSTER, Features
from cunorm._core.dtypes import FLOAT16
from cunorm._core.tensor import WIDEST_ACCESS
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes, RowTypes

# Bytes of a pack in the compute type; a thread has several packs in registers.
PACK_BYTES = 32
# Of a multiprocessor; a warp's registers are in one of its partitions.
_WARP, _SM_REGISTERS, _SM_PARTITIONS, _SM_THREADS, _MOST_REGISTERS = 32, 64 << 10, 4, 2048, 255
# Threads of a block that may share a row: lanes of a warp, or whole warps; the most of a block of a
# cluster, and sizes of clusters.
_TEAMS = (4, 8, 16, *range(32, 513, 32))
_CLUSTER_THREADS, _CLUSTERS = 256, (2, 4, 8, 16)
_STREAMED_THREADS, _STREAMED_PACKS = 512, 4
# Registers that a thread takes where its block has several teams, some of which may have no row.
# More of them where a streamed backward writes parameters' gradients alone, and for the activation
# of a forward's gate.
_OF_SEVERAL, _OF_SUMS_ALONE = 8, 28
_OF_ACTIVATION = {"gelu": 56, "gelu_tanh": 8, "tanh": 8}


class _Tuning(NamedTuple):
    """A kernel's limits for a thread, and the registers that it takes: found by compiling it.

    docs/kernels/row-norms.md says how. A number that is too low makes registers spill.
    """

    block_threads: int  # of a block of several teams
    preferred_elements: int  # of a row that a thread holds, of float32
    most_elements: int  # the same, where a row is too long for more threads
    registers: int  # beside those that hold the row and its sums
    element_factor: float = 1  # of those that hold the row and its sums
    narrow_registers: int = 0  # more, where operands are converted
    narrow_element: float = 0  # the same for each element
    single_registers: int = 0  # more, where packs are of one element
    single_element: float = 0  # the same for each element
    pair_registers: int = 0  # more, where packs are of two
    pair_element: float = 0
    streamed_registers: int = 0  # more, where rows are streamed
    streamed_element: float = 0  # the same for each element, if no operand is narrower than float32
    consumed_registers: int = 0  # more for each operand that p is made of, beside x
    both_registers: int = 0  # more, where these are a residual and a gate
    half_registers: int = 0  # more, where float16 and a residual are added
    many_registers: int = 0  # more, where more than three operands are held
    several_residual: int = 0  # more, for a float32 residual where a block has several teams
    many_elements: int = 0  # as for so many elements more, where more than preferred are held
    uneven_elements: int = 0  # the same, where a centered row leaves lanes idle, or lacks a warp
    more_from_100: int = 0  # registers, where compute capability 10.0 and later are compiled for
    gate_registers: int = 0  # more, for an activation
    gate_element: float = 0  # the same for each element


_TUNING = {
    ForwardTypes: _Tuning(
        block_threads=128,
        preferred_elements=32,
        most_elements=64,
        registers=16,
        narrow_element=0.5,
        single_registers=8,
        single_element=2,
        pair_registers=8,
        pair_element=2,
        consumed_registers=8,
        both_registers=40,
        half_registers=28,
        many_registers=24,
        several_residual=24,
        many_elements=14,
        uneven_elements=8,
        more_from_100=2,
        streamed_registers=16,
    ),
    BackwardTypes: _Tuning(
        block_threads=256,
        preferred_elements=16,
        most_elements=48,
        registers=44,
        element_factor=1.2,
        narrow_registers=4,
        narrow_element=0.75,
        single_registers=28,
        pair_element=2,
        streamed_registers=12,
        streamed_element=1.4,
        gate_registers=28,
        gate_element=1.25,
    ),
}


class Team(NamedTuple):
    """How threads share the rows: the constants of `struct Team` in reduce.cuh."""

    threads: int  # of a block
    threads_per_row: int  # more: those of a cluster of blocks
    pack: int
    packs: int  # that a thread holds at a time
    blocks_per_sm: int = 1  # for which registers leave room
    registers: int = 0  # about what a thread takes

    @property
    def rows_per_block(self) -> int:
        """Return how many rows a block, or a cluster of blocks, takes at a time."""
        return max(1, self.threads // self.threads_per_row)

    @property
    def cluster(self) -> int:
        """Return how many blocks share a row."""
        return max(1, self.threads_per_row // self.threads)

    @property
    def chunk(self) -> int:
        """Return how many elements of a row its threads hold at a time."""
        return self.threads_per_row * self.packs * self.pack

    def macros(self, width: int, groups: int, access: int, axes: int = 3) -> Macros:
        """Return the part of the build that says how rows are walked.

        A width or number of groups of 0 is known at run time. Operands have at most so many leading
        axes.
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


def cuda_team(types: RowTypes, width: int, features: Features = NONE) -> Team:
    """Return how a GPU's threads share rows of a width."""
    itemsizes = [dtype.itemsize for name in types.rows if (dtype := getattr(types, name))]
    pack = min(
        WIDEST_ACCESS // min(itemsizes), PACK_BYTES // types.compute.itemsize, width & -width
    )
    few = max(pack, _TUNING[type(types)].preferred_elements * 4 // types.compute.itemsize)
    largest = features.largest_cluster if features.clusters else 1
    is_wide = min(types.held_itemsizes()) >= 4
    most = _TUNING[type(types)].most_elements * (3 if is_wide else 4) // 4
    # A backward copies its next row while it waits; a forward's block wants another beside it.
    least = 2 if isinstance(types, ForwardTypes) else 1
    return (
        _of_block(types, width, pack, few, least)
        or _of_cluster(types, width, pack, largest, 2)
        or _of_block(types, width, pack, few, 1)
        or _of_cluster(types, width, pack, largest, 1)
        or _of_block(types, width, pack, most, 1)
        or _streamed(types, pack, largest)
    )


def blocks_with_room(types: RowTypes, team: Team) -> int:
    """Return the blocks of a team for which compute capability 10.0 has registers.

    Compiled for it, a forward takes a few more than for others.
    """
    more = _TUNING[type(types)].more_from_100 * types.compute.itemsize // 4
    return max(1, _room(team.registers + more, team.threads))


def _of_block(types: RowTypes, width: int, pack: int, most: int, least: int) -> Team | None:
    """Return how a block, or a part of one, holds a row; None where that is too long.

    `least` blocks have room on a multiprocessor. Lanes that share a row within a warp have half as
    many elements: more of them are busy.
    """
    tuning = _TUNING[type(types)]
    for threads_per_row in _TEAMS:
        elements = _held(width, threads_per_row, pack)
        if threads_per_row <= _WARP:
            threads, more = tuning.block_threads, _of_several(types)
        else:
            threads, more = threads_per_row, _of_uneven(types, width, threads_per_row, pack)
        registers = _registers(types, elements, pack, more)
        room = _room(registers, threads)
        if elements <= max(pack, most // (2 if threads_per_row < _WARP else 1)) and room >= least:
            return Team(threads, threads_per_row, pack, elements // pack, room, registers)
    return None


def _of_several(types: RowTypes) -> int:
    """Return the registers that a thread takes more where its block has several teams."""
    residual = types.residual if isinstance(types, ForwardTypes) else None
    of_residual = residual.itemsize / 4 if residual is not None else 0
    return _OF_SEVERAL + int(_TUNING[type(types)].several_residual * of_residual)


def _of_uneven(types: RowTypes, width: int, threads: int, pack: int) -> int:
    """Return the registers for guards of a block's last packs, and of its last sums."""
    is_even = width % (threads * pack) == 0 and threads & (threads - 1) == 0
    if is_even or not types.formula.center:
        return 0
    return int(_TUNING[type(types)].uneven_elements * _of_element(types, pack))


def _of_cluster(types: RowTypes, width: int, pack: int, largest: int, least: int) -> Team | None:
    """Return how a cluster holds a row, if `least` of its blocks have room on a multiprocessor.

    It has as few blocks as leave room for two; where there is room for one, the more the better. A
    block has no more warps than the row fills. Where a GPU has no room for the cluster, half the
    blocks of twice the threads add in the same order, that of the cluster's warps, if their
    registers suffice; else another cluster is found.
    """
    if largest == 1:
        return None
    for blocks in _CLUSTERS if least > 1 else _CLUSTERS[::-1]:
        elements = _held(width, blocks * _CLUSTER_THREADS, pack)
        if elements > _TUNING[type(types)].most_elements:
            continue
        of_block = -(-width // (blocks * elements * _WARP)) * _WARP
        threads_per_row = blocks * of_block
        threads = threads_per_row // min(blocks, largest)
        registers = _registers(types, elements, pack)
        room = _room(registers, threads)
        if room and _room(registers, of_block) >= least:
            return Team(threads, threads_per_row, pack, elements // pack, room, registers)
    return None


def _streamed(types: RowTypes, pack: int, largest: int) -> Team:
    """Return how a block, or the largest cluster, goes over a row that is too long to be held."""
    threads_per_row = threads = _STREAMED_THREADS * 4 // types.compute.itemsize
    if largest >= PORTABLE_CLUSTER:
        threads_per_row = _CLUSTERS[-1] * threads // 2
        threads = threads_per_row // largest
    tuning = _TUNING[type(types)]
    of_element = tuning.streamed_element if min(types.held_itemsizes()) >= 4 else 0
    more = tuning.streamed_registers
    if isinstance(types, BackwardTypes) and types.dx is types.dresidual is types.dgate is None:
        more += _OF_SUMS_ALONE

    def registers(packs: int) -> int:
        elements = packs * pack
        return _registers(types, elements, pack, more + int(elements * of_element))

    while True:
        rooms = [
            (packs * _room(registers(packs), threads), packs)
            for packs in range(1, _STREAMED_PACKS + 1)
        ]
        held, packs = max(rooms)
        if held or pack == 1:
            packs = packs if held else 1
            room = max(1, held // packs)
            return Team(threads, threads_per_row, pack, packs, room, registers(packs))
        pack //= 2


def _held(width: int, threads: int, pack: int) -> int:
    """Return how many elements of a row a thread holds: whole packs."""
    return -(-width // (threads * pack)) * pack


def _room(registers: int, threads: int) -> int:
    """Return for how many blocks on a multiprocessor there are registers; 0: for none."""
    registers = -(-registers // 8) * 8
    if registers > _MOST_REGISTERS:
        return 0
    warps = _SM_PARTITIONS * (_SM_REGISTERS // _SM_PARTITIONS // (registers * _WARP))
    return min(warps * _WARP, _SM_THREADS) // threads


def _registers(types: RowTypes, elements: int, pack: int, more_for_plan: int = 0) -> int:
    """Return about how many registers a thread needs to hold these elements of a row.

    More for its plan than for others are given as of float32.
    """
    tuning, held = _TUNING[type(types)], types.held_itemsizes()
    of_element = _of_element(types, pack)
    registers: float = tuning.registers + more_for_plan
    if types.gate is not None:
        registers += tuning.gate_registers
        of_element += tuning.gate_element
    if isinstance(types, ForwardTypes):
        consumed = (types.residual is not None) + types.formula.pre_gate
        registers += tuning.consumed_registers * consumed
        registers += tuning.both_registers if consumed == 2 else 0
        registers += _OF_ACTIVATION.get(types.formula.activation, 0)
        if types.residual is not None and FLOAT16 in (types.x, types.residual, types.new_residual):
            registers += tuning.half_registers
    if len(held) > 3:
        registers += tuning.many_registers
    more: float = 0
    if min(held) < 4:
        more = tuning.narrow_registers + elements * tuning.narrow_element
    if pack == 1:
        more += tuning.single_registers + elements * tuning.single_element
    elif pack == 2:
        more += tuning.pair_registers + elements * tuning.pair_element
    words = types.compute.itemsize // 4
    if elements * words > tuning.preferred_elements:
        elements += tuning.many_elements // words
    of_row = elements * of_element * tuning.element_factor
    return int(registers * words + more + of_row)


def _of_element(types: RowTypes, pack: int) -> float:
    """Return the registers that hold an element of a row: one has a narrow pack, or half of one."""
    return sum(max(size / 4, 1 / pack) for size in types.held_itemsizes())
