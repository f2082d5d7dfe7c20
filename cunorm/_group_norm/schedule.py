# SPDX-License-Identifier: MIT
"""The builds and launches of the group-norm kernels, on a GPU and on a CPU.

The tiles of a sample, and whether one launch makes all passes, depend only on the sample's shape
and memory layout, the operands' dtypes and the GPU. So a sample's results depend neither on other
samples nor on alignment. A CPU's plan of launches changes no result.
"""

from dataclasses import replace
from typing import NamedTuple

from cunorm._core.build import KernelBuild, Launch, Macros, cuda_bool, streaming_stores
from cunorm._core.caps import MAX_SMS, MIN_ASYNC_COPY_BYTES, CpuCaps, Features, GpuCaps
from cunorm._core.plan import GRID_LIMIT
from cunorm._group_norm.kernels import GroupBackwardTypes, GroupTypes
from cunorm._group_norm.layout import LINE, Samples
from cunorm._group_norm.tiling import VALUES, Tiling, cpu_tiling, cuda_tiling


class Schedule(NamedTuple):
    """The launches for a chunk of samples; the grid of each launch is that for one sample."""

    passes: tuple[Launch, ...]
    chunk: int
    part_positions: int
    parts: int  # the parts of a sample
    handed_size: int  # elements of workspace for values that a pass of a chunk hands on
    shares: int = 0  # the shares of a sample for a CPU's threads; if not 0, a chunk is one block


# The passes that a launch makes: FIND, COMBINE and WRITE.
_ALL, _FIND, _COMBINE_AND_WRITE = (True, True, True), (True, False, False), (False, True, True)
# GPUs with little and much shared memory, without and with clusters. A plan for any other GPU
# takes no more workspace than the plan for one of these GPUs.
SOME_GPUS = tuple(
    GpuCaps(MAX_SMS, "", 1024, shared - 1024, shared, 0, Features(clusters, False))
    for shared in (64 << 10, 100 << 10, 164 << 10, 228 << 10)
    for clusters in (False, True)
)
# The most bytes of a chunk that cores share: the last pass finds such a chunk in caches. The most
# bytes of a channels-last sample that one core takes. The least number of samples or, with channels
# first, of groups in all samples, at which each core has its own samples or groups.
_CPU_CHUNK, _CPU_SAMPLE, _CPU_SHARES = 2 << 20, 512 << 10, 16
_CPU_HANDED = 1 << 17  # the most channels of a chunk, each counted once for each part
# The most bytes of h (see group_norm_backward.cu) that a thread keeps between passes; the most of
# a chunk's h that the workspace keeps; the activations for which h is quick to compute again.
_CPU_KEPT_H, _CPU_HANDED_H, _QUICK_ACTIVATIONS = 256 << 10, 12 << 20, ("identity", "relu")
_CPU_SMALL = 1 << 15  # if x has at most so many elements, cores share no sample
MAX_SHARES = 256  # the most shares of a chunk, which are enough for all threads


def cuda_schedule(types: GroupTypes, sizes: Samples, access: int, gpu: GpuCaps) -> Schedule:
    """Plan the launches on a GPU; alignment allows `access` elements (see `Kernel.access_to`)."""
    tiling = cuda_tiling(types, sizes, gpu)
    access = min(access, tiling.pack)
    least = access * min(dtype.itemsize for dtype in types.loaded)
    async_copies = gpu.features.async_copies and least >= MIN_ASYNC_COPY_BYTES
    macros = (
        *_macros(types, sizes, channels=sizes.channels, groups=sizes.groups),
        *tiling.macros(access, async_copies),
    )
    written = types.written
    if types.compute.itemsize == 4 and written is not None and written.itemsize == 2:
        macros += (("APPROXIMATE", "true"),)
    units = sizes.groups // tiling.unit_groups
    parts, shared = tiling.parts * tiling.channel_parts, tiling.shared(types, sizes.channels_last)
    passes, handed = [(_ALL, units * tiling.cluster)], 0
    if not tiling.cluster:
        passes = [(_FIND, units * parts), (_COMBINE_AND_WRITE, units * parts)]
        handed = VALUES * sizes.groups * parts
    schedule = _schedule(types, sizes, tiling, macros, passes, sizes.samples, handed, shared)
    first, *second = schedule.passes
    dependent = gpu.features.programmatic_launches
    return schedule._replace(passes=(first, *(replace(one, dependent=dependent) for one in second)))


