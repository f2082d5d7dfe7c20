# SPDX-License-Identifier: MIT
"""Runs the group-norm kernels as a GPU would: its plan, its arguments, arrays in guarded memory.

run = emulate_group_forward(x, 32, weight, activation="silu", plan=GroupPlan(order="reverse"))
run.result.y, run.moved["group_norm_forward"].bytes["x"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from cunorm import _plan
from cunorm._builds import Launch
from cunorm._dtypes import DTYPES, FLOAT32, FLOAT64, numpy_dtype
from cunorm.group_norm import _backward_plan, _forward
from cunorm.group_norm._builds import GroupTypes
from cunorm.group_norm._calls import (
    GroupBackward,
    GroupCall,
    GroupForward,
    param_grad_arguments,
    workspace_elements,
)
from cunorm.group_norm._plan import Schedule, _schedule, cuda_schedule
from cunorm.group_norm._run import launches
from cunorm.group_norm._tiling import Samples, Tiling, cuda_one_pass_tiling, cuda_tiling
from cunorm.results import GroupNormForward, GroupNormGrads

from .emulator import EmulationResult, Order, compile_emulated
from .memory import Memory
from .plans import emulated_source

Array = np.ndarray

PASSES = ("find", "combine", "write")
_GRADIENTS = ("dweight", "dbias")


@dataclass(frozen=True)
class GroupPlan:
    """How a call's arrays lie in memory, and how its kernels are launched.

    Attributes
    ----------
    at, offset
        Where arrays lie, see `Memory`. The workspace is aligned in any case.
    order, seed
        In which order blocks, warps and lanes run.
    passes : {1, 3} or None
        How many launches there are, in place of the GPU's own number. 1 needs room for it.
    tiling : callable or None
        How threads share a tile of three launches, in place of the GPU's own way.
    chunk : int or None
        How many samples are gone over at a time, in place of all.
    sources : mapping of str to str
        The texts of kernels, in place of the real ones.
    """

    at: Literal["end", "start"] = "end"
    offset: int | None = None
    order: Order = "forward"
    seed: int = 0
    passes: Literal[1, 3] | None = None
    tiling: Callable[[GroupTypes, Samples], Tiling] | None = None
    chunk: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def schedule(self, types: GroupTypes, where: Samples, access: int) -> Schedule:
        """Return the launches."""
        planned = cuda_schedule(types, where, access)
        if (self.passes, self.tiling, self.chunk) == (None, None, None):
            return planned
        whole = None if self.tiling or self.passes == 3 else cuda_one_pass_tiling(types, where)
        assert whole or self.passes != 1, "a block has no room for whole groups"
        tiling, block_groups = whole or ((self.tiling or cuda_tiling)(types, where), 0)
        macros = dict(planned.passes[0].build.macros) | dict(tiling.macros(access))
        kept = tuple(macro for macro in macros.items() if macro[0].lower() not in PASSES)
        return _schedule(types, where, tiling, kept, block_groups, self.chunk or where.samples)

    def run(
        self, launch: Launch, arguments: bytes, memory: Memory, names: Iterable[str]
    ) -> EmulationResult:
        """Run a kernel, which may access the arrays of these names."""
        name, macros = launch.build.kernel, launch.build.macros
        kernel = compile_emulated(self.sources.get(name) or emulated_source(name), name, macros)
        told: dict[str, Any] = {"order": self.order, "seed": self.seed}
        ranges = memory.ranges(set(names))
        return kernel.run(launch.grid, launch.block, arguments, **told, ranges=ranges)


USUAL = GroupPlan()


class Emulated(NamedTuple):
    """What a call returned, what was launched, and by kernel what was moved."""

    result: GroupNormForward | GroupNormGrads
    schedule: Schedule
    launches: list[Launch]
    moved: dict[str, EmulationResult]

    @property
    def tiling(self) -> Tiling:
        """Return how threads shared a tile."""
        macros = dict(self.launches[0].build.macros)
        return Tiling(*(int(macros[name.upper()]) for name in Tiling._fields))


def emulate_group_forward(
    x: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    activation: str | None = None,
    channel_axis: int = -1,
    dtype: str | None = None,
    saves: bool = True,
    out: Mapping[str, Array] | None = None,
    plan: GroupPlan = USUAL,
) -> Emulated:
    """Run group_norm_forward; it saves mean and rstd, or not.

    `out` gives y the strides of the array in it; x itself is in place.
    """
    y = np.empty_like(x, numpy_dtype(DTYPES[dtype]) if dtype else x.dtype)
    outputs = {"y": y}
    if saves:
        statistic = np.empty((len(x), num_groups), _compute(x))
        outputs |= {"mean": statistic, "rstd": statistic}
    inputs = {"x": x, "weight": weight, "bias": bias}
    memory = _placed(plan, inputs, outputs | dict(out or {}))

    told = _forward.asked("emulation", num_groups, activation, channel_axis, None, False)
    names = ("x", "weight", "bias", "y", "mean", "rstd")
    settled = _forward.planned(told, tuple(map(memory.form, names)))
    assert not settled.to_copy, "the kernels cannot follow some strides"
    call = GroupForward(settled.form, eps, **{name: memory.operand(name) for name in names})
    result = GroupNormForward(*map(memory.array, GroupNormForward._fields))
    return Emulated(result, *_run(plan, memory, call))


def emulate_group_backward(
    dy: Array,
    x: Array,
    num_groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    mean: Array,
    rstd: Array,
    activation: str | None = None,
    channel_axis: int = -1,
    needs: tuple[str, ...] = ("x", "weight", "bias"),
    accumulate: bool = False,
    out: Mapping[str, Array] | None = None,
    plan: GroupPlan = USUAL,
) -> Emulated:
    """Run group_norm_backward, and param_grad where a parameter's gradient is asked for.

    `out` gives dx the strides of the array in it, and a gradient the dtype; dy or x itself is in
    place. To dweight and dbias in it is added, if `accumulate`.
    """
    inputs = {"dy": dy, "x": x, "mean": mean, "rstd": rstd, "weight": weight, "bias": bias}
    operands = {name: inputs[name] for name in needs if inputs[name] is not None}
    outputs = {f"d{name}": np.empty_like(array) for name, array in operands.items()}
    outputs |= out or {}
    accumulated = {name: outputs.get(name) for name in _GRADIENTS if accumulate}
    memory = _placed(plan, inputs | accumulated, outputs)

    told = _backward_plan.asked(
        "emulation", num_groups, activation, channel_axis, needs, accumulate
    )
    names = (*inputs, *GroupNormGrads._fields)
    settled = _backward_plan.planned(told, tuple(map(memory.form, names)))
    assert not settled.to_copy, "the kernels cannot follow some strides"
    call = GroupBackward(settled.form, **{name: memory.operand(name) for name in names})
    result = GroupNormGrads(*map(memory.array, GroupNormGrads._fields))
    return Emulated(result, *_run(plan, memory, call))


def _compute(x: Array) -> np.dtype:
    """Return the type of statistics and sums."""
    return numpy_dtype(FLOAT64 if x.dtype == np.float64 else FLOAT32)


def _placed(plan: GroupPlan, inputs: dict[str, Array | None], outputs: dict[str, Array]) -> Memory:
    """Place arrays; outputs are poison at first, but not again before each launch."""
    memory = Memory(plan.at, plan.offset)
    memory.place_inputs(inputs, outputs)
    memory.place_outputs(outputs, inputs)
    for array in memory.arrays.values():
        if array.role == "output":
            array.role = "inout"
    return memory


def _run(
    plan: GroupPlan, memory: Memory, call: GroupCall
) -> tuple[Schedule, list[Launch], dict[str, EmulationResult]]:
    """Make every launch, with a workspace of their own between them."""
    form = call.form
    schedule = plan.schedule(form.types, form.where, call.access())
    if size := workspace_elements(form, schedule):
        memory.place_workspace(size, numpy_dtype(form.types.compute))
        call = call._replace(workspace=memory.operand("workspace"))
    started, moved = [], []
    for launch, arguments in launches(form, call.pointers(), call.numbers(), schedule):
        started.append(launch)
        moved.append(plan.run(launch, arguments, memory, _accessed(launch, memory)))
    result = {launch.build.kernel: _added(moved) for launch in started}
    if isinstance(call, GroupBackward) and form.parameters:
        launch = _plan.cuda_param_grad(form.param_types, form.where.channels)
        arguments = param_grad_arguments(form, call.pointers(), schedule)
        started.append(launch)
        names = ("workspace", *_GRADIENTS)
        result["param_grad"] = plan.run(launch, arguments, memory, names)
    return schedule, started, result


def _accessed(launch: Launch, memory: Memory) -> set[str]:
    """Return the arrays that the passes of a launch may access."""
    macros = dict(launch.build.macros)
    find, combine, write = (macros[name.upper()] == "true" for name in PASSES)
    large = {"x", "dy"} if find or write else set()
    results = {"y", "dx"} if write else set()
    statistics = {"mean", "rstd"} if combine or "dy" in memory.arrays else set()
    return {"weight", "bias", "workspace"} | large | results | statistics


def _added(moved: list[EmulationResult]) -> EmulationResult:
    """Add up what launches moved; distinct are the bytes of the launch that touched most."""
    names = {name for one in moved for name in one.loaded}
    loaded, stored, distinct = (
        {name: count(getattr(one, field).get(name, 0) for one in moved) for name in names}
        for field, count in (("loaded", sum), ("stored", sum), ("distinct", max))
    )
    return EmulationResult(loaded, stored, distinct)
