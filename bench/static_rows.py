# SPDX-License-Identifier: MIT
"""A line of the static table: what NVRTC makes of a plan, and what is wrong with that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from bench.model import GPUS
from bench.static_occupancy import ARCHITECTURES, occupancy
from bench.static_plan import STREAMED, Plan
from bench.static_ptx import WIDE, Access, accesses
from bench.static_sass import disassemble, disassembler
from bench.static_speed import speed
from cunorm._backends import cuda as _cuda
from cunorm._core.build import KernelBuild
from tests.support.nvrtc import compile_build, resource_usage

KEY = ("arch", "features", "operator", "memory", "direction", "dtype", "shape", "kernel", "step")
# What is the plan's own and known without compiling.
PLANNED = (
    *("regime", "threads", "threads_per_row", "pack", "packs"),
    *("aligned_bytes", "planned_bytes"),
)


@dataclass(frozen=True)
class Row:
    """One launch of a call on one architecture; sizes in bytes, accesses as they stand in the PTX.

    Attributes
    ----------
    aligned_bytes, planned_bytes, narrowest_bytes
        The narrowest access to an array as large as x: as alignment allows, as the plan's pack does
        too, which width and registers limit, and as it is. 0: the launch accesses none.
    narrowed
        Accesses to such arrays that are narrower than planned, as "operand:bytes".
    late_loads, instructions, bytes_in_flight
        What the SASS says (static_reads.py, static_packs.py): of row norms, loads behind the row's
        first store; warp instructions times 32 for an element of x; bytes of reads in flight on a
        multiprocessor.
    issue_share, latency_share, traffic_share, prediction
        What share of copy speed those allow, by a model (model.py), and the least of them, 1 at
        most: nothing that was measured. Empty where the model has no constants for the GPU.
    overlap_share
        Such a share too, if each block waits and computes in turn. The prediction leaves it out.
    call_prediction
        Of a backward, the same with param_grad counted in, for an x of 2**26 elements; of two
        launches, of both together, in the second's line.
    """

    nvrtc: str
    arch: str
    features: str
    operator: str
    memory: str
    direction: str
    dtype: str
    shape: str
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
    bytes_in_flight: str
    issue_share: str
    latency_share: str
    traffic_share: str
    overlap_share: str
    prediction: str
    call_prediction: str

    @property
    def key(self) -> tuple[str, ...]:
        """What names the launch."""
        return tuple(getattr(self, name) for name in KEY)

    def faults(self) -> list[str]:
        """Return what the gate holds against it."""
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
        """Return what is held against loads behind stores, in plans that keep rows."""
        if self.regime == STREAMED or self.late_loads in ("", "0"):
            return []
        return [f"{self.late_loads} loads stand behind the row's first store"]


def measured(plan: Plan) -> Row:
    """Compile a plan and return its line; what the SASS says is empty without a disassembler."""
    log, ptx, _ = compiled(plan.build, plan.architecture)
    usage = resource_usage(log)
    counted = accesses(ptx, plan.pointers())
    blocks = blocks_per_sm(plan)
    widths = _widths(plan, counted)
    return Row(
        **planned(plan),
        **speed(plan, blocks_per_sm, sass_of),
        nvrtc=nvrtc_version(),
        registers=usage.registers,
        spill_stores=usage.spill_stores,
        spill_loads=usage.spill_loads,
        stack=usage.stack,
        shared=usage.shared + plan.shared,
        blocks_per_sm=blocks,
        warps_per_sm=blocks * -(-plan.threads // 32),
        loads_16=_count(counted, "ld", wide=True),
        loads_narrow=_count(counted, "ld", wide=False),
        stores_16=_count(counted, "st", wide=True),
        stores_narrow=_count(counted, "st", wide=False),
        narrowest_bytes=min((size for _, size, _ in widths), default=0),
        narrowed=" ".join(
            sorted({f"{name}:{size}" for name, size, wanted in widths if size < wanted})
        ),
    )


def blocks_per_sm(plan: Plan) -> int:
    """Return how many blocks of a launch a multiprocessor has room for."""
    usage = resource_usage(compiled(plan.build, plan.architecture)[0])
    limits = ARCHITECTURES[plan.architecture]
    return occupancy(limits, plan.threads, usage.registers, usage.shared + plan.shared)


def planned(plan: Plan) -> dict[str, str | int]:
    """Return the columns that are known of a plan without compiling it."""
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
    """Return of each access to an array as large as x the array, the bytes, and those planned."""
    operands = plan.row_operands()
    found = [
        (access, operands[access.argument]) for access in counted if access.argument in operands
    ]
    return [
        (name, access.bytes, plan.access_bytes(dtype.itemsize)) for access, (name, dtype) in found
    ]


def _count(counted: dict[Access, int], kind: str, *, wide: bool) -> int:
    return sum(
        count
        for access, count in counted.items()
        if access.kind == kind and (access.bytes >= WIDE) == wide
    )


@lru_cache(maxsize=256)
def compiled(build: KernelBuild, architecture: str) -> tuple[str, str, str]:
    """Compile a build as the launcher does; return ptxas's log, the PTX and the SASS, if known."""
    found = compile_build(build, architecture)
    wanted = ("row_norm", "group_norm", *(("param_grad",) if architecture in GPUS else ()))
    reads_sass = build.kernel.startswith(wanted) and disassembler() is not None
    return found.log, found.ptx, disassemble(found.cubin) if reads_sass else ""


def sass_of(build: KernelBuild, architecture: str) -> str:
    """Return the disassembly of a build, if it is known."""
    return compiled(build, architecture)[2]


def nvrtc_version() -> str:
    """Return the version of the NVRTC that compiles here."""
    return ".".join(map(str, _cuda.nvrtc_version()))
