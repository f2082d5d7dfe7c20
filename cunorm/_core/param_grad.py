# SPDX-License-Identifier: MIT
"""The kernel param_grad, which adds up the partial sums of rows or samples to dweight and dbias."""

from typing import NamedTuple

from cunorm._core.build import ArgsWriter, KernelBuild, Launch, cuda_bool, cuda_type
from cunorm._core.caps import Caps, CpuCaps
from cunorm._core.dtypes import FLOAT64, DType
from cunorm._core.operands import type_macros
from cunorm._core.plan import KernelCall

CPU_PACK = 64  # the columns that a CPU's thread adds up at a time
_WIDE = 1 << 14  # from so many columns on, a single row of sums gets its own build


class ParamGradTypes(NamedTuple):
    """The dtypes of the results of param_grad; None is a result that is not wanted."""

    compute: DType
    dweight: DType | None
    dbias: DType | None
    accumulate: bool = False

    @property
    def outputs(self) -> int:
        return (self.dweight is not None) + (self.dbias is not None)


def param_grad_launch(types: ParamGradTypes, parts: int, width: int, caps: Caps) -> Launch:
    """Plan param_grad for `parts` rows of partial sums, which the previous launch computes.

    Without rows, no launch precedes it. Without `accumulate`, a CPU only rounds a single wide row.
    """
    total, dependent = FLOAT64, False
    if isinstance(caps, CpuCaps):
        columns, part_threads, pack = 1, 1, CPU_PACK
        if parts == 1 and width >= _WIDE and not types.accumulate:
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
    )
    grid = -(-width // (columns * pack)) * types.outputs
    threads = columns * part_threads
    return Launch(KernelBuild("param_grad", macros), grid, threads, dependent=dependent)


def param_grad_call(
    types: ParamGradTypes,
    slots: dict[str, int],
    sums: tuple[int | None, int | None],
    parts: int,
    pitch: int,
    width: int,
    caps: Caps,
) -> KernelCall:
    """Return the call of param_grad; `sums` are byte offsets, as for `Kernel.args_writer`."""
    writer = ArgsWriter(slots)
    writer.pointers_into_workspace(sums)
    writer.pointer("dweight")
    writer.pointer("dbias")
    writer.sized(parts)
    writer.integers(pitch, width)
    launch = param_grad_launch(types, parts, width, caps)
    return KernelCall(launch, writer.finish(), work=parts * width)
