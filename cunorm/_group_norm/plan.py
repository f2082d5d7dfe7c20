# SPDX-License-Identifier: MIT
"""The group norms' OpDefs. Their plans: operands checked, outputs, and a device's launches."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cunorm._core import validate
from cunorm._core.caps import Caps, CpuCaps
from cunorm._core.operands import (
    Kind,
    Specs,
    arguments,
    dtypes_of,
    named,
    operand_of,
    present,
)
from cunorm._core.param_grad import ParamGradTypes, param_grad_call
from cunorm._core.plan import (
    Aliases,
    Alignments,
    InputCopy,
    KernelCall,
    Lowered,
    OpDef,
    OutputSpec,
    Plan,
    with_new_outputs,
)
from cunorm._core.tensor import WHOLE, OptionalSpecs, optional_dtype
from cunorm._group_norm.kernels import (
    TABLE,
    GroupBackwardTypes,
    GroupForwardTypes,
    GroupKernel,
    group_kernel,
)
from cunorm._group_norm.layout import GroupGeometry, check_operand, check_result, group_geometry
from cunorm._group_norm.schedule import MAX_SHARES, SOME_GPUS, cpu_schedule, cuda_schedule
from cunorm._group_norm.spec import (
    GroupBackwardSpec,
    GroupForwardSpec,
    parse_backward,
    parse_forward,
)
from cunorm.reference import group_norm_backward, group_norm_forward
from cunorm.reference.rows import store


def plan_forward(spec: GroupForwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a forward; the specs are those of the table's inputs, then of its results."""
    function, count = spec.function, len(TABLE.forward_inputs)
    inputs = named(TABLE.forward_inputs, specs[:count])
    given = named(TABLE.forward_results, specs[count:])
    x = present(inputs["x"])
    geometry = group_geometry(function, x, spec.num_groups, spec.channel_axis)
    for slot in TABLE.forward_inputs:
        check_operand(function, slot, inputs[slot.name], geometry)
    for argument, slot in zip(spec.output_names, TABLE.forward_results, strict=True):
        check_result(function, argument, slot, given[slot.name], geometry)
    validate.agreed_dtype(function, "dtype", spec.dtype, spec.output_names[0], given["y"])
    names = (*(slot.argument for slot in TABLE.forward_inputs), *spec.output_names)
    validate.same_device(function, x, zip(names, specs, strict=True))
    dtypes = spec.result_dtypes(dtypes_of(inputs))
    new = partial(geometry.new_result, x)
    results, outputs = with_new_outputs(TABLE.forward_results, given, dtypes, new, count)
    operands = inputs | results
    types = GroupForwardTypes.from_specs(operands, geometry.compute, activation=spec.activation)
    kernel = group_kernel(types, geometry, operands, spec.eps)
    params = ParamGradTypes(geometry.compute, None, None)
    slot_of = [*operands].index
    aliases: Aliases = {slot_of("y"): (slot_of("x"),)}
    return _plan(kernel, params, geometry, inputs, inputs, results, outputs, aliases)


