# SPDX-License-Identifier: MIT
"""Tiles: the cut of a sample into a tile for each block, and the threads that share a tile."""

from typing import NamedTuple

from cunorm._core.build import Macros, cuda_bool
from cunorm._core.caps import GpuCaps
from cunorm._core.param_grad import CPU_PACK
from cunorm._core.tensor import WIDEST_ACCESS
from cunorm._group_norm.kernels import GroupForwardTypes, GroupTypes
from cunorm._group_norm.layout import LINE, Samples

PACK_BYTES = 32  # the bytes of a pack in the compute type; a thread has several packs in registers
VALUES = 3  # the values that a part of a sample hands on for each group
_PACKS, _WARP = 12, 32  # packs of an operand for each thread of a GPU; lanes of a warp
_RUN = 16  # the packs that a thread adds up one by one: `run` in C++
_BLOCKS = 4  # the blocks of a multiprocessor for which registers leave room in float32
# (the least bytes of a line in a tile, if a sample has so many; the most blocks of a cluster). Only
# the fits with the widest packs count. A plan takes the first of them whose tile has at most twice
# the `wanted` bytes, so that two samples give most multiprocessors a block; else the first. Shorter
# lines and larger clusters come later, because they make many samples a little slower.
_FITS = ((128, 8), (64, 8), (128, 16), (64, 16), (32, 16))
# (blocks that share a multiprocessor's shared memory, threads of a block). If no tile leaves room
# for a second block, a block is alone, with a small tile that has the widest packs. If there is no
# such tile, samples are streamed by two blocks of a multiprocessor.
_SHARING, _ALONE = (2, 128), (1, 256)
_STREAMED_LINES = (64, 128)
_CLUSTERS = (1, 2, 4, 8, 16)
# The least bytes of a channels-first unit, and the most channels of a unit of several groups.
_UNIT_BYTES, _UNIT_CHANNELS = 16 << 10, 128
_RESERVED_BYTES = 2 << 10  # bytes of a block's shared memory for the driver and alignment
_MIN_TILE = 24 << 10  # about the least bytes of an operand in a tile
# How many lines or, with channels first, packs of a channel a CPU's strip has, to stay in a core's
# caches. The last is the most bytes of a line's pack in the compute type: 8 registers of AVX-512.
_CPU_LINES, _CPU_PACKS, _CPU_LINE_BYTES = 256, 64, 512


