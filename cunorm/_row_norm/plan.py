# SPDX-License-Identifier: MIT
"""The row norms' OpDefs. Their plans: operands checked, outputs, and the launches of a device."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from cunorm._core import validate
from cunorm._core.caps import MAX_SMS, Caps, CpuCaps
from cunorm._core.dtypes import FLOAT32, FLOAT64, DType, numpy_dtype
from cunorm._core.operands import STATISTICS, SUMS, Specs, check_compute, present, with_new_outputs
from cunorm._core.param_grad import ParamGradTypes, param_grad_call
from cunorm._core.plan import Alignments, InputCopy, KernelCall, Lowered, OpDef, OutputSpec, Plan
from cunorm._core.tensor import OptionalSpecs, TensorSpec, contiguous, optional_dtype
from cunorm._row_norm import launches
from cunorm._row_norm.geometry import Geometry, check_operand, geometry
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes, RowKernel, row_kernel
from cunorm._row_norm.spec import RowBackwardSpec, RowForwardSpec, parse_backward, parse_forward
from cunorm.reference import normalize_backward, normalize_forward
from cunorm.reference.rows import store
from cunorm.results import NormForward, NormGrads

FORWARD_INPUTS = ("x", "residual", "gate", "weight", "bias")
BACKWARD_INPUTS = ("dy", "x", "rstd", "mean", "d_residual", "gate", "weight", "bias")
OPERANDS = ("x", "weight", "bias", "gate", "x")  # whose gradients the fields of NormGrads are
_WIDE = "x, its residual stream or x_dtype"  # of which one in float64 makes the statistics float64


def plan_forward(spec: RowForwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a forward; the specs are those of FORWARD_INPUTS, then of NormForward's fields."""
    function, count = spec.function, len(FORWARD_INPUTS)
    inputs = dict(zip(FORWARD_INPUTS, specs[:count], strict=True))
    given = dict(zip(NormForward._fields, specs[count:], strict=True))
    x = present(inputs["x"])
    where = geometry(function, x, spec.axis, spec.groups)
    spec.check_gate(inputs["gate"])
    for name, operand in inputs.items():
        check_operand(function, name, operand, where)
    compute, wanted = _forward_outputs(spec, inputs, given, where)
    for name in STATISTICS:
        check_compute(function, f"out.{name}", given[name], compute, _WIDE)
    names = (*FORWARD_INPUTS, *spec.output_names)
    validate.same_device(function, x, zip(names, specs, strict=True))
    results, outputs = with_new_outputs(given, wanted, count)
    kernel = _forward_kernel(spec, inputs, results, where, compute)
    keeps_x = spec.has_stream and results["residual"] is None
    # The stream is written while gate, weight and bias are still to be read. An x that is returned
    # as the stream must stay; where the stream is written, x is not read again.
    aliases = {count: tuple(range(1 if keeps_x else 0, count)), count + 1: (0, 1)}
    shared = ((count + 1, 0),) if keeps_x else ()
    params = ParamGradTypes(compute, None, None)
    return _plan(kernel, params, inputs, inputs, results, outputs, aliases, shared)


