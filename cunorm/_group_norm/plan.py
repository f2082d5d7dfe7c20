# SPDX-License-Identifier: MIT
"""Plans of the group norms: operands checked, outputs, and the launches of a device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from cunorm._core import validate
from cunorm._core.caps import Caps, CpuCaps
from cunorm._core.dtypes import FLOAT32, FLOAT64, DType
from cunorm._core.param_grad import ParamGradTypes, param_grad_call
from cunorm._core.plan import Alignments, InputCopy, KernelCall, Lowered, OutputSpec, Plan
from cunorm._core.rows import WHOLE
from cunorm._core.tensor import OptionalSpecs, TensorSpec, contiguous, optional_dtype
from cunorm._group_norm.kernels import GroupBackwardTypes, GroupForwardTypes, GroupKernel
from cunorm._group_norm.layout import (
    GroupGeometry,
    check_output,
    check_shape,
    check_statistic,
    geometry,
    must_be_copied,
)
from cunorm._group_norm.schedule import SOME_GPUS, Schedule, cpu_schedule, cuda_schedule
from cunorm._group_norm.spec import NEEDS, GroupBackwardSpec, GroupForwardSpec
from cunorm.results import GroupNormForward, GroupNormGrads

Specs = dict[str, TensorSpec | None]

FORWARD_INPUTS = ("x", "weight", "bias")
BACKWARD_INPUTS = ("dy", "x", "mean", "rstd", "weight", "bias")


def plan_forward(spec: GroupForwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a forward; the specs are those of FORWARD_INPUTS, then of GroupNormForward's fields."""
    function, count = spec.function, len(FORWARD_INPUTS)
    inputs = dict(zip(FORWARD_INPUTS, specs, strict=False))
    given = dict(zip(GroupNormForward._fields, specs[count:], strict=True))
    x = _present(inputs["x"])
    where = geometry(function, x, spec.num_groups, spec.channel_axis)
    for name in ("weight", "bias"):
        check_shape(function, name, inputs[name], where.channel_shape, "one for each channel")
    compute = FLOAT64 if x.dtype is FLOAT64 else FLOAT32
    _check_forward_outputs(spec, where, given, compute)
    validate.same_device(
        function, x, zip((*FORWARD_INPUTS, *spec.output_names), specs, strict=True)
    )
    wanted = {"y": where.result(spec.dtype or x.dtype, x)}
    if spec.saves:
        statistic = contiguous(where.statistic_shape, compute, x.device)
        wanted |= {"mean": statistic, "rstd": statistic}
    outputs = {name: output for name, output in wanted.items() if given[name] is None}
    results = {**given, **outputs}
    types = GroupForwardTypes(
        compute=compute,
        x=x.dtype,
        y=_present(results["y"]).dtype,
        weight=optional_dtype(inputs["weight"]),
        bias=optional_dtype(inputs["bias"]),
        activation=spec.activation,
    )
    lines = {"x": where.lines_of_input(x), "y": where.lines_of_input(results["y"])}
    kernel = GroupKernel(types, where.where, lines, _places({**inputs, **results}), spec.eps)
    return _plan(kernel, None, where, inputs, inputs, results, outputs, {count: (0,)})


def _check_forward_outputs(
    spec: GroupForwardSpec, where: GroupGeometry, given: Specs, compute: DType
) -> None:
    """Check the arrays given for outputs."""
    function, argument = spec.function, spec.output_names[0]
    check_output(function, argument, given["y"], where)
    validate.agreed_dtype(function, "dtype", spec.dtype, argument, given["y"])
    for name in ("mean", "rstd"):
        check_statistic(function, f"out.{name}", given[name], where, compute)
        validate.output(function, f"out.{name}", given[name], where.statistic_shape, WHOLE)


