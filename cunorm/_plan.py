# SPDX-License-Identifier: MIT
"""What is compiled (Build) and how it is started (Launch), on a GPU and on a CPU.

A plan depends on shapes, dtypes and the device, never on the number of CPU threads; how a row is
cut into packs depends on its width and the operands' dtypes alone, so that a row's result does not
depend on the rows around it, nor on alignment.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from cunorm._builds import (
    BackwardTypes,
    Build,
    ForwardTypes,
    Launch,
    Macros,
    ParamGradTypes,
)
from cunorm._cpu import last_cache_bytes
from cunorm._dtypes import FLOAT32, FLOAT64, DType
from cunorm._features import NONE, Features
from cunorm._teams import ACCESS_BYTES, Team, cuda_team

CPU_PACK = 64
GRID_LIMIT = 2**31 - 1


class Walk(NamedTuple):
    """The rows that share a statistic each: in every group of columns there are `rows` of them."""

    rows: int
    width: int
    groups: int = 1

    @property
    def elements(self) -> int:
        """Return how many elements x has."""
        return self.rows * self.width * self.groups

    def not_empty(self) -> Walk:
        """Return this, or one row of it where there is none, for a launch plan."""
        return self if self.rows else self._replace(rows=1)


ASYNC_COPIES: Macros = (("ASYNC_COPIES", "true"),)
CPU_TEAM = Team(threads=1, threads_per_row=1, pack=CPU_PACK, packs=0)

# Stores past a CPU's caches pay, also for who reads the result next, where rows are whole cache
# lines and the result has such a share of the last cache, by the bytes of an element (of two, a
# store is half a line; of eight there are none), or so many bytes in any case. Measured with two
# cores and 32 MiB of cache, and with 480 MiB.
_LARGE_SHARE, _LARGE_RESULT, _CACHE_LINE = {4: 4, 2: 2}, 32 << 20, 64
# Bytes of a row of x above which the backward prefetches in both of its passes; measured with the
# former.
_SHORT_ROW = 8 << 10
# Bytes of a row of x above which nothing is prefetched of rows to come, by the bytes of an element:
# of two inputs without a gate, and otherwise. Measured with the latter.
_WIDE_ROW = {True: {2: 512 << 10, 4: 48 << 10}, False: {2: 512 << 10, 4: 128 << 10}}

# Bytes of a row that a CPU's thread keeps in one pass for the next (a row that threads share is
# wider); how many of the widest such rows it takes at once in a backward, or twice as many of half
# their width (`rows_at_once`); and activations that take no longer to compute than to load.
_KEPT_BYTES, _KEPT_ROWS, _QUICK = 128 << 10, 2, ("identity", "relu")

# Packs of a run, and runs of a part of a row that a CPU's cores share, as `RowPart` has them. They
# share rows wider than this, where there are so many at most.
_RUN, _PART_RUNS = 16, 32
_CPU_SHARED_WIDTH, CPU_SHARED_ROWS = 1 << 16, 15
# Rows of so many have partial sums of their own each, which those that are shared need.
CPU_SHARED_PARTS = 4

# Blocks of the backward on each multiprocessor, by the greatest width they serve.
_BLOCKS_PER_SM = ((256, 16), (1024, 8), (2048, 4), (4096, 2))
# Bytes of shared memory for rows that are copied while others are computed: a block has 48 KiB, and
# sums take some. An asynchronous copy is of so many bytes at least.
_STAGES, _STAGED_BYTES, _LEAST_COPY = 2, 40 << 10, 4
# Multiprocessors that a backward keeps busy at most: no GPU had more when this was written, and
# so memory for partial sums can be planned before it is known on which one they are taken.
MOST_SMS = 256


@lru_cache(maxsize=4096)
def cuda_forward(
    types: ForwardTypes, where: Walk, access: int, features: Features = NONE
) -> Launch:
    """Plan row_norm_forward on a GPU; `access` is what alignment allows (see `common_access`)."""
    team = cuda_team(types, where.width, features)
    macros = types.macros() + team.macros(where.width, where.groups, min(access, team.pack))
    blocks_of_all = where.groups * team.cluster
    parts = min(-(-where.rows // team.rows_per_block), GRID_LIMIT // blocks_of_all)
    return Launch(Build("row_norm_forward", macros), parts * blocks_of_all, team.threads)


@lru_cache(maxsize=4096)
def cuda_backward(
    types: BackwardTypes, where: Walk, access: int, sm_count: int, features: Features = NONE
) -> Launch:
    """Plan row_norm_backward on a GPU with `sm_count` multiprocessors."""
    team = cuda_team(types, where.width, features)
    macros = types.macros() + team.macros(where.width, where.groups, min(access, team.pack))
    sums = types.dweight or types.dbias
    blocks = _cuda_parts(where, sm_count) if sums else GRID_LIMIT // where.groups
    parts = min(-(-where.rows // team.rows_per_block), max(1, blocks // team.cluster))
    if features.async_copies and copies_rows(types, where.rows, team, access, parts):
        macros += ASYNC_COPIES
    return Launch(
        Build("row_norm_backward", macros),
        parts * where.groups * team.cluster,
        team.threads,
        parts,
        sums_pitch(team, where),
    )


def copies_rows(types: BackwardTypes, rows: int, team: Team, access: int, parts: int) -> bool:
    """Whether each team of a backward copies its next row to shared memory: one of several."""
    itemsizes = [dtype.itemsize for dtype in (types.dy, types.x, types.gate) if dtype is not None]
    staged = _STAGES * team.threads * team.packs * team.pack * sum(itemsizes)
    return (
        rows > parts * team.rows_per_block
        and 0 < staged <= _STAGED_BYTES
        and min(access, team.pack) * min(itemsizes) >= _LEAST_COPY
    )


def _cuda_parts(where: Walk, sm_count: int) -> int:
    """Return how many blocks of each group keep a GPU busy."""
    blocks_per_sm = next((blocks for limit, blocks in _BLOCKS_PER_SM if where.width <= limit), 1)
    return max(1, min(sm_count, MOST_SMS) * blocks_per_sm // where.groups)


@lru_cache(maxsize=1024)
def cuda_param_grad(types: ParamGradTypes, width: int) -> Launch:
    """Plan param_grad on a GPU."""
    column_threads, part_threads = 32, 16
    macros = (
        *types.macros(),
        ("COLUMN_THREADS", str(column_threads)),
        ("PART_THREADS", str(part_threads)),
        ("PACK", "1"),
    )
    grid = -(-width // column_threads)
    return Launch(Build("param_grad", macros), grid, column_threads * part_threads)


@lru_cache(maxsize=4096)
def cpu_forward(types: ForwardTypes, where: Walk) -> Launch:
    """Plan row_norm_forward on a CPU."""
    macros = types.macros() + CPU_TEAM.macros(width=0, groups=0, access=1)
    macros += _cpu_rows(where, types.x, types.gate is None and types.residual is not None)
    macros += _cpu_stores(where, types.y, types.compute)
    if types.formula.pre_gate:
        macros += _cpu_kept(types, where, types.compute.itemsize, rows=1)
    return Launch(Build("row_norm_forward", macros), _cpu_blocks(where.rows) * where.groups, 1)


def cpu_forward_parts(where: Walk) -> int:
    """Return into how many parts rows are cut, of few and long ones that blocks share; else 0."""
    return _parts(where.width, first_run=1) if _is_shared(where) else 0


def cpu_backward_parts(where: Walk) -> int:
    """Return the same of a backward, where each row has partial sums of its own."""
    is_shared = _is_shared(where) and where.rows == _cpu_parts(where.rows)
    return _parts(where.width, first_run=_RUN) if is_shared else 0


def _parts(width: int, first_run: int) -> int:
    """Return what `RowPart` counts."""
    packs, cut = divmod(width, CPU_PACK)
    runs = -(-(packs + _RUN - first_run) // _RUN) + bool(cut)
    return -(-runs // _PART_RUNS)


def _is_shared(where: Walk) -> bool:
    few = 0 < where.rows * where.groups <= CPU_SHARED_ROWS
    return few and where.width > _CPU_SHARED_WIDTH


def cpu_shared(launch: Launch, where: Walk, parts: int) -> Launch:
    """Plan one pass over rows that blocks share, where one block would have whole rows."""
    build = Build(launch.build.kernel, (*launch.build.macros, ("SHARED_ROWS", "true")))
    return replace(launch, build=build, grid=parts * where.rows * where.groups)


@lru_cache(maxsize=4096)
def cpu_backward(types: BackwardTypes, where: Walk) -> Launch:
    """Plan row_norm_backward on a CPU."""
    row = types.x or types.dy
    macros = types.macros() + CPU_TEAM.macros(width=0, groups=0, access=1)
    macros += _cpu_rows(where, row, types.gate is None)
    if where.width * row.itemsize > _SHORT_ROW:
        macros += (("LONG_PASSES", "true"),)
    largest = types.dx or types.dgate
    if largest is not None:
        macros += _cpu_stores(where, largest, types.compute)
    if types.dgate is not None:
        macros += _cpu_kept(types, where, 2 * types.compute.itemsize, _KEPT_ROWS)
    parts = _cpu_parts(where.rows) if types.dweight or types.dbias else _cpu_blocks(where.rows)
    build = Build("row_norm_backward", macros)
    return Launch(build, parts * where.groups, 1, parts, sums_pitch(CPU_TEAM, where))


@lru_cache(maxsize=1024)
def cpu_param_grad(types: ParamGradTypes, width: int) -> Launch:
    """Plan param_grad on a CPU."""
    macros = (
        *types.macros(),
        ("COLUMN_THREADS", "1"),
        ("PART_THREADS", "1"),
        ("PACK", str(CPU_PACK)),
    )
    return Launch(Build("param_grad", macros), -(-width // CPU_PACK), 1)


def _cpu_rows(where: Walk, row: DType, two_inputs: bool) -> Macros:
    """Return the macro of rows so wide that none of those to come is prefetched."""
    widest = _WIDE_ROW[two_inputs].get(row.itemsize)
    is_wide = widest is not None and where.width * row.itemsize > widest
    return (("WIDE_ROWS", "true"),) if is_wide else ()


def _cpu_kept(types: ForwardTypes | BackwardTypes, where: Walk, itemsize: int, rows: int) -> Macros:
    """Return the macro of rows of which a thread keeps what an activation took long to compute.

    Where the gate has more than 16 bits memory takes longer still.
    """
    packs = _KEPT_BYTES // (CPU_PACK * itemsize)
    is_narrow = types.gate is not None and types.gate.itemsize == 2 and types.compute is FLOAT32
    is_slow = is_narrow and types.formula.activation not in _QUICK
    is_kept = is_slow and where.width <= packs * CPU_PACK
    return (("KEPT_PACKS", str(rows * packs)),) if is_kept else ()


def _cpu_stores(where: Walk, result: DType, compute: DType) -> Macros:
    return cpu_stores(where.elements, where.width, result, compute)


def cpu_stores(elements: int, row: int, result: DType, compute: DType) -> Macros:
    """Return the macro that sends stores past the caches, for large results of whole lines."""
    itemsize = result.itemsize
    share = _LARGE_SHARE.get(itemsize)
    if share is None or compute is FLOAT64 or row * itemsize % _CACHE_LINE:
        return ()
    large = min(_LARGE_RESULT, last_cache_bytes() // share)
    return (("NON_TEMPORAL", "true"),) if elements * itemsize >= large else ()


def _cpu_blocks(rows: int) -> int:
    """Return how many runs of rows a CPU's threads share; results do not depend on it."""
    return min(rows, 256)