def cpu_schedule(types: GroupTypes, sizes: Samples, caps: CpuCaps) -> Schedule:
    """Plan the launches on a CPU; each launch makes all passes.

    A block has some groups of a sample, or a whole chunk with strips that threads share.
    """
    tiling = cpu_tiling(types, sizes)
    macros = (*_macros(types, sizes, channels=0, groups=0), *tiling.macros(1, async_copies=False))
    row = sizes.channels if sizes.channels_last else sizes.positions
    if sizes.channels_last and row % tiling.pack == 0:
        macros += (("WHOLE_PACKS", "true"),)
    sample_bytes = sizes.positions * sizes.channels * types.x.itemsize
    block_groups = _cpu_block_groups(sizes, sample_bytes)
    grid, shares, chunk = 1, 0, sizes.samples
    if block_groups:
        grid = sizes.groups // block_groups
    else:
        macros += (("SHARED_SAMPLES", "true"),)
        shares = tiling.parts * -(-sizes.channels // (tiling.pack if sizes.channels_last else 1))
        chunk = _CPU_CHUNK // sample_bytes
    chunk = max(1, min(chunk, _CPU_HANDED // (tiling.parts * sizes.pitch)))
    handed = VALUES * (tiling.parts * sizes.pitch + sizes.groups)
    if isinstance(types, GroupBackwardTypes) and types.dx is not None:
        kept, h_size = _cpu_kept_h(types, sizes, tiling.pack, block_groups, chunk)
        macros, handed = macros + kept, handed + h_size
    if types.written is not None:
        h = types.compute if ("HANDED_H", "true") in macros else None
        moved = (*types.loaded, types.written, h)
        least, stores = streaming_stores(moved, [types.written], row, types.compute, caps)
        macros += stores if sizes.elements >= least else ()
    schedule = _schedule(types, sizes, tiling, macros, [(_ALL, grid)], chunk, handed, 0)
    return schedule._replace(shares=shares)


def _cpu_kept_h(
    types: GroupTypes, sizes: Samples, pack: int, block_groups: int, chunk: int
) -> tuple[Macros, int]:
    """Return the macro that keeps h, and the elements of h per sample in the workspace.

    With a quick activation no h is kept, but the workspace has the same size.
    """
    lines, row = sizes.positions, sizes.group_channels * (block_groups or sizes.groups)
    if not sizes.channels_last:
        lines, row = row, lines
    elements, itemsize = lines * -(-row // pack) * pack, types.compute.itemsize
    kept: Macros = (("KEPT_H", str(_CPU_KEPT_H // (pack * itemsize))),)
    fits, handed = elements * itemsize <= _CPU_KEPT_H, 0
    if not block_groups:
        kept = (("HANDED_H", "true"),)
        fits, handed = chunk * elements * itemsize <= _CPU_HANDED_H, elements + LINE
    if not fits:
        return (), 0
    return () if types.activation in _QUICK_ACTIVATIONS else kept, handed


def _cpu_block_groups(sizes: Samples, sample_bytes: int) -> int:
    """Return how many groups of a sample one core takes in all passes; 0: cores share groups."""
    if sizes.elements <= _CPU_SMALL:
        return sizes.groups
    if not sizes.channels_last:
        return 1 if sizes.samples * sizes.groups >= _CPU_SHARES else 0
    few = sample_bytes <= _CPU_SAMPLE and sizes.samples >= _CPU_SHARES
    return sizes.groups if few else 0


def _schedule(
    types: GroupTypes,
    sizes: Samples,
    tiling: Tiling,
    macros: Macros,
    passes: list[tuple[tuple[bool, bool, bool], int]],
    chunk: int,
    handed: int,
    shared: int,
) -> Schedule:
    """Return a Schedule; `passes` (flags and blocks of each launch) and `handed` are per sample."""
    launches = []
    for flags, blocks in passes:
        found = zip(("FIND", "COMBINE", "WRITE"), map(cuda_bool, flags), strict=True)
        build = KernelBuild(types.kernel, (*macros, *found))
        reads = flags[0] or types.written is not None
        launches.append(Launch(build, blocks, tiling.threads, shared=shared if reads else 0))
    chunk = max(1, min(sizes.samples, chunk, GRID_LIMIT // max(one.grid for one in launches)))
    handed = -(-handed * chunk // LINE) * LINE
    return Schedule(tuple(launches), chunk, tiling.part_positions, tiling.parts, handed)


def _macros(types: GroupTypes, sizes: Samples, channels: int, groups: int) -> Macros:
    return (
        *types.macros(),
        ("CHANNELS_LAST", cuda_bool(sizes.channels_last)),
        ("CHANNELS", str(channels)),
        ("GROUPS", str(groups)),
    )
