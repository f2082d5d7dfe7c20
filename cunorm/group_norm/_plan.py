# SPDX-License-Identifier: MIT
"""How the group-norm kernels are built and started, on a GPU and on a CPU.

How a sample is cut into tiles, and on a GPU whether one block makes all passes, depends on its
shape and on the operands' dtypes alone, so that a sample's results depend neither on the other
samples nor on alignment. On a CPU the same tiles are gone over by whichever launches are quickest:
no result depends on them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cunorm._builds import Build, Macros
from cunorm._cpu_plan import CPU_PACK, cpu_stores
from cunorm._plan import GRID_LIMIT
from cunorm.group_norm._builds import GroupBackwardTypes, GroupTypes
from cunorm.group_norm._tiling import (
    LINE,
    Samples,
    Tiling,
    cpu_tiling,
    cuda_one_pass_tiling,
    cuda_tiling,
)

VALUES = 3  # that a pass hands on at most, of each channel of a part and of each group


class Pass(NamedTuple):
    """A launch: what is compiled, blocks for each sample, threads of a block."""

    build: Build
    blocks: int
    threads: int


class Schedule(NamedTuple):
    """The launches that go over so many samples at a time."""

    passes: tuple[Pass, ...]
    chunk: int
    block_groups: int  # groups of which one block makes all passes
    handed_size: int  # elements of what the passes of a chunk hand on in global memory


# Bytes of the samples that all cores together take at a time where each pass is a launch, so that
# the last pass finds them in the cores' caches; and of those of which one core makes all passes, if
# there are enough to share.
_CPU_CHUNK, _CPU_SAMPLE, _CPU_SHARES = 2 << 20, 512 << 10, 16
# Channels, of all parts of the samples of a launch, at most: each hands on some values.
_CPU_HANDED = 1 << 17
# Bytes of a group's h that a thread keeps from its first pass to the last.
_CPU_KEPT_H = 256 << 10
_CPU_SMALL = 1 << 15  # elements that one core takes in any case


@lru_cache(maxsize=4096)
def cuda_schedule(types: GroupTypes, where: Samples, access: int) -> Schedule:
    """Plan the launches on a GPU; `access` is what alignment allows (see `common_access`)."""
    whole = cuda_one_pass_tiling(types, where)
    tiling = whole[0] if whole else cuda_tiling(types, where)
    macros = (
        *_macros(types, where, channels=where.channels, groups=where.groups),
        *tiling.macros(access),
    )
    return _schedule(types, where, tiling, macros, whole[1] if whole else 0, where.samples)


@lru_cache(maxsize=4096)
def cpu_schedule(types: GroupTypes, where: Samples) -> Schedule:
    """Plan the launches on a CPU."""
    tiling = cpu_tiling(types, where)
    macros = (*_macros(types, where, channels=0, groups=0), *tiling.macros(access=1))
    row = where.channels if where.channels_last else where.positions
    written = types.written()
    if written is not None:
        macros += cpu_stores(where.elements, row, written, types.compute)
    sample_bytes = where.positions * where.channels * types.x.itemsize
    block_groups = _cpu_block_groups(where, sample_bytes)
    chunk = where.samples if block_groups else _CPU_CHUNK // sample_bytes
    handed_channels = _parts(tiling, where) * where.pitch
    chunk = max(1, min(where.samples, chunk, _CPU_HANDED // handed_channels))
    if isinstance(types, GroupBackwardTypes) and _keeps_h(types, where, block_groups):
        kept_h = _CPU_KEPT_H // (CPU_PACK * types.compute.itemsize)
        return _schedule(types, where, tiling, macros, block_groups, chunk, kept_h)
    return _schedule(types, where, tiling, macros, block_groups, chunk)


def _keeps_h(types: GroupBackwardTypes, where: Samples, block_groups: int) -> bool:
    """Whether a thread keeps what of its group an activation took long to compute."""
    if types.activation == "identity" or types.dx is None or where.channels_last:
        return False
    packs = where.group_channels * -(-where.positions // CPU_PACK)
    return block_groups == 1 and packs * CPU_PACK * types.compute.itemsize <= _CPU_KEPT_H


def _cpu_block_groups(where: Samples, sample_bytes: int) -> int:
    """Return of how many groups one core makes all passes, 0: of none."""
    if where.elements <= _CPU_SMALL:
        return where.groups
    if not where.channels_last:
        return 1 if where.samples * where.groups >= _CPU_SHARES else 0
    few = sample_bytes <= _CPU_SAMPLE and where.samples >= _CPU_SHARES
    return where.groups if few else 0


def _schedule(
    types: GroupTypes,
    where: Samples,
    tiling: Tiling,
    macros: Macros,
    block_groups: int,
    chunk: int,
    kept_h: int = 0,
) -> Schedule:
    """Return the launches: one where blocks have whole groups, else one for each pass."""
    if isinstance(types, GroupBackwardTypes):
        macros += (("KEPT_H", str(kept_h)),)
    channels = tiling.tile(where.channels_last)[1]
    parts, tiles = _parts(tiling, where), -(-where.channels // channels)
    writes = types.written() is not None
    handed = VALUES * (parts * where.pitch + where.groups)
    if block_groups:
        passes = [((True, True, writes), where.groups // block_groups)]
        handed = handed if tiling.threads == 1 else 0
    else:
        passes = [((True, False, False), parts * tiles), ((False, True, False), where.groups)]
        passes += [((False, False, True), parts * tiles)] if writes else []
    names = ("FIND", "COMBINE", "WRITE")
    chunk = min(chunk, GRID_LIMIT // max(blocks for _, blocks in passes))
    return Schedule(
        tuple(
            Pass(
                Build(
                    types.kernel,
                    (*macros, *((n, str(f).lower()) for n, f in zip(names, flags, strict=True))),
                ),
                blocks,
                tiling.threads,
            )
            for flags, blocks in passes
        ),
        chunk,
        block_groups or 1,
        -(-handed * chunk // LINE) * LINE,
    )


def _parts(tiling: Tiling, where: Samples) -> int:
    """Return how many parts the positions of a sample are summed in."""
    return -(-where.positions // tiling.tile(where.channels_last)[0])


def _macros(types: GroupTypes, where: Samples, channels: int, groups: int) -> Macros:
    return (
        *types.macros(),
        ("CHANNELS_LAST", str(where.channels_last).lower()),
        ("CHANNELS", str(channels)),
        ("GROUPS", str(groups)),
    )
