# SPDX-License-Identifier: MIT
"""A line of the static table: a plan as NVRTC compiles it, and its faults."""

from __future__ import annotations

from dataclasses import dataclass

from bench.plans.compiled import compiled, nvrtc_version
from bench.plans.model import GPUS
from bench.plans.plan import PARAM_GRAD, STREAMED, Plan
from bench.plans.speed import blocks_per_sm, narrowest_access, speed

KEY = (
    *("arch", "features", "operator", "memory", "direction", "dtype", "shape", "count"),
    *("kernel", "step"),
)
# Columns of the plan, known without compiling.
PLANNED = ("regime", "threads", "threads_per_row", "pack", "packs", "planned_bytes")


@dataclass(frozen=True)
class Row:
    """One launch of a call on one architecture; sizes are in bytes.

    The predictions are by a model (rounds.py), not measured, and empty if it does not have the GPU.
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
    count: str  # rows or samples of x; empty if they have 2**26 elements in all
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
    planned_bytes: int  # of the narrowest access to an array as large as x; 0 without such arrays
    narrowest_bytes: int  # as it is compiled
    late_loads: str = ""  # of a row norm: loads after a row's first store (reads.py)
    instructions: str = ""  # warp instructions times 32 for each element of x (reads.py)
    prediction: str = ""  # the launch's share of copy speed
    call_prediction: str = ""  # the share of the whole call, launches included, on its last line
    microseconds: str = ""  # of the whole call
    limit: str = ""  # what limits the launch; "copy" if nothing does

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify the launch."""
        return tuple(getattr(self, name) for name in KEY)

    def faults(self) -> list[str]:
        """Return the faults for which the exit status is 1."""
        narrow, planned = self.narrowest_bytes, self.planned_bytes
        # Parameters of rows that lie side by side are loaded between stores.
        may_be_late = self.regime == STREAMED or self.memory != ""
        late = 0 if may_be_late else int(self.late_loads or 0)
        faults = [
            (self.spill_stores > 0, f"spills {self.spill_stores} bytes"),
            (self.spill_loads > 0, f"loads {self.spill_loads} spilled bytes"),
            (self.stack > 0, f"has a stack frame of {self.stack} bytes"),
            (narrow < planned, f"accesses {narrow} bytes at once, planned are {planned}"),
            (late > 0, f"{late} loads come after a row's first store"),
            (self.blocks_per_sm == 0, "a multiprocessor has not room for one block"),
        ]
        return [text for is_there, text in faults if is_there]


def measure(plan: Plan) -> list[Row]:
    """Compile a plan; return a line for each GPU of the model, or a line without predictions."""
    found = compiled(plan.build, plan.architecture)
    static = planned_columns(plan) | {
        "nvrtc": nvrtc_version(),
        "registers": found.registers,
        "spill_stores": found.spill_stores,
        "spill_loads": found.spill_loads,
        "stack": found.stack,
        "shared": found.shared + plan.launch.shared,
        "blocks_per_sm": blocks_per_sm(plan),
        "narrowest_bytes": narrowest_access(plan),
    }
    gpus = {name: one for name, one in GPUS.items() if one.architecture == plan.architecture}
    if plan.regime == PARAM_GRAD or plan.features or not gpus:
        return [Row(gpu="", **static, **speed(plan, None))]
    return [Row(gpu=name, **static, **speed(plan, gpu)) for name, gpu in gpus.items()]


def planned_columns(plan: Plan) -> dict[str, str | int]:
    """Return the columns of a plan that need no compiling."""
    same = ("features", "operator", "memory", "direction", "dtype", "shape", "count", "step")
    names = (*same, "regime", "threads", "planned_bytes")
    return {name: getattr(plan, name) for name in names} | {
        "arch": f"sm_{plan.architecture}",
        "kernel": plan.build.kernel,
        "threads_per_row": plan.number("THREADS_PER_ROW", 0),
        "pack": plan.number("PACK"),
        "packs": plan.number("PACKS"),
    }
