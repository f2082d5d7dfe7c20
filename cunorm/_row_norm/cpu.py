# SPDX-License-Identifier: MIT
"""Launch plans of the row norms on a CPU."""

from __future__ import annotations

from dataclasses import replace

from cunorm._core.build import KernelBuild, Launch, Macros, cpu_stores
from cunorm._core.caps import CpuCaps
from cunorm._core.dtypes import FLOAT32, DType
from cunorm._core.param_grad import CPU_PACK
from cunorm._row_norm.geometry import RowShape
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes, RowTypes
from cunorm._row_norm.tiling import Team

CPU_TEAM = Team(threads=1, threads_per_row=1, pack=CPU_PACK, packs=16)

# Bytes of a row above which both passes of the backward prefetch: measured, 2 cores, 32 MiB cache.
_SHORT_ROW = 8 << 10
# Bytes of a row above which the next rows are not prefetched, for two inputs without a gate or not,
# by the bytes of an element: measured, 2 cores, 480 MiB cache.
_WIDE_ROW = {True: {2: 512 << 10, 4: 48 << 10}, False: {2: 512 << 10, 4: 128 << 10}}

# Bytes of a row that a thread keeps for its next pass; how many of the widest such rows it takes at
# once in a backward (`rows_at_once`); and activations that compute as fast as they load.
_KEPT_BYTES, _KEPT_ROWS, _QUICK = 128 << 10, 2, ("identity", "relu")

# Packs of a chunk, and chunks of a part of a row that cores share, as in reduce.cuh. They share at
# most this many rows, wider than this; in a backward each of them needs its own partial sums, which
# up to CPU_SHARED_PARTS rows have.
_CHUNK, _PART_CHUNKS = 16, 32
_CPU_SHARED_WIDTH, CPU_SHARED_ROWS, CPU_SHARED_PARTS = 1 << 16, 15, 4


def cpu_forward(types: ForwardTypes, where: RowShape, caps: CpuCaps) -> Launch:
    """Plan row_norm_forward on a CPU."""
    macros = types.macros() + CPU_TEAM.macros(width=0, groups=0, access=1)
    macros += _cpu_rows(where, types.x, types.gate is None and types.residual is not None)
    macros += cpu_stores(where.elements, where.width, types.y, types.compute, caps)
    if types.formula.pre_gate:
        macros += _cpu_kept(types, where, types.compute.itemsize, rows=1)
    build = KernelBuild("row_norm_forward", macros)
    return Launch(build, _cpu_blocks(where.rows) * where.groups, 1)


def cpu_forward_parts(where: RowShape) -> int:
    """Return the parts of each row where blocks share a few long rows, else 0."""
    return _parts(where.width) if _is_shared(where) else 0


def cpu_backward_parts(where: RowShape) -> int:
    """Return the same for a backward, where each row needs its own partial sums."""
    is_shared = _is_shared(where) and where.rows == cpu_parts(where.rows)
    return _parts(where.width) if is_shared else 0


def _parts(width: int) -> int:
    """Return the number of parts into which `Row` cuts a row; its first chunk is a pack."""
    packs, cut = divmod(width, CPU_PACK)
    chunks = 1 - (1 - packs) // _CHUNK + bool(cut)
    return -(-chunks // _PART_CHUNKS)


def _is_shared(where: RowShape) -> bool:
    is_few = 0 < where.rows * where.groups <= CPU_SHARED_ROWS
    return is_few and where.width > _CPU_SHARED_WIDTH


def with_shared_rows(launch: Launch, where: RowShape) -> Launch:
    """Return the launch for rows that threads share: each row is a block."""
    build = KernelBuild(launch.build.kernel, (*launch.build.macros, ("SHARED_ROWS", "true")))
    return replace(launch, build=build, grid=where.rows * where.groups)


def cpu_backward(types: BackwardTypes, where: RowShape, caps: CpuCaps) -> Launch:
    """Plan row_norm_backward on a CPU."""
    row = types.x or types.dy
    macros = types.macros() + CPU_TEAM.macros(width=0, groups=0, access=1)
    macros += (("STAGES", "0"), ("SUMS_IN_SHARED", "false"))
    macros += _cpu_rows(where, row, types.gate is None)
    if where.width * row.itemsize > _SHORT_ROW:
        macros += (("LONG_PASSES", "true"),)
    largest = types.dx or types.dgate
    if largest is not None:
        macros += cpu_stores(where.elements, where.width, largest, types.compute, caps)
    if types.dgate is not None:
        macros += _cpu_kept(types, where, 2 * types.compute.itemsize, _KEPT_ROWS)
    parts = cpu_parts(where.rows) if types.dweight or types.dbias else _cpu_blocks(where.rows)
    build = KernelBuild("row_norm_backward", macros)
    return Launch(build, parts * where.groups, 1, parts, where.sums_pitch(twice=True))


def _cpu_rows(where: RowShape, row: DType, two_inputs: bool) -> Macros:
    """Return the macro of rows too wide to prefetch the next one."""
    widest = _WIDE_ROW[two_inputs].get(row.itemsize)
    is_wide = widest is not None and where.width * row.itemsize > widest
    return (("WIDE_ROWS", "true"),) if is_wide else ()


def _cpu_kept(types: RowTypes, where: RowShape, itemsize: int, rows: int) -> Macros:
    """Return the macro of rows whose activations a thread keeps, as they are slow to compute.

    With a gate of more than 16 bits, memory is slower still.
    """
    packs = _KEPT_BYTES // (CPU_PACK * itemsize)
    is_narrow = types.gate is not None and types.gate.itemsize == 2 and types.compute is FLOAT32
    is_slow = is_narrow and types.formula.activation not in _QUICK
    is_kept = is_slow and where.width <= packs * CPU_PACK
    return (("HELD_PACKS", str(rows * packs)),) if is_kept else ()


def _cpu_blocks(rows: int) -> int:
    """Return the number of runs of rows that threads share; results do not depend on it."""
    return min(rows, 256)


def cpu_parts(rows: int) -> int:
    """Return the number of partial sums: enough to share, few enough to cost nothing."""
    enough_to_share = min(rows, max(CPU_SHARED_PARTS, min(32, rows // 32)))
    return max(enough_to_share, -(-rows // 256))
