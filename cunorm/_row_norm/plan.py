# SPDX-License-Identifier: MIT
"""The row norms' OpDefs. Their plans: operands checked, outputs, and the launches of a device."""

from functools import partial

from cunorm._core import validate
from cunorm._core.dtypes import DType, compute_type
from cunorm._core.operands import Specs, check_compute, dtypes_of, named, operand_of, present
from cunorm._core.param_grad import ParamGradTypes
from cunorm._core.plan import Aliases, InputCopy, OpDef, OutputSpec, Plan, with_new_outputs
from cunorm._core.tensor import OptionalSpecs, optional_dtype
from cunorm._row_norm.by_reference import backward_by_reference, forward_by_reference
from cunorm._row_norm.geometry import Geometry, check_operand, row_geometry
from cunorm._row_norm.kernels import TABLE, BackwardTypes, ForwardTypes, RowKernel, row_kernel
from cunorm._row_norm.lower import lower, workspace_bound
from cunorm._row_norm.spec import RowBackwardSpec, RowForwardSpec, parse_backward, parse_forward

# One of these in float64 makes the statistics float64.
_FLOAT64_SOURCE = "x, its residual stream or x_dtype"


def plan_forward(spec: RowForwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a forward; the specs are those of the table's inputs, then of its results."""
    function, count = spec.function, len(TABLE.forward_inputs)
    inputs = named(TABLE.forward_inputs, specs[:count])
    given = named(TABLE.forward_results, specs[count:])
    x = present(inputs["x"])
    geometry = row_geometry(function, x, spec.axis, spec.groups)
    spec.check_options(inputs)
    for slot in TABLE.forward_inputs:
        check_operand(function, slot, inputs[slot.name], geometry)
    _check_forward_results(spec, inputs, given, geometry)
    dtypes = spec.result_dtypes(dtypes_of(inputs | given))
    compute = compute_type(x.dtype, dtypes.get("residual_out"))
    for slot in TABLE.forward_results:
        if not slot.has_macro:
            argument = f"out.{slot.argument}"
            check_compute(function, argument, given[slot.name], compute, _FLOAT64_SOURCE)
    names = (*(slot.argument for slot in TABLE.forward_inputs), *spec.output_names)
    validate.same_device(function, x, zip(names, specs, strict=True))
    new = partial(geometry.new_result, x)
    results, outputs = with_new_outputs(TABLE.forward_results, given, dtypes, new, count)
    kernel = _forward_kernel(spec, inputs, results, geometry, compute)
    keeps_x = spec.has_stream and results["residual_out"] is None
    # The stream is written while gate, weight and bias are still to be read. An x that is returned
    # as the stream must stay; where the stream is written, x is not read again.
    slot_of = [*inputs, *results].index
    x_slot, stream_slot = slot_of("x"), slot_of("residual_out")
    of_y = tuple(slot for slot in range(count) if slot != x_slot or not keeps_x)
    aliases = {slot_of("y"): of_y, stream_slot: (x_slot, slot_of("residual"))}
    shared = ((stream_slot, x_slot),) if keeps_x else ()
    params = ParamGradTypes(compute, None, None)
    return _plan(kernel, params, inputs, inputs, results, outputs, aliases, shared)


def _check_forward_results(
    spec: RowForwardSpec, inputs: Specs, given: Specs, geometry: Geometry
) -> None:
    """Check that the call has the results given, and can write them."""
    function, residual, stream = spec.function, inputs["residual"], spec.residual_dtype
    if not spec.center:
        validate.absent(function, "out.mean", given["mean"], "without center there is no mean")
    if spec.streams is None:
        validate.absent(function, "out.residual", given["residual_out"], "there is no residual")
    for argument, slot in zip(spec.output_names, TABLE.forward_results, strict=True):
        shape, axes = geometry.shape_of(slot.kind), geometry.axes_of(slot.kind)
        validate.output(function, argument, given[slot.name], shape, axes)
    validate.agreed_dtype(function, "dtype", spec.dtype, spec.output_names[0], given["y"])
    validate.agreed_dtype(function, "residual_dtype", stream, "residual", residual)
    stream = optional_dtype(residual) or stream
    of_stream = ("the new residual stream", stream, "out.residual", given["residual_out"])
    validate.agreed_dtype(function, *of_stream)


def _forward_kernel(
    spec: RowForwardSpec, inputs: Specs, results: Specs, geometry: Geometry, compute: DType
) -> RowKernel:
    operands = inputs | results
    formula = spec.formula(inputs, present(inputs["x"]).dtype, compute)
    types = ForwardTypes.from_specs(operands, compute, formula=formula)
    width = geometry.rows.width
    numbers = (spec.scale(width), spec.mean_eps(width), spec.weight_offset)
    return row_kernel(types, geometry, operands, numbers)


# --- the backward ---------------------------------------------------------------------------------


def plan_backward(spec: RowBackwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a backward; the specs are those of the table's inputs, then of its results."""
    function, count = spec.function, len(TABLE.backward_inputs)
    inputs = named(TABLE.backward_inputs, specs[:count])
    given = named(TABLE.backward_results, specs[count:])
    x = present(inputs["x"])
    geometry = row_geometry(function, x, spec.axis, spec.groups)
    spec.check_options(inputs)
    if spec.center and inputs["mean"] is None:
        raise ValueError(
            f"{function}: mean is None, expected the mean that the forward returned, as rows are "
            "centred"
        )
    of_compute_type = [slot for slot in TABLE.backward_inputs if not slot.has_macro]
    for slot in TABLE.backward_inputs:
        if slot not in of_compute_type:
            check_operand(function, slot, inputs[slot.name], geometry)
    _check_gradients(spec, inputs, given, geometry)
    dtypes = spec.result_dtypes(dtypes_of(inputs | given))
    x_dtype = spec.x_dtype or optional_dtype(given["dx"]) or x.dtype
    compute = compute_type(x.dtype, x_dtype)
    for slot in of_compute_type:
        check_operand(function, slot, inputs[slot.name], geometry)
        check_compute(function, slot.argument, inputs[slot.name], compute, _FLOAT64_SOURCE)
    names = (*(slot.argument for slot in TABLE.backward_inputs), *spec.output_names)
    validate.same_device(function, x, zip(names, specs, strict=True))
    if spec.accumulate:
        validate.accumulators(function, dtypes, given)
    new = partial(geometry.new_result, x)
    results, outputs = with_new_outputs(TABLE.backward_results, given, dtypes, new, count)
    reads = _read_inputs(spec, inputs, results)
    kernel = _backward_kernel(spec, reads, results, geometry, x_dtype, compute)
    dweight, dbias = (optional_dtype(results[name]) for name in BackwardTypes.sums())
    params = ParamGradTypes(compute, dweight, dbias, spec.accumulate)
    aliases = {slot: tuple(range(count)) for slot in range(count, count + len(given))}
    shared = _shared_gradients(results, count)
    return _plan(kernel, params, inputs, reads, results, outputs, aliases, shared)


def _check_gradients(
    spec: RowBackwardSpec, inputs: Specs, given: Specs, geometry: Geometry
) -> None:
    """Check that the call has the gradients given, and can write them."""
    function, x = spec.function, present(inputs["x"])
    for slot in TABLE.backward_results:
        operand, argument = operand_of(slot), f"out.{slot.argument}"
        if operand not in spec.needs or inputs[operand] is None:
            reason = "its operand is absent or not in needs"
            validate.absent(function, argument, given[slot.name], reason)
        shape, axes = geometry.shape_of(slot.kind), geometry.axes_of(slot.kind)
        validate.output(function, argument, given[slot.name], shape, axes)
    validate.agreed_dtype(function, "x_dtype", spec.x_dtype, "out.dx", given["dx"])
    validate.agreed_dtype(function, "x", x.dtype, "out.dresidual", given["dresidual"])


def _shared_gradients(results: Specs, first: int) -> tuple[tuple[int, int], ...]:
    """Have one of dx and dresidual stand for both, where only it was written."""
    names = [*results]
    dx, dresidual = (first + names.index(name) for name in ("dx", "dresidual"))
    if results["dx"] is None:
        return ((dx, dresidual),)
    return ((dresidual, dx),) if results["dresidual"] is None else ()


def _read_inputs(spec: RowBackwardSpec, inputs: Specs, results: Specs) -> Specs:
    """Return the inputs that the kernels read; the others are None.

    dbias needs dy and a post-gate; dweight also x, rstd, the mean and the gate. An input that is
    not listed here is read if r is.
    """
    post_gate, dgate = spec.gate_position == "post", results["dgate"] is not None
    of_x = results["dx"] is not None or results["dresidual"] is not None
    needs_n = post_gate and dgate
    needs_dp = of_x or (dgate and not post_gate)
    needs_r = needs_dp or needs_n or results["dweight"] is not None
    is_read = {
        "dy": True,
        "mean": needs_r and spec.center,
        "dresidual_out": of_x,
        "gate": needs_r or post_gate,
        "weight": needs_dp or needs_n,
        "bias": needs_n,
    }
    return {name: one if is_read.get(name, needs_r) else None for name, one in inputs.items()}


def _backward_kernel(
    spec: RowBackwardSpec,
    reads: Specs,
    results: Specs,
    geometry: Geometry,
    x_dtype: DType,
    compute: DType,
) -> RowKernel:
    formula = spec.formula(reads, x_dtype, compute)
    if results["dweight"] is None and (results["dgate"] is None or formula.pre_gate):
        formula = formula._replace(rounded=None)  # only dweight and a post-gate's dgate use n
    formula = formula._replace(center=spec.center and reads["mean"] is not None)
    operands = reads | results
    types = BackwardTypes.from_specs(operands, compute, formula=formula)
    numbers = (spec.scale(geometry.rows.width), spec.weight_offset)
    return row_kernel(types, geometry, operands, numbers)


# --- both -----------------------------------------------------------------------------------------


def _plan(
    kernel: RowKernel,
    params: ParamGradTypes,
    inputs: Specs,
    reads: Specs,
    results: Specs,
    outputs: tuple[OutputSpec, ...],
    aliases: Aliases,
    shared: tuple[tuple[int, int], ...],
) -> Plan:
    geometry = kernel.geometry
    copies = [
        InputCopy(number)
        for number, slot in enumerate(kernel.types.inputs)
        if (spec := reads[slot.name]) is not None
        and geometry.axes_of(slot.kind).layout(spec) is None
    ]
    return Plan(
        specs=(*inputs.values(), *results.values()),
        outputs=outputs,
        copies=tuple(copies),
        aliases=aliases,
        shared=shared,
        lower=partial(lower, kernel, params),
        workspace_bound=partial(workspace_bound, kernel.types.compute, geometry, params.outputs),
        is_empty=not any(results.values()) or not (geometry.rows.rows or params.outputs),
    )


# --- the OpDefs -----------------------------------------------------------------------------------


ROW_FORWARD = OpDef(
    name="row_forward",
    input_slots=TABLE.forward_inputs,
    result_slots=TABLE.forward_results,
    spec_type=RowForwardSpec,
    parse=parse_forward,
    plan=plan_forward,
    reference=forward_by_reference,
)
ROW_BACKWARD = OpDef(
    name="row_backward",
    input_slots=TABLE.backward_inputs,
    result_slots=TABLE.backward_results,
    spec_type=RowBackwardSpec,
    parse=parse_backward,
    plan=plan_backward,
    reference=backward_by_reference,
)
