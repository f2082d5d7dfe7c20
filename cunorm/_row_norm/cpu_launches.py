# SPDX-License-Identifier: MIT
"""The launch plans of row norms on a CPU."""

import math
from typing import NamedTuple

from cunorm._core.build import KernelBuild, Launch, Macros, streaming_stores
from cunorm._core.caps import CpuCaps
from cunorm._core.dtypes import FLOAT32, DType
from cunorm._core.param_grad import CPU_PACK
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes, RowTypes
from cunorm._row_norm.launches import SHARED, RowLaunch, RowsOf
from cunorm._row_norm.shape import RowShape
from cunorm._row_norm.tiling import Team

CPU_TEAM = Team(threads=1, threads_per_row=1, pack=CPU_PACK, packs=16)
_LINE_BYTES = 64  # a line of the caches, in which strided rows lie side by side
_CPU_BLOCKS = 256  # the most runs of rows if there are no sums; no result depends on it

# In rows of more than _SHORT_ROW bytes, both passes of a backward prefetch. _SHORT_ROW_OF_MANY is
# the limit if x is larger than the last cache (measured: 32 MiB) and an element has 4 or 8 bytes.
_SHORT_ROW, _SHORT_ROW_OF_MANY = 8 << 10, 256
# In rows of more bytes, the next rows are not prefetched. True: the inputs are x and residual, or
# those of a backward without a gate. The inner keys are bytes of an element. 384 KiB was
# measured on two cores with 32 MiB of cache, the other limits on two cores with 480 MiB.
_WIDE_ROW = {True: {2: 384 << 10, 4: 48 << 10}, False: {2: 512 << 10, 4: 128 << 10}}
_KEPT_BYTES = 128 << 10  # the most computed bytes of a row that a thread keeps for the next pass
_KEPT_ROWS = 2  # how many rows of _KEPT_BYTES a backward keeps; `rows_at_once` takes so many
_SHORT_KEPT_ROW = 2 << 10  # if a kept row of x has more bytes, both passes of a forward prefetch
_QUICK = ("identity", "relu")  # activations that compute as fast as they load
_RUN, _LEAST_PACK = 8, 16  # the most packs of a row that is one run, and their least columns
_CHUNK, _PART_CHUNKS = 16, 8  # packs of a chunk; chunks of a part of a row, as in host/reduce.cuh
CPU_SHARED_ROWS = 15  # the most rows that cores share
_FEWEST_ROW_PARTS = 3  # the fewest parts of a row that cores share
_CPU_PART_ROWS = 16  # the fewest rows of a segment that a core adds up
_FEWEST_SUMS = 4  # the fewest rows of partial sums, unless there are fewer rows


class _CpuBuild(NamedTuple):
    """The part of a CPU's build that differs between the directions."""

    macros: Macros
    written: list[DType | None]  # the results that bypass the caches if they are large
    long_elements: float  # both passes prefetch if all rows together have so many elements