class Tiling(NamedTuple):
    """A block's tile and its threads: the constants of `struct Tile` in group_tile.cuh."""

    unit_groups: int  # the groups of a unit; a tile may have only some channels of a single group
    channel_threads: int
    position_threads: int
    pack: int
    part_positions: int
    parts: int  # the parts along the positions of a sample
    channel_parts: int = 1  # the parts along the channels of a group
    cluster: int = 0  # the blocks that make all passes over a unit; 0: there are several launches
    blocks_per_sm: int = 1  # the blocks for which registers leave room
    has_runs: bool = False  # a thread has many packs, so it adds up sums of runs of packs

    @property
    def threads(self) -> int:
        """Return the number of threads of a block, which are whole warps."""
        return -(-self.channel_threads * self.position_threads // _WARP) * _WARP

    def shared(self, types: GroupTypes, channels_last: bool) -> int:
        """Return the bytes of a tile in shared memory."""
        step = self.position_threads * (1 if channels_last else self.pack)
        packs = self.part_positions // step * self.threads
        return packs * self.pack * sum(dtype.itemsize for dtype in types.loaded)

    def macros(self, access: int, async_copies: bool) -> Macros:
        return (
            ("UNIT_GROUPS", str(self.unit_groups)),
            ("CLUSTER", str(max(1, self.cluster))),
            ("THREADS", str(self.threads)),
            ("CHANNEL_THREADS", str(self.channel_threads)),
            ("POSITION_THREADS", str(self.position_threads)),
            ("BLOCKS_PER_SM", str(self.blocks_per_sm)),
            ("PACK", str(self.pack)),
            ("ACCESS", str(access)),
            ("ASYNC_COPIES", cuda_bool(async_copies)),
            ("HAS_RUNS", cuda_bool(self.has_runs)),
        )


def cpu_tiling(types: GroupTypes, sizes: Samples) -> Tiling:
    """Return a CPU's strips, of a pack of each line or, with channels first, of one channel."""
    pack, positions = CPU_PACK, _CPU_PACKS * CPU_PACK
    if sizes.channels_last:
        pack, positions = _cpu_line_pack(types, sizes.channels), _CPU_LINES
    return Tiling(1, 1, 1, pack, positions, -(-sizes.positions // positions))


def _cpu_line_pack(types: GroupTypes, channels: int) -> int:
    """Return how many channels of a line are taken at once; few channels are all taken at once.

    A backward takes fewer channels of a long line than a forward; this was measured to be faster.
    """
    longest = _CPU_LINE_BYTES // types.compute.itemsize
    if channels % LINE:
        return CPU_PACK
    if channels <= longest:
        return channels
    most = longest if isinstance(types, GroupForwardTypes) else CPU_PACK
    return min(most, channels & -channels)


def cuda_tiling(types: GroupTypes, sizes: Samples, gpu: GpuCaps) -> Tiling:
    """Return a GPU's tiles; a block or a cluster has whole groups, if they fit."""
    return _Tilings(types, sizes, gpu).best()


class _Tilings(NamedTuple):
    """The tilings that a GPU may use, of which `best` chooses one."""

    types: GroupTypes
    sizes: Samples
    gpu: GpuCaps

    def best(self) -> Tiling:
        loaded = len(self.types.loaded)
        sample = self.sizes.positions * self.sizes.channels * self.types.x.itemsize * loaded
        wanted = loaded * max(_MIN_TILE, sample // self.gpu.sm_count) * 5 // 4

        def is_small(tiling: Tiling) -> bool:
            return self._shared(tiling) <= 2 * wanted

        sharing = self._fits(wanted, *_SHARING)
        found = [*filter(is_small, sharing), *sharing]
        if not found:
            streamed = self._streamed()
            alone = filter(is_small, self._fits(wanted, *_ALONE))
            found = [one for one in alone if one.pack == streamed.pack] or [streamed]
        room = min(self._room(found[0]), _BLOCKS * 4 // self.types.compute.itemsize)
        return found[0]._replace(blocks_per_sm=max(1, room))

    def _fits(self, wanted: int, blocks: int, threads: int) -> list[Tiling]:
        """Return a tiling for each fit: the fewest blocks with small tiles, else the most."""
        features, found = self.gpu.features, []
        largest = features.largest_cluster if features.clusters else 1
        for line, most in _FITS:
            clusters = [one for one in _CLUSTERS if one <= min(most, largest)]
            tilings = [self._tiling(line, cluster, threads) for cluster in clusters]
            fitting = [one for one in tilings if one.cluster and self._room(one) >= blocks]
            small = (one for one in fitting if self._shared(one) <= wanted)
            if fitting:
                found.append(next(small, fitting[-1]))
        pack = max((one.pack for one in found), default=0)
        return [one for one in found if one.pack == pack]

    def _streamed(self) -> Tiling:
        """Return the largest tiles for which shared memory has room."""
        (blocks, threads), parts = _SHARING, 1
        tilings = {line: self._tiling(line, 1, threads, streamed=True) for line in _STREAMED_LINES}
        line = max(tilings, key=lambda line: tilings[line].pack)
        while True:
            tiling = self._tiling(line, parts, threads, streamed=True)
            if self._room(tiling) >= blocks or parts >= self.sizes.positions:
                return tiling
            parts += -(-parts // 8)

    def _tiling(self, line_bytes: int, blocks: int, threads: int, streamed: bool = False) -> Tiling:
        """Return tiles with `blocks` blocks for a unit, and lines of `line_bytes` if they may be.

        The tiling's `cluster` is 0 if these blocks make no cluster.
        """
        types, sizes, groups = self.types, self.sizes, self._unit_groups(line_bytes)
        channels = groups * sizes.group_channels
        line = channels if sizes.channels_last else sizes.positions
        least = min(dtype.itemsize for dtype in (*types.loaded, types.written) if dtype)
        pack = min(WIDEST_ACCESS // least, PACK_BYTES // types.compute.itemsize, line & -line)
        across = channels // pack if sizes.channels_last else channels
        along = sizes.positions if sizes.channels_last else sizes.positions // pack
        least_parts = 1 << (-(-across // threads) - 1).bit_length()  # a power of two
        channel_threads = -(-across // least_parts)
        channel_parts = -(-across // channel_threads)
        parts = blocks if streamed else max(1, blocks // channel_parts)
        of_part = -(-along // parts)
        warps = -(-channel_threads * -(-of_part // _PACKS) // _WARP)
        position_threads = max(1, min(threads, warps * _WARP) // channel_threads)
        position_threads = min(position_threads, of_part)
        length = -(-of_part // position_threads) * position_threads
        return Tiling(
            groups,
            channel_threads,
            position_threads,
            pack,
            length if sizes.channels_last else length * pack,
            -(-along // length) if streamed else parts,
            channel_parts,
            0 if streamed or blocks % channel_parts else blocks,
            has_runs=length > _RUN * position_threads,
        )

    def _unit_groups(self, line: int) -> int:
        """Return the groups of a unit: enough for `line` bytes, but limited in channels."""
        sizes, size = self.sizes, self.sizes.group_channels * self.types.x.itemsize
        if not sizes.channels_last:
            size, line = size * sizes.positions, _UNIT_BYTES
        most = max(1, _UNIT_CHANNELS // sizes.group_channels)
        divisors = [n for n in range(1, min(sizes.groups, most) + 1) if sizes.groups % n == 0]
        return next((n for n in divisors if n * size >= line), divisors[-1])

    def _shared(self, tiling: Tiling) -> int:
        return tiling.shared(self.types, self.sizes.channels_last)

    def _room(self, tiling: Tiling) -> int:
        """Return how many blocks have room in a multiprocessor's shared memory."""
        gpu, columns = self.gpu, tiling.channel_threads
        columns *= tiling.pack if self.sizes.channels_last else 1
        sums = 2 if isinstance(self.types, GroupForwardTypes) else 3
        values = sums * tiling.position_threads * columns
        values += (1 + VALUES * (1 + max(1, tiling.cluster))) * tiling.unit_groups
        used = self._shared(tiling) + values * self.types.compute.itemsize + _RESERVED_BYTES
        return gpu.shared_memory_per_sm // used if used <= gpu.shared_memory_per_block_optin else 0