def _forward_outputs(
    spec: RowForwardSpec, inputs: Specs, given: Specs, where: Geometry
) -> tuple[DType, dict[str, TensorSpec]]:
    """Return the compute type, and the specs of all outputs that are written.

    Check that the call has the outputs given, and can write them. The dtype of an output is that of
    a given array, else of the spec, else of its input.
    """
    function, x, y, weight = spec.function, present(inputs["x"]), given["y"], inputs["weight"]
    residual, out_stream, stream = inputs["residual"], given["residual"], spec.residual_dtype
    if not spec.center:
        validate.absent(function, "out.mean", given["mean"], "without center there is no mean")
    if spec.streams is None:
        validate.absent(function, "out.residual", out_stream, "there is no residual")
    for argument, (name, output) in zip(spec.output_names, given.items(), strict=True):
        validate.output(function, argument, output, where.shape_of(name), where.axes_of(name))
    validate.agreed_dtype(function, "dtype", spec.dtype, spec.output_names[0], y)
    validate.agreed_dtype(function, "residual_dtype", stream, "residual", residual)
    stream = optional_dtype(residual) or stream
    validate.agreed_dtype(function, "the new residual stream", stream, "out.residual", out_stream)
    stream = optional_dtype(out_stream) or stream
    compute = FLOAT64 if FLOAT64 in (x.dtype, stream) else FLOAT32
    wanted = {"y": optional_dtype(y) or spec.y_dtype(x.dtype, optional_dtype(weight))}
    if stream is not None and (residual is not None or stream is not x.dtype):
        wanted["residual"] = stream
    if spec.saves and spec.center:
        wanted["mean"] = compute
    if spec.saves:
        wanted["rstd"] = compute
    new = {name: (where.shape_of(name), dtype) for name, dtype in wanted.items()}
    return compute, {name: contiguous(*one, x.device) for name, one in new.items()}


def _forward_kernel(
    spec: RowForwardSpec, inputs: Specs, results: Specs, where: Geometry, compute: DType
) -> RowKernel:
    y, new_residual, mean, rstd = results.values()
    operands = {**inputs, "y": y, "new_residual": new_residual, "mean": mean, "rstd": rstd}
    formula = spec.formula(inputs, present(inputs["x"]).dtype, compute)
    types = ForwardTypes.of(operands, compute, formula=formula)
    width = where.rows.width
    numbers = (spec.scale(width), spec.mean_eps(width), spec.weight_offset)
    return row_kernel(types, where, operands, numbers)


# --- the backward ---------------------------------------------------------------------------------


