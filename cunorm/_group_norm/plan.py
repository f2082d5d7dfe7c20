# SPDX-License-Identifier: MIT
"""The OpDefs of the group norms: how a call is planned, and its launches on a device."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cunorm._core import validate
from cunorm._core.calls import by_name, check_gradients, check_inputs, check_results
from cunorm._core.caps import Caps, CpuCaps
from cunorm._core.operands import arguments, present
from cunorm._core.param_grad import param_grad_call
from cunorm._core.plan import Aliases, Alignments, KernelCall, Lowered, OpDef, Plan
from cunorm._core.tensor import OptionalSpecs
from cunorm._group_norm.kernels import (
    TABLE,
    GroupBackwardTypes,
    GroupForwardTypes,
    GroupJvpTypes,
    GroupKernel,
)
from cunorm._group_norm.layout import group_geometry
from cunorm._group_norm.schedule import MAX_SHARES, SOME_GPUS, cpu_schedule, cuda_schedule
from cunorm._group_norm.spec import CHECKS, GroupBackwardSpec, GroupForwardSpec, GroupJvpSpec
from cunorm.reference import group_norm_backward, group_norm_forward
from cunorm.reference.jvp import group_norm_jvp
from cunorm.reference.rows import round_to, store


def plan_forward(spec: GroupForwardSpec, specs: OptionalSpecs) -> Plan:
    function, (inputs, given) = spec.function, by_name(GroupForwardTypes, specs)
    geometry = group_geometry(function, present(inputs["x"]), spec.num_groups, spec.channel_axis)
    check_inputs(function, GroupForwardTypes, inputs, geometry)
    results, outputs = check_results(spec, GroupForwardTypes, inputs, given, geometry)
    validate.agreed_dtype(function, "dtype", spec.dtype, spec.output_names[0], given["y"])
    operands = inputs | results
    types = GroupForwardTypes.from_specs(operands, geometry.compute, activation=spec.activation)
    kernel = GroupKernel(types, geometry, operands, (spec.eps,))
    aliases: Aliases = {kernel.slots["y"]: (kernel.slots["x"],)}
    return kernel.plan(inputs, outputs, _lower, partial(_workspace_bound, kernel), aliases)


def plan_backward(spec: GroupBackwardSpec, specs: OptionalSpecs) -> Plan:
    inputs, given = by_name(GroupBackwardTypes, specs)
    x = present(inputs["x"])
    geometry = group_geometry(spec.function, x, spec.num_groups, spec.channel_axis)
    check_inputs(spec.function, GroupBackwardTypes, inputs, geometry)
    check_gradients(spec, GroupBackwardTypes, inputs, given)
    results, outputs = check_results(spec, GroupBackwardTypes, inputs, given, geometry)
    # bias is needed only for n, and n only for an activation. weight is needed for n and for dx.
    needs_n = spec.activation != "identity"
    reads = inputs if needs_n else inputs | {"bias": None}
    if not needs_n and results["dx"] is None:
        reads = reads | {"weight": None}
    operands = reads | results
    types = GroupBackwardTypes.from_specs(operands, geometry.compute, activation=spec.activation)
    kernel = GroupKernel(types, geometry, operands, accumulate=spec.accumulate)
    slot_of = [*operands].index
    aliases: Aliases = {slot_of("dx"): (slot_of("dy"), slot_of("x"))}
    return kernel.plan(inputs, outputs, _lower, partial(_workspace_bound, kernel), aliases)


def plan_jvp(spec: GroupJvpSpec, specs: OptionalSpecs) -> Plan:
    function, (inputs, given) = spec.function, by_name(GroupJvpTypes, specs)
    geometry = group_geometry(function, present(inputs["x"]), spec.num_groups, spec.channel_axis)
    check_inputs(function, GroupJvpTypes, inputs, geometry)
    if inputs["weight"] is None:
        validate.absent(function, "weight_tangent", inputs["weight_tangent"], "weight is None")
    results, outputs = check_results(spec, GroupJvpTypes, inputs, given, geometry)
    validate.agreed_dtype(function, "dtype", spec.dtype, "out", given["y_tangent"])
    reads = inputs if spec.activation != "identity" else inputs | {"bias": None}
    operands = reads | results
    types = GroupJvpTypes.from_specs(operands, geometry.compute, activation=spec.activation)
    kernel = GroupKernel(types, geometry, operands)
    slots = kernel.slots
    aliases: Aliases = {slots["y_tangent"]: (slots["x"], slots["x_tangent"])}
    return kernel.plan(inputs, outputs, _lower, partial(_workspace_bound, kernel), aliases)


def _lower(kernel: GroupKernel, caps: Caps, alignments: Alignments) -> Lowered:
    types, params, sizes = kernel.types, kernel.params, kernel.geometry.sizes
    one_sample = sizes._replace(samples=max(sizes.samples, 1))
    if isinstance(caps, CpuCaps):
        schedule = cpu_schedule(types, one_sample, caps)
    else:
        schedule = cuda_schedule(types, one_sample, kernel.access(alignments), caps)
    itemsize, samples = types.compute.itemsize, sizes.samples
    size = samples * schedule.parts * sizes.pitch  # the size of the sums for one parameter
    # The sums for dbias have room after those for dweight, even if dbias is not wanted.
    has_dweight = params.dweight is not None
    workspace = schedule.handed_size + (2 if has_dweight else params.outputs) * size
    first = schedule.handed_size * itemsize
    sums = (first, first + size * itemsize * has_dweight, None)  # there is no dgate
    params_call = []
    if params.outputs:
        of_sums = (samples * schedule.parts, sizes.pitch, sizes.channels)
        parts = kernel.parts(schedule.parts)
        params_call = [param_grad_call(params, kernel.slots, sums, *of_sums, caps, parts)]

    def calls() -> list[KernelCall]:
        found = []
        for first_sample in range(0, samples, schedule.chunk):
            count = min(schedule.chunk, samples - first_sample)
            args = kernel.args(count, first_sample, schedule.part_positions, schedule.parts, sums)
            for one in schedule.passes:
                shares = min(schedule.shares * count, MAX_SHARES)
                launch = replace(one, grid=1 if shares else one.grid * count)
                found.append(KernelCall(launch, args, sizes.elements, shares))
        return found + params_call

    launches = (*schedule.passes, *(call.launch for call in params_call))
    return Lowered(launches, calls, workspace * itemsize)


def _workspace_bound(kernel: GroupKernel, caps: Caps | None) -> int:
    """Return the most bytes that a call takes; if caps is None, on any GPU."""
    some = SOME_GPUS if caps is None else (caps,)
    return max(_lower(kernel, one, None).workspace for one in some)


def _forward_by_reference(spec: GroupForwardSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(TABLE.forward_inputs, TABLE.forward_results, arrays)
    store(results, group_norm_forward(**inputs, eps=spec.eps, **spec.options(inputs["x"])))


def _backward_by_reference(spec: GroupBackwardSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(TABLE.backward_inputs, TABLE.backward_results, arrays)
    exact = group_norm_backward(**inputs, needs=spec.needs, **spec.options(inputs["x"]))
    store(results, exact, ("dweight", "dbias") if spec.accumulate else ())


def _jvp_by_reference(spec: GroupJvpSpec, arrays: Sequence[Any]) -> None:
    inputs, (result,) = arguments(GroupJvpTypes.inputs, (), arrays[:-1])[0], arrays[-1:]
    exact = group_norm_jvp(**inputs, **spec.options(inputs["x"]))
    result[...] = round_to(exact, result.dtype)


GROUP_FORWARD = OpDef(
    name="group_forward",
    input_slots=TABLE.forward_inputs,
    result_slots=TABLE.forward_results,
    spec_type=GroupForwardSpec,
    checks=CHECKS,
    plan=plan_forward,
    reference=_forward_by_reference,
)
GROUP_BACKWARD = OpDef(
    name="group_backward",
    input_slots=TABLE.backward_inputs,
    result_slots=TABLE.backward_results,
    spec_type=GroupBackwardSpec,
    checks=CHECKS,
    plan=plan_backward,
    reference=_backward_by_reference,
)
GROUP_JVP = OpDef(
    name="group_jvp",
    input_slots=GroupJvpTypes.inputs,
    result_slots=GroupJvpTypes.results,
    spec_type=GroupJvpSpec,
    checks=CHECKS,
    plan=plan_jvp,
    reference=_jvp_by_reference,
)
