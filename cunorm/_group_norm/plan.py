# SPDX-License-Identifier: MIT
"""The group norms' OpDefs. Their plans: operands checked, outputs, and a device's launches."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cunorm._core import validate
from cunorm._core.caps import Caps, CpuCaps
from cunorm._core.operands import PARAMETERS, STATISTICS, SUMS, Specs, present, with_new_outputs
from cunorm._core.param_grad import ParamGradTypes, param_grad_call
from cunorm._core.plan import Alignments, InputCopy, KernelCall, Lowered, OpDef, OutputSpec, Plan
from cunorm._core.tensor import WHOLE, OptionalSpecs, TensorSpec, contiguous, optional_dtype
from cunorm._group_norm import kernels
from cunorm._group_norm.kernels import GroupKernel, group_kernel
from cunorm._group_norm.layout import GroupGeometry, check_operand, check_output, geometry
from cunorm._group_norm.schedule import MOST_SHARES, SOME_GPUS, cpu_schedule, cuda_schedule
from cunorm._group_norm.spec import (
    NEEDS,
    GroupBackwardSpec,
    GroupForwardSpec,
    parse_backward,
    parse_forward,
)
from cunorm.reference import group_norm_backward, group_norm_forward
from cunorm.reference.rows import store
from cunorm.results import GroupNormForward, GroupNormGrads

FORWARD_INPUTS = ("x", "weight", "bias")
BACKWARD_INPUTS = ("dy", "x", "rstd", "mean", "weight", "bias")


def plan_forward(spec: GroupForwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a forward; the specs are those of FORWARD_INPUTS, then of GroupNormForward's fields."""
    function, count = spec.function, len(FORWARD_INPUTS)
    inputs = dict(zip(FORWARD_INPUTS, specs[:count], strict=True))
    given = dict(zip(GroupNormForward._fields, specs[count:], strict=True))
    x = present(inputs["x"])
    where = geometry(function, x, spec.num_groups, spec.channel_axis)
    for name, operand in inputs.items():
        check_operand(function, name, operand, where)
    argument, y = spec.output_names[0], given["y"]
    check_output(function, argument, y, where)
    validate.agreed_dtype(function, "dtype", spec.dtype, argument, y)
    for name in STATISTICS:
        argument, statistic = f"out.{name}", given[name]
        check_operand(function, argument, statistic, where)
        validate.output(function, argument, statistic, where.shape_of(name), WHOLE)
    names = (*FORWARD_INPUTS, *spec.output_names)
    validate.same_device(function, x, zip(names, specs, strict=True))
    wanted = {"y": where.result(spec.dtype or x.dtype, x)}
    if spec.saves:
        new = contiguous(where.shape_of("mean"), where.compute, x.device)
        wanted |= dict.fromkeys(STATISTICS, new)
    results, outputs = with_new_outputs(given, wanted, count)
    operands = {**inputs, **results}
    types = kernels.GroupForwardTypes.of(operands, where.compute, activation=spec.activation)
    kernel = group_kernel(types, where, operands, spec.eps)
    params = ParamGradTypes(where.compute, None, None)
    return _plan(kernel, params, where, inputs, inputs, results, outputs, {count: (0,)})


