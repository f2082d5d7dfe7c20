# SPDX-License-Identifier: MIT
"""The kernel param_grad, which adds up the partial sums of rows or samples to dweight and dbias."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cunorm._core.build import ArgsWriter, KernelBuild, Launch, Macros, cuda_bool, cuda_type
from cunorm._core.caps import Caps, CpuCaps
from cunorm._core.dtypes import FLOAT64, DType
from cunorm._core.operands import type_macros
from cunorm._core.plan import KernelCall
from cunorm._core.tensor import UNBOUNDED, collapsed

CPU_PACK = 64  # the columns that a CPU's thread adds up at a time
_WIDE = 1 << 14  # from so many columns on, a single row of sums gets its own build

Offsets = Sequence[int | None]  # bytes before the sums for dweight, dbias and a row norm's dgate


class AxesMap(NamedTuple):
    """The offset of an index along one or two axes, as `AxesMap` of types.cuh has it."""

    inner: int  # the size of the last axis
    outer_stride: int
    inner_stride: int

    @property
    def axes(self) -> int:
        return 1 if self.inner == UNBOUNDED else 2


def axes_map(axes: Iterable[tuple[int, int]]) -> AxesMap:
    """Return the map of axes, given by size and stride; three that no stride joins are an error."""
    sizes, strides = zip((1, 0), *axes, strict=True)
    found = [(0, 0), (0, 0), *collapsed(sizes, strides)][-2:]
    if len(collapsed(sizes, strides)) > 2:
        raise ValueError("rows that share parameters lie along more than two axes")
    (_, outer), (size, inner) = found
    return AxesMap(size if outer else UNBOUNDED, outer, inner)


class Parts(NamedTuple):
    """The rows of sums of a gradient's segments: `Parts` of param_grad.cu."""

    segments: int
    parts: int  # of a segment
    first: AxesMap  # of a segment: its first part
    rest: AxesMap  # of a part of a segment, counted from the first


class ParamGradTypes(NamedTuple):
    """The dtypes of the results of param_grad; None is a result that is not wanted."""

    compute: DType
    dweight: DType | None
    dbias: DType | None
    accumulate: bool = False
    dgate: DType | None = None
    scalar_gate: bool = False  # dgate has one element for a segment

    @property
    def outputs(self) -> int:
        return sum(dtype is not None for dtype in (self.dweight, self.dbias, self.dgate))


def param_grad_launch(
    types: ParamGradTypes, parts: int, width: int, caps: Caps, segments: Sequence[Parts | None] = ()
) -> Launch:
    """Plan param_grad for `parts` rows of partial sums, which the previous launch computes.

    Without rows, no launch precedes it. Without `accumulate`, a CPU only rounds a single wide row.
    `segments` has, for dweight, dbias and dgate, the parts of its segments; empty: there is one.
    """
    total, dependent = FLOAT64, False
    if isinstance(caps, CpuCaps):
        columns, part_threads, pack = 1, 1, CPU_PACK
        if parts == 1 and width >= _WIDE and not (types.accumulate or segments):
            total = types.compute
    else:  # a block has threads along the columns and along the parts
        dependent = parts > 0 and caps.features.programmatic_launches
        columns, part_threads, pack = (8, 64, 1) if width <= 2048 else (32, 16, 1)
    macros = (
        *type_macros(types, "compute", "dweight", "dbias"),
        ("TOTAL_T", cuda_type(total)),
        ("ACCUMULATE", cuda_bool(types.accumulate)),
        ("COLUMN_THREADS", str(columns)),
        ("PART_THREADS", str(part_threads)),
        ("PACK", str(pack)),
        *(_of_segments(types) if segments else ()),
    )
    row_blocks = -(-width // (columns * pack))
    grid = row_blocks * types.outputs
    if segments:
        *rows, gates = (0 if one is None else one.segments for one in segments)
        grid = row_blocks * sum(rows) + (1 if types.scalar_gate else row_blocks) * gates
    threads = columns * part_threads
    return Launch(KernelBuild("param_grad", macros), grid, threads, dependent=dependent)


def _of_segments(types: ParamGradTypes) -> Macros:
    return (
        ("SEGMENTED", "true"),
        *type_macros(types, "dgate"),
        ("SCALAR_GATE", cuda_bool(types.scalar_gate)),
    )


def param_grad_call(
    types: ParamGradTypes,
    slots: dict[str, int],
    sums: Offsets,
    parts: int,
    pitch: int,
    width: int,
    caps: Caps,
    segments: Sequence[Parts | None] = (),
) -> KernelCall:
    """Return the call of param_grad; `sums` are byte offsets, as for `Kernel.args_writer`."""
    writer = ArgsWriter(slots)
    if segments:
        for one in segments:
            numbers = (0, 0, *[0] * 6) if one is None else (*one[:2], *one.first, *one.rest)
            writer.integers(*numbers)
        writer.pointers_into_workspace(sums[2:])
        writer.pointer("dgate" if types.dgate else "")
    writer.pointers_into_workspace(sums[:2])
    writer.pointer("dweight")
    writer.pointer("dbias")
    writer.sized(parts)
    writer.integers(pitch, width)
    launch = param_grad_launch(types, parts, width, caps, segments)
    return KernelCall(launch, writer.finish(), work=parts * width)