def cpu_launch(
    types: RowTypes, shape: RowShape, caps: CpuCaps, rows_of: RowsOf = SHARED
) -> RowLaunch:
    """Plan a kernel's launch on a CPU.

    If threads share rows, each row is a block of a forward. In a backward, all rows of a group are
    one block, with one row of sums.
    """
    is_forward = isinstance(types, ForwardTypes)
    if isinstance(types, ForwardTypes):
        has_sums, own = False, _cpu_forward(types, shape)
        begins_with_pack = types.begins_with_pack()
    else:
        has_sums, own = types.sum_count > 0, _cpu_backward(types, shape, caps)
        begins_with_pack = False
    moved = [getattr(types, name) for name in types.lines()]
    stores = streaming_stores(moved, own.written, shape.width, types.compute, caps)
    row_width, groups = shape.row_width, shape.groups * rows_of.number
    has_segments = rows_of.segments is not None
    parts_cut_block = _parts_cut_block(types, shape, begins_with_pack=begins_with_pack)
    row = types.x if isinstance(types, ForwardTypes) else types.x or types.dy
    unit = _LINE_BYTES // row.itemsize if types.strided else 1  # rows
    least_elements, store_macros = stores

    def cut(rows: int) -> tuple[int, int, Macros]:
        parts = min(_sums_of(rows, has_segments) if has_sums else _CPU_BLOCKS, -(-rows // unit))
        elements, row_parts = rows * row_width * rows_of.number, 0
        bypasses_caches = elements >= least_elements and not types.strided  # tiles are read again
        macros = store_macros if bypasses_caches else ()
        if elements >= own.long_elements:
            macros += (("LONG_PASSES", "true"),)
        if rows <= CPU_SHARED_ROWS and not parts_cut_block and not types.strided:
            few = shape._replace(groups=groups)
            row_parts = _row_parts(few, rows, parts * groups, begins_with_pack=begins_with_pack)
        if row_parts:
            parts, macros = rows if is_forward else 1, (*macros, ("SHARED_ROWS", "true"))
        return parts, row_parts, macros

    parts, _, macros = cut(shape.rows)
    if _pack_of_run(shape.width):
        macros += (("ONE_RUN", "true"),)
    team = CPU_TEAM._replace(pack=_pack(shape.width))
    macros = (*types.macros(), *team.macros(width=0, groups=0, access=1), *own.macros, *macros)
    macros += rows_of.macros
    sums = (0, 0) if is_forward else (parts * rows_of.number, shape.sums_pitch(twice=True))
    launch = Launch(KernelBuild(types.kernel, macros), parts * groups, 1, *sums)
    return RowLaunch(launch, cut, groups)


def _cpu_forward(types: ForwardTypes, shape: RowShape) -> _CpuBuild:
    two_inputs = types.gate is None and types.residual is not None
    macros = _cpu_rows(shape, types.x, two_inputs)
    if types.formula.pre_gate:
        kept = _cpu_kept(types, shape, types.compute.itemsize, rows=1)
        is_long = kept and shape.width * types.x.itemsize > _SHORT_KEPT_ROW
        macros += kept + ((("LONG_IF_HELD", "true"),) if is_long else ())
    return _CpuBuild(macros, types.written(), math.inf)  # without residual_out, which is read again


def _cpu_backward(types: BackwardTypes, shape: RowShape, caps: CpuCaps) -> _CpuBuild:
    row = types.x or types.dy
    row_bytes, long_elements = shape.width * row.itemsize, math.inf
    macros: Macros = (("STAGES", "0"), ("SUMS_IN_SHARED", "false"))
    macros += _cpu_rows(shape, row, types.gate is None)
    if types.dgate is not None and not types.formula.branch_gate:
        macros += _cpu_kept(types, shape, 2 * types.compute.itemsize, _KEPT_ROWS)
    if row_bytes > _SHORT_ROW:
        long_elements = 0
    elif row_bytes > _SHORT_ROW_OF_MANY and row.itemsize > 2:
        long_elements = caps.last_cache_bytes / row.itemsize
    return _CpuBuild(macros, [types.dx, types.dresidual, types.dgate], long_elements)


def cpu_sums(shape: RowShape, *, has_segments: bool = False, strided: bool = False) -> int:
    """Return the number of rows of partial sums, which is 1 if threads share rows."""
    sums = _sums_of(shape.rows, has_segments)
    if strided:
        return sums
    blocks = sums * shape.groups
    return 1 if _row_parts(shape, shape.rows, blocks, begins_with_pack=False) else sums


def _sums_of(rows: int, has_segments: bool) -> int:
    """Return a small number of rows of partial sums that is enough for all threads.

    A segment has one row of sums if it has so few rows that threads might share them.
    """
    if has_segments:
        return min(-(-rows // _CPU_PART_ROWS), max(32, -(-rows // 256)))
    for_threads = min(rows, max(_FEWEST_SUMS, min(32, rows // 32)))
    return max(for_threads, -(-rows // 256))


def _row_parts(shape: RowShape, rows: int, blocks: int, *, begins_with_pack: bool) -> int:
    """Return the number of parts into which `Row` cuts each row; 0: threads share no rows.

    Threads share a few long rows if each has at least three parts, and no fewer parts than the
    `blocks` of a launch without sharing. No part is empty: its 0 could change Kahan's sum.
    """
    chunks, has_cut = _chunks_of(shape, begins_with_pack=begins_with_pack)
    parts = -(-(chunks + has_cut) // _PART_CHUNKS)
    is_few = 0 < rows * shape.groups <= CPU_SHARED_ROWS
    return parts if is_few and parts >= max(blocks, _FEWEST_ROW_PARTS) else 0


def _chunks_of(shape: RowShape, *, begins_with_pack: bool) -> tuple[int, bool]:
    """Return the chunks of whole packs of a row, and whether another chunk has a cut pack."""
    packs, cut = divmod(shape.width, CPU_PACK)
    return begins_with_pack - -packs // _CHUNK, bool(cut)


def _parts_cut_block(types: RowTypes, shape: RowShape, *, begins_with_pack: bool) -> bool:
    """Return whether the columns that share a scale lie in two parts of a row.

    Parts begin with a multiple of 16 packs, or with the cut pack.
    """
    block_packs = getattr(types, "block", 0) // CPU_PACK
    chunks, has_cut = _chunks_of(shape, begins_with_pack=begins_with_pack)
    begins_part = has_cut and chunks % _PART_CHUNKS == 0
    return begins_part and block_packs > 1 and shape.width // CPU_PACK % block_packs > 0


def _pack_of_run(width: int) -> int:
    """Return the columns of a pack if a row is one run of whole packs, otherwise 0."""
    pack = math.gcd(width, CPU_PACK)
    return pack if pack >= _LEAST_PACK and width <= _RUN * pack else 0


def _pack(width: int) -> int:
    return _pack_of_run(width) or CPU_PACK


def _cpu_rows(shape: RowShape, row: DType, two_inputs: bool) -> Macros:
    """Return the macro for rows that are too wide to prefetch the next row."""
    widest = _WIDE_ROW[two_inputs].get(row.itemsize)
    is_wide = widest is not None and shape.width * row.itemsize > widest
    return (("WIDE_ROWS", "true"),) if is_wide else ()


def _cpu_kept(types: RowTypes, shape: RowShape, itemsize: int, rows: int) -> Macros:
    """Return the macro for rows whose slow activations a thread keeps for the next pass."""
    has_gate = types.gate is not None and types.compute is FLOAT32
    is_slow = has_gate and types.formula.activation not in _QUICK
    is_kept = is_slow and shape.width * itemsize <= _KEPT_BYTES
    packs = _KEPT_BYTES // (_pack(shape.width) * itemsize)
    return (("HELD_PACKS", str(rows * packs)),) if is_kept else ()