def plan_backward(spec: GroupBackwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a backward; the specs are those of the table's inputs, then of its results."""
    function, count = spec.function, len(TABLE.backward_inputs)
    inputs = named(TABLE.backward_inputs, specs[:count])
    given = named(TABLE.backward_results, specs[count:])
    x = present(inputs["x"])
    geometry = group_geometry(function, x, spec.num_groups, spec.channel_axis)
    for slot in TABLE.backward_inputs:
        check_operand(function, slot, inputs[slot.name], geometry)
    for slot in TABLE.backward_results:
        argument, gradient = f"out.{slot.argument}", given[slot.name]
        operand = operand_of(slot)
        if operand not in spec.needs or inputs[operand] is None:
            reason = "its operand is absent or not in needs"
            validate.absent(function, argument, gradient, reason)
        check_result(function, argument, slot, gradient, geometry)
    names = (*(slot.argument for slot in TABLE.backward_inputs), *spec.output_names)
    validate.same_device(function, x, zip(names, specs, strict=True))
    dtypes = spec.result_dtypes(dtypes_of(inputs))
    if spec.accumulate:
        validate.accumulators(function, dtypes, given)
    new = partial(geometry.new_result, x)
    results, outputs = with_new_outputs(TABLE.backward_results, given, dtypes, new, count)
    # Without an activation, n is not needed, nor weight without dx.
    needs_n = spec.activation != "identity"
    reads = inputs if needs_n else inputs | {"bias": None}
    if not needs_n and results["dx"] is None:
        reads = reads | {"weight": None}
    operands = reads | results
    types = GroupBackwardTypes.from_specs(operands, geometry.compute, activation=spec.activation)
    dweight, dbias = (optional_dtype(results[name]) for name in types.sums())
    params = ParamGradTypes(geometry.compute, dweight, dbias, spec.accumulate)
    kernel = group_kernel(types, geometry, operands)
    slot_of = [*operands].index
    aliases: Aliases = {slot_of("dx"): (slot_of("dy"), slot_of("x"))}
    return _plan(kernel, params, geometry, inputs, reads, results, outputs, aliases)


# --- both -----------------------------------------------------------------------------------------


def _plan(
    kernel: GroupKernel,
    params: ParamGradTypes,
    geometry: GroupGeometry,
    inputs: Specs,
    reads: Specs,
    results: Specs,
    outputs: tuple[OutputSpec, ...],
    aliases: Aliases,
) -> Plan:
    copies = [
        InputCopy(slot, geometry.axes if name in kernel.lines else None)
        for slot, (name, spec) in enumerate(reads.items())
        if spec is not None
        and (geometry.lines(spec) if name in kernel.lines else WHOLE.layout(spec)) is None
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
        is_empty=not any(results.values()) or not (kernel.sizes.samples or params.outputs),
    )


def _lower(
    kernel: GroupKernel, params: ParamGradTypes, caps: Caps, alignments: Alignments
) -> Lowered:
    types, sizes = kernel.types, kernel.sizes
    one_sample = sizes._replace(samples=max(sizes.samples, 1))
    if isinstance(caps, CpuCaps):
        schedule = cpu_schedule(types, one_sample, caps)
    else:
        schedule = cuda_schedule(types, one_sample, kernel.access(alignments), caps)
    itemsize, samples = types.compute.itemsize, sizes.samples
    size = samples * schedule.parts * sizes.pitch  # of the sums for a parameter
    # Those for dbias have room beside those for dweight, even if they are not wanted.
    has_dweight = params.dweight is not None
    workspace = schedule.handed_size + (2 if has_dweight else params.outputs) * size
    first = schedule.handed_size * itemsize
    sums = (first, first + size * itemsize * has_dweight)
    params_call = []
    if params.outputs:
        of_sums = (samples * schedule.parts, sizes.pitch, sizes.channels)
        params_call = [param_grad_call(params, kernel.slots, sums, *of_sums, caps)]

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


def _workspace_bound(lower: partial[Lowered], caps: Caps | None) -> int:
    """Return the bytes that a call takes at most; on some GPU, for caps of None."""
    some = SOME_GPUS if caps is None else (caps,)
    return max(lower(one, None).workspace for one in some)


# --- the OpDefs -----------------------------------------------------------------------------------


def _forward_by_reference(spec: GroupForwardSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(TABLE.forward_inputs, TABLE.forward_results, arrays)
    exact = group_norm_forward(**inputs, eps=spec.eps, **spec.options(inputs["x"]))
    for name, output in results.items():
        store(output, getattr(exact, name))


def _backward_by_reference(spec: GroupBackwardSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(TABLE.backward_inputs, TABLE.backward_results, arrays)
    wanted = [slot for slot in TABLE.backward_results if results[slot.argument] is not None]
    needs = {operand_of(slot) for slot in wanted}
    exact = group_norm_backward(**inputs, needs=needs, **spec.options(inputs["x"]))
    for slot in wanted:
        is_added = spec.accumulate and slot.kind is Kind.PARAMETER
        store(results[slot.argument], getattr(exact, slot.argument), added=is_added)


GROUP_FORWARD = OpDef(
    name="group_forward",
    input_slots=TABLE.forward_inputs,
    result_slots=TABLE.forward_results,
    spec_type=GroupForwardSpec,
    parse=parse_forward,
    plan=plan_forward,
    reference=_forward_by_reference,
)
GROUP_BACKWARD = OpDef(
    name="group_backward",
    input_slots=TABLE.backward_inputs,
    result_slots=TABLE.backward_results,
    spec_type=GroupBackwardSpec,
    parse=parse_backward,
    plan=plan_backward,
    reference=_backward_by_reference,
)
