# SPDX-License-Identifier: MIT
"""Runs the row-norm kernels as a GPU would: its plan, its arguments, arrays in guarded memory.

run = emulate_forward(x, weight, center=True, plan=Plan(grid=2, order="reverse"))
run.result.y, run.moved["row_norm_forward"].bytes["x"]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from cunorm import _plan
from cunorm._backend import Backward, BackwardForm, Forward, ForwardForm
from cunorm._builds import BackwardTypes, ForwardTypes, ParamGradTypes
from cunorm._dtypes import DTYPES, FLOAT32, FLOAT64, DType, numpy_dtype
from cunorm._plan import Build, Launch, Team, sums_pitch
from cunorm._sources import source_text
from cunorm.results import NormForward, NormGrads

from .build import INCLUDE
from .emulator import EmulationResult, Order, compile_emulated
from .memory import Memory, geometry

H200_SM_COUNT = 132
SM_75_SM_COUNT = 40  # a T4's

Array = np.ndarray


@dataclass(frozen=True)
class Plan:
    """How a call's arrays lie in memory, and how its kernels are launched.

    Attributes
    ----------
    at, offset
        Where arrays lie, see `Memory`.
    order, seed
        In which order blocks, warps and lanes run.
    sm_count : int
        Multiprocessors of the GPU.
    grid : int or None
        Blocks of the row norm, in place of the GPU's own number of them.
    team : Team or None
        How threads share the rows, in place of the GPU's own way.
    sources : mapping of str to str
        The texts of kernels, in place of the real ones.
    """

    at: Literal["end", "start"] = "end"
    offset: int | None = None
    order: Order = "forward"
    seed: int = 0
    sm_count: int = H200_SM_COUNT
    grid: int | None = None
    team: Team | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def adapted(self, launch: Launch, call: Forward | Backward) -> Launch:
        """Return the launch with what is to be different."""
        where, team = call.form.where, self.team
        if team is not None:
            macros = call.form.types.macros()
            macros += team.macros(where.width, min(call.access(), team.pack))
            launch = Launch(
                Build(launch.build.kernel, macros),
                -(-where.rows // team.rows_per_block),
                team.threads,
                sums_pitch(team, where.width),
            )
        return replace(launch, grid=self.grid or launch.grid)


class Emulated(NamedTuple):
    """What a call returned, and by kernel what was launched and what it moved."""

    result: NormForward | NormGrads
    launches: dict[str, Launch]
    moved: dict[str, EmulationResult]

    @property
    def launch(self) -> Launch:
        """Return the launch of the row norm itself."""
        return next(iter(self.launches.values()))


def emulated_source(kernel: str) -> str:
    """Return the text of a kernel with every access to global memory checked and counted."""
    return source_text(kernel, (INCLUDE,))


def team_of(launch: Launch) -> Team:
    """Return how threads share the rows in a launch of a row norm."""
    macros = dict(launch.build.macros)
    return Team(*(int(macros[name.upper()]) for name in Team._fields))


def family(launch: Launch) -> str:
    """Return what kind of team that is."""
    team = team_of(launch)
    if team.packs == 0:
        return "streamed"
    return "warp teams" if team.threads_per_row <= 32 else "block team"


def compute_type(*dtypes: str | None) -> DType:
    """Return the type of statistics and sums where x and the residual stream have these types."""
    return FLOAT64 if "float64" in dtypes else FLOAT32


def emulate_forward(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    residual_dtype: str | None = None,
    dtype: str | None = None,
    c: float | None = None,
    center: bool = False,
    eps: float = 1e-6,
    saves: bool = True,
    out: Mapping[str, Array] | None = None,
    plan: Plan = Plan(),
) -> Emulated:
    """Run row_norm_forward; it saves mean and rstd, or not.

    `out` gives y and new_residual the strides of the arrays in it; an input itself is in place.
    """
    stream = residual_dtype if residual is None else str(residual.dtype)
    compute = compute_type(str(x.dtype), stream)
    statistic = np.empty(x.shape[:-1], numpy_dtype(compute))
    outputs = {"y": _like(x, dtype)}
    if stream is not None:
        outputs["new_residual"] = _like(x, stream)
    if saves:
        outputs |= {"rstd": statistic} | ({"mean": statistic} if center else {})
    outputs |= out or {}
    memory = Memory(plan.at, plan.offset)
    inputs = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    memory.place_inputs(inputs, outputs)
    memory.place_outputs(outputs, inputs)

    rows, parameters = ("x", "residual", "y", "new_residual"), ("weight", "bias")
    dtypes = {name: memory.dtype(name) for name in (*rows, *parameters)}
    types = ForwardTypes(compute=compute, center=center, **dtypes)
    where = geometry(x)
    form = ForwardForm(where, types, tuple(map(memory.layout, rows)))
    operands = {name: memory.operand(name) for name in (*rows, *parameters, "mean", "rstd")}
    call = Forward(form, _scale(c, x), eps, **operands)
    planned = _plan.cuda_forward(types, where.rows, where.width, call.access())
    launch = plan.adapted(planned, call)
    moved = _launch(plan, memory, launch, call.arguments(), {*inputs, *outputs})
    names = ("y", "new_residual", "mean", "rstd")
    name = launch.build.kernel
    return Emulated(NormForward(*map(memory.array, names)), {name: launch}, {name: moved})


def emulate_backward(
    dy: Array,
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    rstd: Array,
    mean: Array | None = None,
    d_residual: Array | None = None,
    c: float | None = None,
    center: bool = False,
    x_dtype: str | None = None,
    needs: tuple[str, ...] = ("x", "weight", "bias"),
    out: Mapping[str, Array] | None = None,
    plan: Plan = Plan(),
) -> Emulated:
    """Run row_norm_backward, and param_grad where a parameter's gradient is asked for.

    `out` gives dx and dresidual the strides of the arrays in it; an input itself is in place.
    Where dresidual alone is in it, it is the one that is written.
    """
    outputs = _gradients(x, x_dtype, weight, bias, needs, out or {})
    memory = Memory(plan.at, plan.offset)
    inputs = {"dy": dy, "x": x, "d_residual": d_residual if "x" in needs else None}
    inputs |= {"weight": weight, "mean": mean if center else None, "rstd": rstd}
    memory.place_inputs(inputs, outputs)
    memory.place_outputs(outputs, inputs)

    rows = ("dy", "x", "d_residual", "dx", "dresidual")
    types = BackwardTypes(
        compute=compute_type(str(x.dtype), x_dtype),
        **{name: memory.dtype(name) for name in (*rows, "weight")},
        center=center,
        dweight="dweight" in outputs,
        dbias="dbias" in outputs,
    )
    param_types = ParamGradTypes(types.compute, memory.dtype("dweight"), memory.dtype("dbias"))
    form = BackwardForm(geometry(x), types, param_types, tuple(map(memory.layout, rows)))
    others = ("weight", "mean", "rstd", "dweight", "dbias")
    operands = {name: memory.operand(name) for name in (*rows, *others)}
    call = Backward(form, _scale(c, x), **operands)
    launches, moved = _run_backward(plan, memory, call)
    names = ("dx", "dweight", "dbias", "dgate", "dresidual")
    return Emulated(NormGrads(*map(memory.array, names)), launches, moved)


def _gradients(
    x: Array,
    x_dtype: str | None,
    weight: Array | None,
    bias: Array | None,
    needs: tuple[str, ...],
    out: Mapping[str, Array],
) -> dict[str, Array]:
    """Return the layouts of the results that are wanted."""
    results = dict(out)
    if "x" in needs and "dresidual" not in out:
        results.setdefault("dx", _like(x, x_dtype))
    if "x" in needs and x_dtype not in (None, str(x.dtype)):
        results.setdefault("dx", _like(x, x_dtype))
        results.setdefault("dresidual", _like(x, None))
    for name, parameter in (("weight", weight), ("bias", bias)):
        if name in needs and parameter is not None:
            results[f"d{name}"] = parameter
    return results


def _run_backward(
    plan: Plan, memory: Memory, call: Backward
) -> tuple[dict[str, Launch], dict[str, EmulationResult]]:
    """Launch both kernels, with partial sums of their own between them."""
    where, types, param_types, *_ = call.form
    planned = _plan.cuda_backward(types, where.rows, where.width, call.access(), plan.sm_count)
    launch = plan.adapted(planned, call)
    parameters = (call.dweight is not None) + (call.dbias is not None)
    if parameters:
        memory.place_sums(parameters * launch.sums_size, numpy_dtype(types.compute))
        call.sums = memory.operand("sums")
    gradients = {"dweight", "dbias"}
    used = set(memory.arrays) - gradients
    launches = {"row_norm_backward": launch}
    moved = {"row_norm_backward": _launch(plan, memory, launch, call.arguments(launch), used)}
    if parameters:
        arguments = call.param_arguments(launch)
        launch = _plan.cuda_param_grad(param_types, where.width)
        launches["param_grad"] = launch
        moved["param_grad"] = _launch(plan, memory, launch, arguments, {"sums", *gradients})
    return launches, moved


def _launch(
    plan: Plan, memory: Memory, launch: Launch, arguments: bytes, names: set[str]
) -> EmulationResult:
    name, macros = launch.build.kernel, launch.build.macros
    kernel = compile_emulated(plan.sources.get(name) or emulated_source(name), name, macros)
    return kernel.run(
        launch.grid,
        launch.block,
        arguments,
        order=plan.order,
        seed=plan.seed,
        ranges=memory.ranges(names),
    )


def _scale(c: float | None, x: Array) -> float:
    return 1.0 if c is None else c / math.sqrt(x.shape[-1])


def _like(x: Array, dtype: str | None) -> Array:
    return np.empty(x.shape, x.dtype if dtype is None else numpy_dtype(DTYPES[dtype]))
