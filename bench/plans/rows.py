# SPDX-License-Identifier: MIT
"""A line of the static table: a plan as NVRTC compiles it, and its faults."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bench.plans.cache import kept
from bench.plans.model import GPUS, MODELLED
from bench.plans.occupancy import ARCHITECTURES, occupancy
from bench.plans.plan import PARAM_GRAD, STREAMED, Plan
from bench.plans.ptx import WIDE, Access, accesses
from bench.plans.sass import disassemble, disassembler
from bench.plans.speed import speed
from cunorm._backends import cuda as _cuda
from cunorm._backends.sources import source_text
from cunorm._core.build import KernelBuild
from tests.support.nvrtc import compile_build, resource_usage

KEY = (
    *("arch", "features", "operator", "memory", "direction", "dtype", "shape", "count"),
    *("kernel", "step"),
)
# Columns of the plan, known without compiling.
PLANNED = (
    *("regime", "threads", "threads_per_row", "pack", "packs"),
    *("aligned_bytes", "planned_bytes"),
)


@dataclass(frozen=True)
class Row:
    """One launch of a call on one architecture; sizes are in bytes, accesses are those of the PTX.

    Attributes
    ----------
    count
        Rows or samples of x; empty if they have 2**26 elements in all.
    aligned_bytes, planned_bytes, narrowest_bytes
        Bytes of the narrowest access to an array as large as x: the most that alignment allows;
        what is planned, which also depends on width and registers; and what is compiled. 0
        without such arrays.
    narrowed
        Accesses to such arrays that are narrower than planned, as "operand:bytes".
    late_loads, instructions
        Counts of the SASS (static_reads.py, static_packs.py): in row norms, loads after a row's
        first store; warp instructions times 32 for each element of x.
    issue_share, overlap_share, traffic_share, waves_share, prediction
        The four ceilings and the predicted share of copy speed on the GPU, by a model (rounds.py).
        They are not measured, and empty if the model does not have the GPU.
    call_prediction, microseconds
        The prediction of a whole call, launches included: its share of the speed of a copy of as
        many bytes, and its time. If a call has two launches, these are on the line of the second.
    limit
        The name of the launch's limit; "copy" if nothing limits it.
    """

    nvrtc: str
    arch: str
    gpu: str
    features: str
    operator: str
    memory: str
    direction: str
    dtype: str
    shape: str
    count: str
    kernel: str
    step: str
    regime: str
    threads: int
    threads_per_row: int
    pack: int
    packs: int
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    blocks_per_sm: int
    warps_per_sm: int
    loads_16: int
    loads_narrow: int
    stores_16: int
    stores_narrow: int
    aligned_bytes: int
    planned_bytes: int
    narrowest_bytes: int
    narrowed: str
    late_loads: str
    instructions: str
    issue_share: str
    overlap_share: str
    traffic_share: str
    waves_share: str
    prediction: str
    call_prediction: str
    microseconds: str
    limit: str

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify the launch."""
        return tuple(getattr(self, name) for name in KEY)

    def faults(self) -> list[str]:
        """Return the faults for which the exit status is 1."""
        found = []
        if self.spill_stores or self.spill_loads:
            found.append(f"spills {self.spill_stores} bytes and loads {self.spill_loads}")
        if self.stack:
            found.append(f"has a stack frame of {self.stack} bytes")
        if self.narrowed:
            found.append(f"accesses are narrower than {self.planned_bytes} bytes: {self.narrowed}")
        if not self.blocks_per_sm:
            found.append("a multiprocessor has not room for one block")
        return found

    def late(self) -> list[str]:
        """Return the fault of loads after stores, for plans that keep rows in registers."""
        if self.regime == STREAMED or self.late_loads in ("", "0"):
            return []
        return [f"{self.late_loads} loads come after the row's first store"]


def measure(plan: Plan) -> list[Row]:
    """Compile a plan; return a line for each GPU of the model, or a line without predictions.

    Without a disassembler, columns of the SASS are empty.
    """
    static = _static_columns(plan)
    gpus = {name: one for name, one in GPUS.items() if one.architecture == plan.architecture}
    if plan.regime == PARAM_GRAD or plan.features:
        gpus = {}
    found = gpus or {"": None}
    return [
        Row(gpu=name, **static, **speed(plan, gpu, blocks_per_sm, sass_of))
        for name, gpu in found.items()
    ]


