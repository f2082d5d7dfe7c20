# SPDX-License-Identifier: MIT
"""How a sample is cut into tiles, and on a GPU how the threads of a block share one."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from cunorm._builds import Macros
from cunorm._cpu_plan import CPU_PACK
from cunorm._teams import ACCESS_BYTES, PACK_BYTES
from cunorm.group_norm._builds import GroupForwardTypes, GroupTypes

LINE = 16  # elements to which rows of channels are padded
# Threads of a GPU's block, bytes of x and dy that each keeps, and packs of them; of a block that
# makes all passes, and of others.
_THREADS = 256
_KEPT_BYTES, _ONE_PASS_KEPT_BYTES, _PACKS = 128, 256, 16
# Elements that a thread of a block that makes all passes keeps at most: in a forward, a backward,
# and one with gelu, whose derivative takes registers too. With more, ptxas spills.
_ONE_PASS_ELEMENTS, _BACKWARD_ELEMENTS, _GELU_ELEMENTS = 128, 32, 16
# A block that makes all passes takes lines of at least a memory sector, and few enough channels to
# hand on their values in shared memory.
_SECTOR, _ONE_PASS_CHANNELS = 32, 512
# Bytes of a pack, once converted, in a backward, which holds several sums of each element.
_BACKWARD_PACK_BYTES = 16
# Packs of a tile on a CPU: parts of lines, or of a channel; both stay in a core's caches. And bytes
# of a line, once converted, that are a pack: each of its sums takes 8 registers of AVX-512.
_CPU_LINES, _CPU_PACKS, _CPU_LINE_BYTES = 256, 64, 512


class Samples(NamedTuple):
    """The sizes of x."""

    samples: int
    positions: int
    channels: int
    groups: int
    channels_last: bool  # in memory

    @property
    def elements(self) -> int:
        """Return how many elements x has."""
        return prod(self[:3])

    @property
    def group_channels(self) -> int:
        """Return how many channels a group has."""
        return self.channels // self.groups

    @property
    def pitch(self) -> int:
        """Return the elements of a row of channels in memory: `sum_pitch` in C++."""
        return -(-self.channels // LINE) * LINE


class Tiling(NamedTuple):
    """How a block's threads share a tile: the constants of `struct Build`."""

    threads: int
    channel_threads: int
    position_threads: int
    pack: int
    packs: int

    def tile(self, channels_last: bool) -> tuple[int, int]:
        """Return how many positions and how many channels a tile has."""
        of_packs = self.position_threads * self.packs
        if channels_last:
            return of_packs, self.channel_threads * self.pack
        return of_packs * self.pack, self.channel_threads

    def macros(self, access: int) -> Macros:
        """Return the part of the build that says so."""
        names = ("THREADS", "CHANNEL_THREADS", "POSITION_THREADS", "PACK", "PACKS")
        sizes = zip(names, map(str, self), strict=True)
        return (*sizes, ("ACCESS", str(min(access, self.pack))))


def cpu_tiling(types: GroupTypes, where: Samples) -> Tiling:
    """Return a CPU's tiles."""
    if not where.channels_last:
        return Tiling(1, 1, 1, CPU_PACK, _CPU_PACKS)
    return Tiling(1, 1, 1, _cpu_line_pack(types, where.channels), _CPU_LINES)


def _cpu_line_pack(types: GroupTypes, channels: int) -> int:
    """Return how many channels of a line are taken at once; the last of them may be fewer.

    All, where they are few. Parts of longer lines are shorter in a backward, as measured.
    """
    longest = _CPU_LINE_BYTES // types.compute.itemsize
    if channels % LINE:
        return CPU_PACK
    if channels <= longest:
        return channels
    most = longest if isinstance(types, GroupForwardTypes) else CPU_PACK
    return min(most, channels & -channels)


def _pack(types: GroupTypes, line: int) -> int:
    """Return the elements that a GPU's thread handles at a time, where so many lie contiguous."""
    itemsizes = [dtype.itemsize for dtype in (*types.loaded(), types.written()) if dtype]
    forward = isinstance(types, GroupForwardTypes)
    converted = PACK_BYTES if forward else _BACKWARD_PACK_BYTES
    return min(ACCESS_BYTES // min(itemsizes), converted // types.compute.itemsize, line & -line)


def _packs(types: GroupTypes, pack: int, kept_bytes: int) -> int:
    """Return how many packs a thread keeps at most."""
    itemsize = sum(max(dtype.itemsize, 4 // pack) for dtype in types.loaded())
    if types.compute.itemsize == 8:
        itemsize = 8 * len(types.loaded())  # compilers keep float64 converted
    return max(1, min(_PACKS, kept_bytes // (pack * itemsize)))


def cuda_tiling(types: GroupTypes, where: Samples) -> Tiling:
    """Return tiles of a sample that a block cannot take whole groups of."""
    pack = _pack(types, where.channels if where.channels_last else where.positions)
    packs = _packs(types, pack, _KEPT_BYTES)
    if where.channels_last:
        across = where.channels // pack
        channel_threads = -(-across // -(-across // _THREADS))
        return Tiling(_THREADS, channel_threads, _THREADS // channel_threads, pack, packs)
    across = -(-where.positions // pack)
    position_threads = min(_THREADS, _power_of_two(across))
    packs = min(packs, _power_of_two(-(-across // position_threads)))
    return Tiling(_THREADS, _THREADS // position_threads, position_threads, pack, packs)


def cuda_one_pass_tiling(types: GroupTypes, where: Samples) -> tuple[Tiling, int] | None:
    """Return tiles of whole groups, and how many groups they have; None where a block has not room.

    Values that a block hands on lie in shared memory.
    """
    block_groups = _one_pass_groups(types, where) if where.channels_last else 1
    channels = block_groups * where.group_channels
    if channels > _ONE_PASS_CHANNELS:
        return None
    line = channels if where.channels_last else where.positions
    pack = _pack(types, line)
    channel_threads = channels // pack if where.channels_last else channels
    along = where.positions if where.channels_last else -(-where.positions // pack)
    position_threads = _THREADS // channel_threads
    if not position_threads:
        return None
    if not where.channels_last:
        position_threads = _power_of_two(position_threads + 1) // 2
    position_threads = min(position_threads, _power_of_two(along))
    packs = _power_of_two(-(-along // position_threads))
    if packs > min(_packs(types, pack, _ONE_PASS_KEPT_BYTES), _one_pass_elements(types) // pack):
        return None
    threads = -(-channel_threads * position_threads // 32) * 32
    return Tiling(threads, channel_threads, position_threads, pack, packs), block_groups


def _one_pass_elements(types: GroupTypes) -> int:
    """Return how many elements registers leave room for."""
    if isinstance(types, GroupForwardTypes):
        return _ONE_PASS_ELEMENTS
    gelu = types.activation.startswith("gelu")
    return _GELU_ELEMENTS if gelu else _BACKWARD_ELEMENTS


def _one_pass_groups(types: GroupTypes, where: Samples) -> int:
    """Return of how many groups a block takes the channels, so that their lines are long enough."""
    size = where.group_channels * types.x.itemsize
    divisors = (n for n in range(1, where.groups + 1) if where.groups % n == 0)
    return next((n for n in divisors if n * size >= _SECTOR), where.groups)


def _power_of_two(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << (n - 1).bit_length()
