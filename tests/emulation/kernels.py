# SPDX-License-Identifier: MIT
"""Runs the row-norm kernels as a GPU would: its plan, its arguments, arrays in guarded memory.

run = emulate_forward(x, weight, center=True, plan=Plan(grid=2, order="reverse"))
run.result.y, run.moved["row_norm_forward"].bytes["x"]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cunorm import _checks, _plan
from cunorm._arrays import describe
from cunorm._builds import ForwardTypes, Launch
from cunorm._calls import Backward, Forward, ForwardForm
from cunorm._checks import Geometry
from cunorm._dtypes import DTYPES, FLOAT32, FLOAT64, DType, numpy_dtype
from cunorm.results import NormForward, NormGrads
from cunorm.row_norm._gradients import Reads, backward_form, read_inputs
from cunorm.row_norm._variant import Variant

from .emulator import EmulationResult
from .memory import Memory
from .plans import USUAL, Plan

Array = np.ndarray

FORWARD_ROWS = ("x", "residual", "gate", "y", "new_residual")
FORWARD_OPERANDS = (*FORWARD_ROWS, "weight", "bias")
BACKWARD_ROWS = ("dy", "x", "d_residual", "gate", "dx", "dresidual", "dgate")


class Norm(NamedTuple):
    """Which norm is computed: keyword arguments of cunorm.normalize."""

    c: float | None = None
    center: bool = False
    groups: int = 1
    weight_offset: float = 0.0
    round_before_weight: bool = False
    gate_activation: str = "silu"
    gate_position: str = "post"

    @property
    def variant(self) -> Variant:
        """Return what the plan depends on."""
        return Variant(
            center=self.center,
            groups=self.groups,
            round_before_weight=self.round_before_weight,
            gate_activation=self.gate_activation,
            gate_position=self.gate_position,
        )


class _Asked(NamedTuple):
    """What the form of a backward takes from its caller."""

    variant: Variant
    has_offset: bool
    accumulate: bool


class Emulated(NamedTuple):
    """What a call returned, and by kernel what was launched and what it moved."""

    result: NormForward | NormGrads
    launches: dict[str, Launch]
    moved: dict[str, EmulationResult]

    @property
    def launch(self) -> Launch:
        """Return the launch of the row norm itself."""
        return next(iter(self.launches.values()))


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
    gate: Array | None = None,
    dtype: str | None = None,
    eps: float = 1e-6,
    saves: bool = True,
    out: Mapping[str, Array] | None = None,
    plan: Plan = USUAL,
    **norm,
) -> Emulated:
    """Run row_norm_forward; it saves mean and rstd, or not.

    `out` gives y and new_residual the strides of the arrays in it; an input itself is in place.
    """
    norm = Norm(**norm)
    where = _geometry(x, norm)
    stream = residual_dtype if residual is None else str(residual.dtype)
    compute = compute_type(str(x.dtype), stream)
    statistic = np.empty(where.leading_shape, numpy_dtype(compute))
    outputs = {"y": _like(x, dtype)}
    if stream is not None:
        outputs["new_residual"] = _like(x, stream)
    if saves:
        outputs |= {"rstd": statistic} | ({"mean": statistic} if norm.center else {})
    outputs |= out or {}
    inputs = {"x": x, "residual": residual, "gate": gate, "weight": weight, "bias": bias}
    memory = Memory(plan.at, plan.offset)
    memory.place_inputs(inputs, outputs)
    memory.place_outputs(outputs, inputs)

    form = _forward_form(memory, norm, where, compute)
    call = Forward(
        form,
        k=_checks.scale(norm.c, where.walk.width),
        eps=eps,
        weight_offset=norm.weight_offset,
        **{name: memory.operand(name) for name in (*FORWARD_OPERANDS, "mean", "rstd")},
    )
    planned = _plan.cuda_forward(form.types, where.walk, call.access(), plan.features)
    launch = plan.adapted(planned, call)
    moved = plan.run(launch, call.arguments(), memory, {*inputs, *outputs})
    names = ("y", "new_residual", "mean", "rstd")
    name = launch.build.kernel
    return Emulated(NormForward(*map(memory.array, names)), {name: launch}, {name: moved})


def _forward_form(memory: Memory, norm: Norm, where: Geometry, compute: DType) -> ForwardForm:
    formula = norm.variant.formula(
        gate=memory.form("gate"),
        offset=norm.weight_offset != 0.0,
        x_dtype=memory.form("x").dtype,
        compute=compute,
    )
    dtypes = {name: _dtype(memory, name) for name in FORWARD_OPERANDS}
    return ForwardForm(
        where,
        ForwardTypes(compute=compute, formula=formula, **dtypes),
        tuple(memory.layout(name, where.rows) for name in FORWARD_ROWS),
    )


def emulate_backward(
    dy: Array,
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    rstd: Array,
    mean: Array | None = None,
    d_residual: Array | None = None,
    gate: Array | None = None,
    x_dtype: str | None = None,
    needs: tuple[str, ...] = ("x", "weight", "bias", "gate"),
    accumulate: bool = False,
    out: Mapping[str, Array] | None = None,
    plan: Plan = USUAL,
    **norm,
) -> Emulated:
    """Run row_norm_backward, and param_grad where a parameter's gradient is asked for.

    `out` gives dx, dresidual and dgate the strides of the arrays in it, and any gradient the dtype;
    an input itself is in place. Where dresidual alone is in it, it is the one that is written. To
    dweight and dbias in it is added, if `accumulate`. Every input is placed in memory, but only
    those that the wanted gradients need are arguments.
    """
    norm = Norm(**norm)
    where = _geometry(x, norm)
    inputs = {"dy": dy, "x": x, "rstd": rstd, "mean": mean, "d_residual": d_residual}
    inputs |= {"gate": gate, "weight": weight, "bias": bias}
    outputs = _gradients(inputs, x_dtype, needs, out or {})
    accumulated = {name: outputs.get(name) for name in ("dweight", "dbias") if accumulate}
    memory = Memory(plan.at, plan.offset)
    memory.place_inputs(inputs | accumulated, outputs)
    memory.place_outputs(outputs, inputs | accumulated)

    x_dtype = memory.form("x").dtype if x_dtype is None else DTYPES[x_dtype]
    asked = _Asked(norm.variant, norm.weight_offset != 0.0, accumulate)
    results = {name: memory.form(name) for name in NormGrads._fields}
    forms = Reads(**{name: memory.form(name) for name in Reads._fields})
    reads = read_inputs(norm.variant, forms, results)
    for name in BACKWARD_ROWS:
        memory.layout(name, where.rows)  # there is one
    compute = compute_type(str(x.dtype), x_dtype.name)
    form = backward_form(asked, reads, results, where, x_dtype, compute)
    call = Backward(
        form,
        k=_checks.scale(norm.c, where.walk.width),
        weight_offset=norm.weight_offset,
        x=memory.operand("x"),
        **{name: _read(memory, reads, name) for name in Reads._fields if name != "x"},
        **{name: memory.operand(name) for name in NormGrads._fields},
    )
    launches, moved = _run_backward(plan, memory, call)
    return Emulated(NormGrads(*map(memory.array, NormGrads._fields)), launches, moved)


def _gradients(
    inputs: dict[str, Array | None],
    x_dtype: str | None,
    needs: tuple[str, ...],
    out: Mapping[str, Array],
) -> dict[str, Array]:
    """Return the layouts of the results that are wanted."""
    results, x = dict(out), inputs["x"]
    if "x" in needs and "dresidual" not in out:
        results.setdefault("dx", _like(x, x_dtype))
    if "x" in needs and x_dtype not in (None, str(x.dtype)):
        results.setdefault("dx", _like(x, x_dtype))
        results.setdefault("dresidual", _like(x, None))
    for name in ("weight", "bias", "gate"):
        if name in needs and inputs[name] is not None:
            results.setdefault(f"d{name}", np.empty(inputs[name].shape, inputs[name].dtype))
    return results


def _run_backward(
    plan: Plan, memory: Memory, call: Backward
) -> tuple[dict[str, Launch], dict[str, EmulationResult]]:
    """Launch both kernels, with partial sums of their own between them."""
    types, walk = call.form.types, call.form.where.walk
    planned = _plan.cuda_backward(types, walk, call.access(), plan.sm_count, plan.features)
    launch = plan.adapted(planned, call)
    parameters = (call.dweight is not None) + (call.dbias is not None)
    if parameters:
        memory.place_sums(parameters * launch.sums_size, numpy_dtype(types.compute))
        call = call._replace(sums=memory.operand("sums"))
    gradients = {"dweight", "dbias"}
    used = set(memory.arrays) - gradients
    launches = {"row_norm_backward": launch}
    moved = {"row_norm_backward": plan.run(launch, call.arguments(launch), memory, used)}
    if parameters:
        arguments = call.param_arguments(launch)
        launch = _plan.cuda_param_grad(call.form.param_types, walk.width * walk.groups)
        launches["param_grad"] = launch
        moved["param_grad"] = plan.run(launch, arguments, memory, {"sums", *gradients})
    return launches, moved


def _read(memory: Memory, reads: Reads, name: str):
    return None if getattr(reads, name) is None else memory.operand(name)


def _dtype(memory: Memory, name: str) -> DType | None:
    form = memory.form(name)
    return None if form is None else form.dtype


def _geometry(x: Array, norm: Norm) -> Geometry:
    """Return how x falls into rows along its last axis."""
    return _checks.geometry("emulation", describe("emulation", "x", x).form, -1, norm.groups)


def _like(x: Array, dtype: str | None) -> Array:
    return np.empty(x.shape, x.dtype if dtype is None else numpy_dtype(DTYPES[dtype]))