def _static_columns(plan: Plan) -> dict[str, Any]:
    """Return the columns that are the same on every GPU of the architecture."""
    log, ptx, _ = compile_with_sass(plan.build, plan.architecture)
    usage = resource_usage(log)
    counted = accesses(ptx, plan.pointers())
    blocks = blocks_per_sm(plan)
    widths = _widths(plan, counted)
    return {
        **planned_columns(plan),
        "nvrtc": nvrtc_version(),
        "registers": usage.registers,
        "spill_stores": usage.spill_stores,
        "spill_loads": usage.spill_loads,
        "stack": usage.stack,
        "shared": usage.shared + plan.shared,
        "blocks_per_sm": blocks,
        "warps_per_sm": blocks * -(-plan.threads // 32),
        "loads_16": _count(counted, "ld", is_wide=True),
        "loads_narrow": _count(counted, "ld", is_wide=False),
        "stores_16": _count(counted, "st", is_wide=True),
        "stores_narrow": _count(counted, "st", is_wide=False),
        "narrowest_bytes": min((size for _, size, _ in widths), default=0),
        "narrowed": " ".join(
            sorted({f"{name}:{size}" for name, size, wanted in widths if size < wanted})
        ),
    }


def blocks_per_sm(plan: Plan) -> int:
    """Return how many blocks of a launch fit a multiprocessor."""
    usage = resource_usage(compile_with_sass(plan.build, plan.architecture)[0])
    limits = ARCHITECTURES[plan.architecture]
    return occupancy(limits, plan.threads, usage.registers, usage.shared + plan.shared)


def planned_columns(plan: Plan) -> dict[str, str | int]:
    """Return the columns of a plan that need no compiling."""
    itemsizes = [dtype.itemsize for _, dtype in plan.row_operands().values()]
    pack = plan.number("PACK")
    return {
        "arch": f"sm_{plan.architecture}",
        "features": plan.features,
        "operator": plan.operator,
        "memory": plan.memory,
        "direction": plan.direction,
        "dtype": plan.dtype,
        "shape": plan.shape,
        "count": plan.count,
        "kernel": plan.build.kernel,
        "step": plan.step,
        "regime": plan.regime,
        "threads": plan.threads,
        "threads_per_row": plan.number("THREADS_PER_ROW", 0),
        "pack": pack,
        "packs": plan.number("PACKS"),
        "aligned_bytes": min(map(plan.aligned_bytes, itemsizes), default=0),
        "planned_bytes": min(map(plan.access_bytes, itemsizes), default=0),
    }


def _widths(plan: Plan, counted: Iterable[Access]) -> list[tuple[str, int, int]]:
    """Return name, bytes and planned bytes of each access to an array as large as x."""
    operands = plan.row_operands()
    found = [
        (access, operands[access.argument]) for access in counted if access.argument in operands
    ]
    return [
        (name, access.bytes, plan.access_bytes(dtype.itemsize)) for access, (name, dtype) in found
    ]


def _count(counted: dict[Access, int], kind: str, *, is_wide: bool) -> int:
    return sum(
        count
        for access, count in counted.items()
        if access.kind == kind and (access.bytes >= WIDE) == is_wide
    )


@lru_cache(maxsize=256)
def compile_with_sass(build: KernelBuild, architecture: str) -> tuple[str, str, str]:
    """Compile a build as the launcher does; return ptxas's log, the PTX, and the SASS or ""."""
    wanted = ("row_norm", "group_norm", *(("param_grad",) if architecture in MODELLED else ()))
    reads_sass = build.kernel.startswith(wanted) and disassembler() is not None

    def compiled() -> tuple[str, str, str]:
        found = compile_build(build, architecture)
        return found.log, found.ptx, disassemble(found.cubin) if reads_sass else ""

    options = _cuda.compile_options(build)
    code = re.sub(r"(\s*(//.*)?\n)+", "\n", source_text(build.kernel))  # without comments
    key = (nvrtc_version(), code, *options, architecture, reads_sass)
    return kept(key, compiled)


def sass_of(build: KernelBuild, architecture: str) -> str:
    """Return the disassembly of a build; "" without a disassembler."""
    return compile_with_sass(build, architecture)[2]


def nvrtc_version() -> str:
    """Return the version of NVRTC on this machine."""
    return ".".join(map(str, _cuda.nvrtc_version()))