def plan_backward(spec: GroupBackwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a backward; the specs are those of BACKWARD_INPUTS, then of GroupNormGrads' fields."""
    function, count = spec.function, len(BACKWARD_INPUTS)
    inputs = dict(zip(BACKWARD_INPUTS, specs, strict=False))
    given = dict(zip(GroupNormGrads._fields, specs[count:], strict=True))
    x = _present(inputs["x"])
    where = geometry(function, x, spec.num_groups, spec.channel_axis)
    compute = FLOAT64 if x.dtype is FLOAT64 else FLOAT32
    _check_backward_inputs(function, inputs, where, compute)
    _check_gradients(spec, inputs, where, given)
    names = (*BACKWARD_INPUTS, *spec.output_names)
    validate.same_device(function, x, zip(names, specs, strict=True))
    wanted = _gradients(spec, inputs, where)
    if spec.accumulate:
        validate.accumulators(function, wanted, given)
    outputs = {name: output for name, output in wanted.items() if given[name] is None}
    results = {**given, **outputs}
    reads = _read_inputs(spec, inputs, results)
    types = GroupBackwardTypes(
        compute=compute,
        activation=spec.activation,
        dy=_present(inputs["dy"]).dtype,
        x=x.dtype,
        dx=optional_dtype(results["dx"]),
        weight=optional_dtype(reads["weight"]),
        bias=optional_dtype(reads["bias"]),
        dweight=results["dweight"] is not None,
        dbias=results["dbias"] is not None,
    )
    params = ParamGradTypes(
        *(compute, optional_dtype(results["dweight"]), optional_dtype(results["dbias"])),
        accumulate=spec.accumulate,
    )
    operands = {**reads, **results}
    lines = {name: where.lines_of_input(operands[name]) for name in ("dy", "x", "dx")}
    kernel = GroupKernel(types, where.where, lines, _places(operands))
    return _plan(kernel, params, where, inputs, reads, results, outputs, {count: (0, 1)})


def _check_backward_inputs(
    function: str, inputs: Specs, where: GroupGeometry, compute: DType
) -> None:
    check_shape(function, "dy", inputs["dy"], where.shape, "the shape of x")
    for name in ("weight", "bias"):
        check_shape(function, name, inputs[name], where.channel_shape, "one for each channel")
    for name in ("mean", "rstd"):
        check_statistic(function, name, inputs[name], where, compute)


def _check_gradients(
    spec: GroupBackwardSpec, inputs: Specs, where: GroupGeometry, given: Specs
) -> None:
    """Check that a call has such gradients, and that they can be written there."""
    function = spec.function
    for name, operand in zip(given, NEEDS, strict=True):
        if operand not in spec.needs or inputs[operand] is None:
            reason = "its operand is absent or not in needs"
            validate.absent(function, f"out.{name}", given[name], reason)
    check_output(function, "out.dx", given["dx"], where)
    for name in ("dweight", "dbias"):
        validate.output(function, f"out.{name}", given[name], where.channel_shape, WHOLE)


def _gradients(
    spec: GroupBackwardSpec, inputs: Specs, where: GroupGeometry
) -> dict[str, TensorSpec]:
    """Return the specs of the gradients that are written, as they are where none is given."""
    x, wanted = _present(inputs["x"]), {}
    if "x" in spec.needs:
        wanted["dx"] = where.result(x.dtype, x)
    for name in ("weight", "bias"):
        parameter = inputs[name]
        if name in spec.needs and parameter is not None:
            wanted[f"d{name}"] = contiguous(where.channel_shape, parameter.dtype, x.device)
    return wanted


def _read_inputs(spec: GroupBackwardSpec, inputs: Specs, results: Specs) -> Specs:
    """Return the inputs that the kernels read; the others are None."""
    needs_n = spec.activation != "identity"
    return {
        **inputs,
        "weight": inputs["weight"] if needs_n or results["dx"] else None,
        "bias": inputs["bias"] if needs_n else None,
    }


# --- both -----------------------------------------------------------------------------------------


def _plan(
    kernel: GroupKernel,
    params: ParamGradTypes | None,
    where: GroupGeometry,
    inputs: Specs,
    reads: Specs,
    results: Specs,
    outputs: dict[str, TensorSpec],
    aliases: dict[int, tuple[int, ...]],
) -> Plan:
    first, fields = len(inputs), tuple(results)
    copies = [
        InputCopy(place, where.axes if name in ("x", "dy") else None)
        for place, (name, spec) in enumerate(reads.items())
        if must_be_copied(name, spec, where)
    ]
    lower = partial(_lower, kernel, params)
    sums_nothing = params is None or not params.outputs
    return Plan(
        specs=(*inputs.values(), *results.values()),
        outputs=tuple(
            OutputSpec(first + fields.index(name), spec) for name, spec in outputs.items()
        ),
        copies=tuple(copies),
        aliases=aliases,
        shared=(),
        lower=lower,
        workspace_bound=partial(_workspace_bound, lower),
        is_empty=not any(results.values()) or (not kernel.where.samples and sums_nothing),
    )


def _lower(
    kernel: GroupKernel, params: ParamGradTypes | None, caps: Caps, alignments: Alignments
) -> Lowered:
    types, where = kernel.types, kernel.where
    one_sample = where._replace(samples=max(where.samples, 1))
    if isinstance(caps, CpuCaps):
        schedule = cpu_schedule(types, one_sample, caps)
    else:
        schedule = cuda_schedule(types, one_sample, kernel.access(alignments), caps)
    itemsize = types.compute.itemsize
    row = schedule.parts * where.pitch  # of sums, of each sample
    first = schedule.handed_size * itemsize
    has_dweight = params is not None and params.dweight is not None
    sums = (first, first + where.samples * row * itemsize * has_dweight)
    cut = (schedule.part_positions, schedule.parts)
    params_call = []
    if params is not None and params.outputs:
        sizes = (where.samples * schedule.parts, where.pitch, where.channels)
        params_call = [param_grad_call(params, kernel.arrays, sums, *sizes, caps)]

    def calls() -> list[KernelCall]:
        found = []
        for chunk in _chunks(where.samples, schedule.chunk):
            args = kernel.args(chunk, cut, () if params is None else sums)
            for one in schedule.passes:
                launch = replace(one, grid=one.grid * chunk[0])
                found.append(KernelCall(launch, args, where.elements))
        return found + params_call

    launches = (*schedule.passes, *(call.launch for call in params_call))
    return Lowered(launches, calls, _workspace(params, schedule, where.samples * row) * itemsize)


def _workspace(params: ParamGradTypes | None, schedule: Schedule, rows: int) -> int:
    """Return how many elements passes hand on, and the sums have: dbias' are there for dweight."""
    count = 0 if params is None else 2 if params.dweight is not None else params.outputs
    return schedule.handed_size + count * rows


def _chunks(samples: int, chunk: int) -> list[tuple[int, int]]:
    """Return how many samples each chunk has, and its first."""
    return [(min(chunk, samples - first), first) for first in range(0, samples, chunk)]


def _workspace_bound(lower: partial[Lowered], caps: Caps | None) -> int:
    """Return the bytes that a call takes at most; on some GPU, for caps of None."""
    if caps is not None:
        return lower(caps, None).workspace
    return max(lower(caps, None).workspace for caps in SOME_GPUS)


def _present(spec: TensorSpec | None) -> TensorSpec:
    assert spec is not None
    return spec


def _places(operands: Specs) -> dict[str, int]:
    """Return the places of the arrays that there are."""
    names = (*operands, "workspace")
    return {
        name: place
        for place, name in enumerate(names)
        if name == "workspace" or operands[name] is not None
    }