def plan_backward(spec: GroupBackwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a backward; the specs are those of BACKWARD_INPUTS, then of GroupNormGrads' fields."""
    function, count = spec.function, len(BACKWARD_INPUTS)
    inputs = dict(zip(BACKWARD_INPUTS, specs[:count], strict=True))
    given = dict(zip(GroupNormGrads._fields, specs[count:], strict=True))
    x = present(inputs["x"])
    where = geometry(function, x, spec.num_groups, spec.channel_axis)
    for name in ("dy", *PARAMETERS, *STATISTICS):
        check_operand(function, name, inputs[name], where)
    wanted = _gradients(spec, inputs, given, where)
    names = (*BACKWARD_INPUTS, *spec.output_names)
    validate.same_device(function, x, zip(names, specs, strict=True))
    if spec.accumulate:
        validate.accumulators(function, wanted, given)
    results, outputs = with_new_outputs(given, wanted, count)
    # Without an activation, n is not needed, nor weight without dx.
    needs_n = spec.activation != "identity"
    reads = inputs if needs_n else inputs | {"bias": None}
    if not needs_n and results["dx"] is None:
        reads = reads | {"weight": None}
    operands = {**reads, **results}
    types = kernels.GroupBackwardTypes.of(operands, where.compute, activation=spec.activation)
    dtypes = (optional_dtype(results["dweight"]), optional_dtype(results["dbias"]))
    params = ParamGradTypes(where.compute, *dtypes, spec.accumulate)
    kernel = group_kernel(types, where, operands)
    return _plan(kernel, params, where, inputs, reads, results, outputs, {count: (0, 1)})


def _gradients(
    spec: GroupBackwardSpec, inputs: Specs, given: Specs, where: GroupGeometry
) -> dict[str, TensorSpec]:
    """Return the specs of the gradients that are written, as they are where none is given.

    Check that the call has the gradients given, and can write them.
    """
    function, x, wanted = spec.function, present(inputs["x"]), {}
    for name, operand in zip(given, NEEDS, strict=True):
        if operand not in spec.needs or inputs[operand] is None:
            reason = "its operand is absent or not in needs"
            validate.absent(function, f"out.{name}", given[name], reason)
    check_output(function, "out.dx", given["dx"], where)
    if "x" in spec.needs:
        wanted["dx"] = where.result(x.dtype, x)
    for name in PARAMETERS:
        shape, parameter = where.shape_of(name), inputs[name]
        validate.output(function, f"out.d{name}", given[f"d{name}"], shape, WHOLE)
        if name in spec.needs and parameter is not None:
            wanted[f"d{name}"] = contiguous(shape, parameter.dtype, x.device)
    return wanted


# --- both -----------------------------------------------------------------------------------------


def _plan(
    kernel: GroupKernel,
    params: ParamGradTypes,
    where: GroupGeometry,
    inputs: Specs,
    reads: Specs,
    results: Specs,
    outputs: tuple[OutputSpec, ...],
    aliases: dict[int, tuple[int, ...]],
) -> Plan:
    copies = [
        InputCopy(place, where.axes if name in kernel.lines else None)
        for place, (name, spec) in enumerate(reads.items())
        if spec is not None
        and (where.lines(spec) if name in kernel.lines else WHOLE.layout(spec)) is None
    ]
    lower = partial(_lower, kernel, params)
    return Plan(
        specs=(*inputs.values(), *results.values()),
        outputs=outputs,
        copies=tuple(copies),
        aliases=aliases,
        shared=(),
        lower=lower,
        workspace_bound=partial(_workspace_bound, lower),
        is_empty=not any(results.values()) or not (kernel.where.samples or params.outputs),
    )


def _lower(
    kernel: GroupKernel, params: ParamGradTypes, caps: Caps, alignments: Alignments
) -> Lowered:
    types, where = kernel.types, kernel.where
    one_sample = where._replace(samples=max(where.samples, 1))
    if isinstance(caps, CpuCaps):
        schedule = cpu_schedule(types, one_sample, caps)
    else:
        schedule = cuda_schedule(types, one_sample, kernel.access(alignments), caps)
    itemsize, samples = types.compute.itemsize, where.samples
    size = samples * schedule.parts * where.pitch  # of the sums for a parameter
    # Those for dbias have room beside those for dweight, even if they are not wanted.
    has_dweight = params.dweight is not None
    workspace = schedule.handed_size + (2 if has_dweight else params.outputs) * size
    first = schedule.handed_size * itemsize
    sums = (first, first + size * itemsize * has_dweight)
    params_call = []
    if params.outputs:
        sizes = (samples * schedule.parts, where.pitch, where.channels)
        params_call = [param_grad_call(params, kernel.arrays, sums, *sizes, caps)]

    def calls() -> list[KernelCall]:
        found = []
        for first_sample in range(0, samples, schedule.chunk):
            count = min(schedule.chunk, samples - first_sample)
            args = kernel.args(count, first_sample, schedule.part_positions, schedule.parts, sums)
            for one in schedule.passes:
                shares = min(schedule.shares * count, MOST_SHARES)
                launch = replace(one, grid=1 if shares else one.grid * count)
                found.append(KernelCall(launch, args, where.elements, shares))
        return found + params_call

    launches = (*schedule.passes, *(call.launch for call in params_call))
    return Lowered(launches, calls, workspace * itemsize)


def _workspace_bound(lower: partial[Lowered], caps: Caps | None) -> int:
    """Return the bytes that a call takes at most; on some GPU, for caps of None."""
    some = SOME_GPUS if caps is None else (caps,)
    return max(lower(one, None).workspace for one in some)


# --- the OpDefs -----------------------------------------------------------------------------------


def _forward_by_reference(spec: GroupForwardSpec, arrays: Sequence[Any]) -> None:
    x, weight, bias, *outputs = arrays
    exact = group_norm_forward(x, weight=weight, bias=bias, eps=spec.eps, **spec.options(x))
    for output, numbers in zip(outputs, exact, strict=True):
        store(output, numbers)


def _backward_by_reference(spec: GroupBackwardSpec, arrays: Sequence[Any]) -> None:
    dy, x, rstd, mean, weight, bias, *outputs = arrays
    needs = {one for one, output in zip(NEEDS, outputs, strict=True) if output is not None}
    given = {"weight": weight, "bias": bias, "mean": mean, "rstd": rstd, "needs": needs}
    exact = group_norm_backward(dy, x, **given, **spec.options(x))
    for name, output, gradient in zip(GroupNormGrads._fields, outputs, exact, strict=True):
        store(output, gradient, added=spec.accumulate and name in SUMS)


GROUP_FORWARD = OpDef(
    name="group_forward",
    inputs=FORWARD_INPUTS,
    outputs=GroupNormForward._fields,
    required=1,
    x=0,
    spec_type=GroupForwardSpec,
    parse=parse_forward,
    plan=plan_forward,
    reference=_forward_by_reference,
)
GROUP_BACKWARD = OpDef(
    name="group_backward",
    inputs=BACKWARD_INPUTS,
    outputs=GroupNormGrads._fields,
    required=4,
    x=1,
    spec_type=GroupBackwardSpec,
    parse=parse_backward,
    plan=plan_backward,
    reference=_backward_by_reference,
    sums=SUMS,
)