def _cpu_parts(rows: int) -> int:
    """Return how many partial sums there are: enough to share, few enough to cost nothing."""
    enough_to_share = min(rows, max(CPU_SHARED_PARTS, min(32, rows // 32)))
    return max(enough_to_share, -(-rows // 256))


def workspace_size(compute: DType, where: Walk, sm_count: int | None) -> int:
    """Return the bytes that partial sums for one parameter take at most; None: on a CPU."""
    rows = where.not_empty().rows
    parts = _cpu_parts(rows) if sm_count is None else min(rows, _cuda_parts(where, sm_count))
    return parts * sums_pitch(CPU_TEAM, where) * compute.itemsize


def sums_pitch(team: Team, where: Walk) -> int:
    """Return the elements of a row of partial sums; those of streamed rows have a second row.

    A row of sums is whole cache lines: `sum_pitch` in C++.
    """
    pitch = -(-where.width * where.groups // 16) * 16
    return 2 * pitch if team.packs == 0 else pitch


def common_access(width: int, operands: list[tuple[int, int, tuple[int, ...]]]) -> int:
    """Return how many elements every operand lets a thread move in one access, a power of two.

    Each operand is its pointer, its itemsize, and the strides between its rows in elements. Of
    elements larger than others, one access takes fewer, so alignment counts up to 16 bytes.
    """
    access = min(ACCESS_BYTES, width & -width)
    for pointer, itemsize, strides in operands:
        while access > 1:
            bytes_at_once = min(access * itemsize, ACCESS_BYTES)
            if pointer % bytes_at_once == 0 and not any(
                stride * itemsize % bytes_at_once for stride in strides
            ):
                break
            access //= 2
    return access