def plan_backward(spec: RowBackwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a backward; the specs are those of BACKWARD_INPUTS, then of NormGrads' fields."""
    function, count = spec.function, len(BACKWARD_INPUTS)
    inputs = dict(zip(BACKWARD_INPUTS, specs[:count], strict=True))
    given = dict(zip(NormGrads._fields, specs[count:], strict=True))
    x = present(inputs["x"])
    where = geometry(function, x, spec.axis, spec.groups)
    spec.check_gate(inputs["gate"])
    if spec.center and inputs["mean"] is None:
        raise ValueError(
            f"{function}: mean is None, expected the mean that the forward returned, as rows are "
            "centred"
        )
    for name, operand in inputs.items():
        if name not in STATISTICS:
            check_operand(function, name, operand, where)
    x_dtype, wanted = _gradients(spec, inputs, given, where)
    compute = FLOAT64 if FLOAT64 in (x.dtype, x_dtype) else FLOAT32
    for name in STATISTICS:
        check_operand(function, name, inputs[name], where)
        check_compute(function, name, inputs[name], compute, _WIDE)
    names = (*BACKWARD_INPUTS, *spec.output_names)
    validate.same_device(function, x, zip(names, specs, strict=True))
    if spec.accumulate:
        validate.accumulators(function, wanted, given)
    results, outputs = with_new_outputs(given, wanted, count)
    reads = _read_inputs(spec, inputs, results)
    kernel = _backward_kernel(spec, reads, results, where, x_dtype, compute)
    dweight, dbias = (optional_dtype(results[name]) for name in SUMS)
    params = ParamGradTypes(compute, dweight, dbias, spec.accumulate)
    aliases = {place: tuple(range(count)) for place in range(count, count + len(given))}
    shared = _shared_gradients(results, count)
    return _plan(kernel, params, inputs, reads, results, outputs, aliases, shared)


def _gradients(
    spec: RowBackwardSpec, inputs: Specs, given: Specs, where: Geometry
) -> tuple[DType, dict[str, TensorSpec]]:
    """Return the dtype of dx, and the specs of all gradients that are written.

    Check that the call has the gradients given, and can write them. dresidual has x's dtype.
    """
    function, x = spec.function, present(inputs["x"])
    for (name, gradient), operand in zip(given.items(), OPERANDS, strict=True):
        if operand not in spec.needs or inputs[operand] is None:
            reason = "its operand is absent or not in needs"
            validate.absent(function, f"out.{name}", gradient, reason)
        shape, axes = where.shape_of(operand), where.axes_of(operand)
        validate.output(function, f"out.{name}", gradient, shape, axes)
    validate.agreed_dtype(function, "x_dtype", spec.x_dtype, "out.dx", given["dx"])
    validate.agreed_dtype(function, "x", x.dtype, "out.dresidual", given["dresidual"])
    x_dtype, wanted = spec.x_dtype or optional_dtype(given["dx"]) or x.dtype, {}
    if "x" in spec.needs and (x_dtype is not x.dtype or given["dresidual"] is None):
        wanted["dx"] = contiguous(where.shape, x_dtype, x.device)
    if "x" in spec.needs and x_dtype is not x.dtype:
        wanted["dresidual"] = contiguous(where.shape, x.dtype, x.device)
    for name in ("weight", "bias", "gate"):
        parameter = inputs[name]
        if name in spec.needs and parameter is not None:
            wanted[f"d{name}"] = contiguous(where.shape_of(name), parameter.dtype, x.device)
    return x_dtype, wanted


def _shared_gradients(results: Specs, first: int) -> tuple[tuple[int, int], ...]:
    """Have one of dx and dresidual stand for both, where only it was written."""
    dx, dresidual = (first + NormGrads._fields.index(name) for name in ("dx", "dresidual"))
    if results["dx"] is None:
        return ((dx, dresidual),)
    return ((dresidual, dx),) if results["dresidual"] is None else ()


def _read_inputs(spec: RowBackwardSpec, inputs: Specs, results: Specs) -> Specs:
    """Return the inputs that the kernels read; the others are None.

    For dbias alone those are dy and a post-gate, for dweight also what r is made of.
    """
    post_gate, dgate = spec.gate_position == "post", results["dgate"] is not None
    of_x = results["dx"] is not None or results["dresidual"] is not None
    needs_n = post_gate and dgate
    needs_dp = of_x or (dgate and not post_gate)
    needs_r = needs_dp or needs_n or results["dweight"] is not None
    is_read = {
        "dy": True,
        "x": needs_r,
        "rstd": needs_r,
        "mean": needs_r and spec.center,
        "d_residual": of_x,
        "gate": needs_r or post_gate,
        "weight": needs_dp or needs_n,
        "bias": needs_n,
    }
    return {name: inputs[name] if is_read[name] else None for name in BACKWARD_INPUTS}


def _backward_kernel(
    spec: RowBackwardSpec,
    reads: Specs,
    results: Specs,
    where: Geometry,
    x_dtype: DType,
    compute: DType,
) -> RowKernel:
    formula = spec.formula(reads, x_dtype, compute)
    if results["dweight"] is None and (results["dgate"] is None or formula.pre_gate):
        formula = formula._replace(rounded=None)  # nothing but those has n
    formula = formula._replace(center=spec.center and reads["mean"] is not None)
    operands = {**reads, **results}
    types = BackwardTypes.of(operands, compute, formula=formula)
    numbers = (spec.scale(where.rows.width), spec.weight_offset)
    return row_kernel(types, where, operands, numbers)


def workspace_bound(compute: DType, where: Geometry, parameters: int, caps: Caps | None) -> int:
    """Return the most bytes of the partial sums for a number of parameters."""
    rows = where.rows.not_empty()
    if isinstance(caps, CpuCaps):
        parts = launches.cpu_sums(rows)
    else:
        sm_count = MAX_SMS if caps is None else caps.sm_count
        parts = min(rows.rows, launches.cuda_parts(rows, sm_count))
    return parameters * parts * rows.sums_pitch(twice=True) * compute.itemsize


# --- both -----------------------------------------------------------------------------------------


def _plan(
    kernel: RowKernel,
    params: ParamGradTypes,
    inputs: Specs,
    reads: Specs,
    results: Specs,
    outputs: tuple[OutputSpec, ...],
    aliases: dict[int, tuple[int, ...]],
    shared: tuple[tuple[int, int], ...],
) -> Plan:
    where = kernel.where
    copies = [
        InputCopy(place)
        for place, (name, spec) in enumerate(reads.items())
        if spec is not None and where.axes_of(name).layout(spec) is None
    ]
    return Plan(
        specs=(*inputs.values(), *results.values()),
        outputs=outputs,
        copies=tuple(copies),
        aliases=aliases,
        shared=shared,
        lower=partial(_lower, kernel, params),
        workspace_bound=partial(workspace_bound, kernel.types.compute, where, params.outputs),
        is_empty=not any(results.values()) or not (where.rows.rows or params.outputs),
    )


def _lower(
    kernel: RowKernel, params: ParamGradTypes, caps: Caps, alignments: Alignments
) -> Lowered:
    types, rows, shared = kernel.types, kernel.where.rows, 0
    if isinstance(caps, CpuCaps):
        launch, shared = launches.cpu_launch(types, rows, caps)
    elif isinstance(types, ForwardTypes):
        launch = launches.cuda_forward(types, rows, kernel.access(alignments), caps, kernel.axes)
    else:
        access, axes = kernel.access(alignments), kernel.axes
        launch = launches.cuda_backward(types, rows.not_empty(), access, caps, axes)
    calls: list[KernelCall] = []
    if rows.rows:
        calls.append(KernelCall(launch, kernel.args(launch), rows.elements, shared))
    if params.outputs:
        parts = launch.parts if rows.rows else 0
        sizes = (parts, launch.sums_pitch, rows.row_width)
        calls.append(param_grad_call(params, kernel.arrays, kernel.sums(launch), *sizes, caps))
    size = params.outputs * launch.sums_size * types.compute.itemsize
    return Lowered(tuple(call.launch for call in calls), lambda: calls, size)


# --- the OpDefs -----------------------------------------------------------------------------------


def _forward_by_reference(spec: RowForwardSpec, arrays: Sequence[Any]) -> None:
    x, residual, gate, weight, bias, y, new_residual, mean, rstd = arrays
    exact = normalize_forward(
        *(x, weight, bias),
        residual=residual,
        residual_dtype=None if new_residual is None else new_residual.dtype,
        gate=gate,
        eps=spec.mean_eps(prod(x.shape[spec.axis :]) // spec.groups),
        **spec.options(),
    )
    store(new_residual, exact.residual)  # first, as y may be exactly x or residual
    store(y, exact.y)
    store(mean, exact.mean)
    store(rstd, exact.rstd)


def _backward_by_reference(spec: RowBackwardSpec, arrays: Sequence[Any]) -> None:
    dy, x, rstd, mean, d_residual, gate, weight, bias, *outputs = arrays
    of = zip(OPERANDS, outputs, strict=True)
    exact = normalize_backward(
        *(dy, x, weight, bias),
        rstd=rstd,
        mean=mean,
        d_residual=d_residual,
        gate=gate,
        x_dtype=None if spec.x_dtype is None else numpy_dtype(spec.x_dtype),
        needs={operand for operand, output in of if output is not None},
        **spec.options(),
    )
    for name, output, gradient in zip(NormGrads._fields, outputs, exact, strict=True):
        store(output, gradient, added=spec.accumulate and name in SUMS)


ROW_FORWARD = OpDef(
    name="row_forward",
    inputs=FORWARD_INPUTS,
    outputs=NormForward._fields,
    required=1,
    x=0,
    spec_type=RowForwardSpec,
    parse=parse_forward,
    plan=plan_forward,
    reference=_forward_by_reference,
)
ROW_BACKWARD = OpDef(
    name="row_backward",
    inputs=BACKWARD_INPUTS,
    outputs=NormGrads._fields,
    required=3,
    x=1,
    spec_type=RowBackwardSpec,
    parse=parse_backward,
    plan=plan_backward,
    reference=_backward_by_reference,
    sums=SUMS,
)
