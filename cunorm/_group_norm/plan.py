# SPDX-License-Identifier: MIT
"""Plans of the group norms: operands checked, outputs, and the launches of a device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from cunorm._core import validate
from cunorm._core.caps import Caps, CpuCaps
from cunorm._core.dtypes import FLOAT32, FLOAT64, DType
from cunorm._core.operands import PARAMETERS, SUMS, Specs, dtypes_of, present, with_new_outputs
from cunorm._core.param_grad import ParamGradTypes, param_grad_call
from cunorm._core.plan import Alignments, InputCopy, KernelCall, Lowered, OutputSpec, Plan
from cunorm._core.tensor import WHOLE, OptionalSpecs, TensorSpec, contiguous
from cunorm._group_norm import kernels, layout
from cunorm._group_norm.kernels import GroupKernel, group_kernel
from cunorm._group_norm.layout import GroupGeometry, check_operand, check_output, check_statistic
from cunorm._group_norm.schedule import SOME_GPUS, Schedule, cpu_schedule, cuda_schedule
from cunorm._group_norm.spec import NEEDS, GroupBackwardSpec, GroupForwardSpec
from cunorm.results import GroupNormForward, GroupNormGrads

FORWARD_INPUTS = ("x", "weight", "bias")
BACKWARD_INPUTS = ("dy", "x", "mean", "rstd", "weight", "bias")
_STATISTICS = ("mean", "rstd")


def plan_forward(spec: GroupForwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a forward; the specs are those of FORWARD_INPUTS, then of GroupNormForward's fields."""
    function, count = spec.function, len(FORWARD_INPUTS)
    inputs = dict(zip(FORWARD_INPUTS, specs, strict=False))
    given = dict(zip(GroupNormForward._fields, specs[count:], strict=True))
    x = present(inputs["x"])
    where = layout.geometry(function, x, spec.num_groups, spec.channel_axis)
    for name in PARAMETERS:
        check_operand(function, name, inputs[name], where)
    compute = FLOAT64 if x.dtype is FLOAT64 else FLOAT32
    _check_forward_outputs(spec, where, given, compute)
    names = (*FORWARD_INPUTS, *spec.output_names)
    validate.same_device(function, x, zip(names, specs, strict=True))
    wanted = {"y": where.result(spec.dtype or x.dtype, x)}
    if spec.saves:
        wanted |= dict.fromkeys(_STATISTICS, contiguous(where.statistic_shape, compute, x.device))
    results, outputs = with_new_outputs(given, wanted, count)
    operands = {**inputs, **results}
    dtypes = dtypes_of(operands, ("x", "y", *PARAMETERS))
    types = kernels.GroupForwardTypes(compute=compute, activation=spec.activation, **dtypes)
    kernel = group_kernel(types, where, operands, spec.eps)
    return _plan(kernel, None, where, inputs, inputs, results, outputs, {count: (0,)})


def _check_forward_outputs(
    spec: GroupForwardSpec, where: GroupGeometry, given: Specs, compute: DType
) -> None:
    """Check the arrays given for outputs."""
    function, argument = spec.function, spec.output_names[0]
    check_output(function, argument, given["y"], where)
    validate.agreed_dtype(function, "dtype", spec.dtype, argument, given["y"])
    for name in _STATISTICS:
        check_statistic(function, f"out.{name}", given[name], where, compute)
        validate.output(function, f"out.{name}", given[name], where.statistic_shape, WHOLE)


def plan_backward(spec: GroupBackwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a backward; the specs are those of BACKWARD_INPUTS, then of GroupNormGrads' fields."""
    function, count = spec.function, len(BACKWARD_INPUTS)
    inputs = dict(zip(BACKWARD_INPUTS, specs, strict=False))
    given = dict(zip(GroupNormGrads._fields, specs[count:], strict=True))
    x = present(inputs["x"])
    where = layout.geometry(function, x, spec.num_groups, spec.channel_axis)
    compute = FLOAT64 if x.dtype is FLOAT64 else FLOAT32
    for name in ("dy", *PARAMETERS):
        check_operand(function, name, inputs[name], where)
    for name in _STATISTICS:
        check_statistic(function, name, inputs[name], where, compute)
    _check_gradients(spec, inputs, where, given)
    names = (*BACKWARD_INPUTS, *spec.output_names)
    validate.same_device(function, x, zip(names, specs, strict=True))
    wanted = _gradients(spec, inputs, where)
    if spec.accumulate:
        validate.accumulators(function, wanted, given)
    results, outputs = with_new_outputs(given, wanted, count)
    # Without an activation, n is not needed, nor weight without dx.
    needs_n = spec.activation != "identity"
    reads = inputs if needs_n else inputs | {"bias": None}
    if not needs_n and results["dx"] is None:
        reads = reads | {"weight": None}
    operands = {**reads, **results}
    dtypes = dtypes_of(operands, ("dy", "x", "dx", *PARAMETERS))
    dtypes |= {name: results[name] is not None for name in SUMS}
    types = kernels.GroupBackwardTypes(compute=compute, activation=spec.activation, **dtypes)
    params = ParamGradTypes(compute, **dtypes_of(results, SUMS), accumulate=spec.accumulate)
    kernel = group_kernel(types, where, operands)
    return _plan(kernel, params, where, inputs, reads, results, outputs, {count: (0, 1)})


def _check_gradients(
    spec: GroupBackwardSpec, inputs: Specs, where: GroupGeometry, given: Specs
) -> None:
    """Check that the call has the gradients given, and can write them."""
    function = spec.function
    for name, operand in zip(given, NEEDS, strict=True):
        if operand not in spec.needs or inputs[operand] is None:
            reason = "its operand is absent or not in needs"
            validate.absent(function, f"out.{name}", given[name], reason)
    check_output(function, "out.dx", given["dx"], where)
    for name in SUMS:
        validate.output(function, f"out.{name}", given[name], where.channel_shape, WHOLE)


def _gradients(
    spec: GroupBackwardSpec, inputs: Specs, where: GroupGeometry
) -> dict[str, TensorSpec]:
    """Return the specs of the gradients that are written, as they are where none is given."""
    x, wanted = present(inputs["x"]), {}
    if "x" in spec.needs:
        wanted["dx"] = where.result(x.dtype, x)
    for name in PARAMETERS:
        parameter = inputs[name]
        if name in spec.needs and parameter is not None:
            wanted[f"d{name}"] = contiguous(where.channel_shape, parameter.dtype, x.device)
    return wanted


# --- both -----------------------------------------------------------------------------------------


def _plan(
    kernel: GroupKernel,
    params: ParamGradTypes | None,
    where: GroupGeometry,
    inputs: Specs,
    reads: Specs,
    results: Specs,
    outputs: tuple[OutputSpec, ...],
    aliases: dict[int, tuple[int, ...]],
) -> Plan:
    copies = [
        InputCopy(place, where.axes if name in ("x", "dy") else None)
        for place, (name, spec) in enumerate(reads.items())
        if layout.must_be_copied(name, spec, where)
    ]
    lower = partial(_lower, kernel, params)
    sums_nothing = params is None or not params.outputs
    return Plan(
        specs=(*inputs.values(), *results.values()),
        outputs=outputs,
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
