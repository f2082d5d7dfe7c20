# SPDX-License-Identifier: MIT
"""Plans of the row norms: their operands checked, their outputs, and the launches of a device."""

from __future__ import annotations

from functools import partial

from cunorm._core import validate
from cunorm._core.caps import MOST_SMS, Caps, CpuCaps
from cunorm._core.dtypes import FLOAT32, FLOAT64, DType
from cunorm._core.operands import PARAMETERS, SUMS, Specs, dtypes_of, present, with_new_outputs
from cunorm._core.param_grad import ParamGradTypes, param_grad_call
from cunorm._core.plan import Alignments, InputCopy, KernelCall, Lowered, Plan
from cunorm._core.tensor import WHOLE, OptionalSpecs, TensorSpec, contiguous, optional_dtype
from cunorm._row_norm import cpu, cuda, kernels
from cunorm._row_norm.geometry import Geometry, check_operand, check_statistic, geometry
from cunorm._row_norm.kernels import RowKernel
from cunorm._row_norm.spec import RowBackwardSpec, RowForwardSpec
from cunorm.results import NormForward, NormGrads

FORWARD_INPUTS = ("x", "residual", "gate", "weight", "bias")
BACKWARD_INPUTS = ("dy", "x", "rstd", "mean", "d_residual", "gate", "weight", "bias")
_STATISTICS = ("mean", "rstd")
_OPERANDS = ("x", "weight", "bias", "gate", "x")  # whose gradients the fields of NormGrads are


def plan_forward(spec: RowForwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a forward; the specs are those of FORWARD_INPUTS, then of NormForward's fields."""
    function, count = spec.function, len(FORWARD_INPUTS)
    inputs = dict(zip(FORWARD_INPUTS, specs, strict=False))
    given = dict(zip(NormForward._fields, specs[count:], strict=True))
    x = present(inputs["x"])
    where = geometry(function, x, spec.axis, spec.groups)
    _check_inputs(function, inputs, where)
    _check_forward_outputs(spec, where, given)
    compute, wanted = _forward_outputs(spec, inputs, given, where)
    for name in _STATISTICS:
        check_statistic(function, f"out.{name}", given[name], where, compute)
    names = (*FORWARD_INPUTS, *spec.output_names)
    validate.same_device(function, x, zip(names, specs, strict=True))
    results, outputs = with_new_outputs(given, wanted, count)
    kernel = _forward_kernel(spec, inputs, results, where, compute)
    keeps_x = spec.has_stream and results["residual"] is None
    over_y = tuple(range(1 if keeps_x else 0, count))
    return Plan(
        specs=(*inputs.values(), *results.values()),
        outputs=outputs,
        copies=_copies(inputs, where),
        # The stream is written while gate, weight and bias are still to be read. An x that is
        # returned as the stream must stay; where the stream is written, x is not read again.
        aliases={count: over_y, count + 1: (0, 1)},
        shared=((count + 1, 0),) if keeps_x else (),
        lower=partial(_lower_forward, kernel),
        workspace_bound=lambda caps: 0,
        is_empty=not where.rows.rows,
    )


def _check_forward_outputs(spec: RowForwardSpec, where: Geometry, given: Specs) -> None:
    """Check that the call has the outputs given, and can write them."""
    function = spec.function
    if not spec.center:
        validate.absent(function, "out.mean", given["mean"], "without center there is no mean")
    if spec.streams is None:
        validate.absent(function, "out.residual", given["residual"], "there is no residual")
    rows, statistics = (where.shape, where.row_axes), (where.statistic_shape, WHOLE)
    for argument, (name, output) in zip(spec.output_names, given.items(), strict=True):
        expected = statistics if name in _STATISTICS else rows
        validate.output(function, argument, output, *expected)


def _forward_outputs(
    spec: RowForwardSpec, inputs: Specs, given: Specs, where: Geometry
) -> tuple[DType, dict[str, TensorSpec]]:
    """Return the compute type, and the specs of all outputs that are written.

    The dtype of an output is that of a given array, else of the spec, else of its input.
    """
    function, x, y, weight = spec.function, present(inputs["x"]), given["y"], inputs["weight"]
    residual, out_stream, stream = inputs["residual"], given["residual"], spec.residual_dtype
    validate.agreed_dtype(function, "dtype", spec.dtype, spec.output_names[0], y)
    validate.agreed_dtype(function, "residual_dtype", stream, "residual", residual)
    stream = optional_dtype(residual) or stream
    validate.agreed_dtype(function, "the new residual stream", stream, "out.residual", out_stream)
    stream = optional_dtype(out_stream) or stream
    compute = FLOAT64 if FLOAT64 in (x.dtype, stream) else FLOAT32
    y_dtype = optional_dtype(y) or spec.y_dtype(x.dtype, optional_dtype(weight))
    wanted = {"y": (where.shape, y_dtype)}
    if stream is not None and (residual is not None or stream is not x.dtype):
        wanted["residual"] = (where.shape, stream)
    if spec.saves and spec.center:
        wanted["mean"] = (where.statistic_shape, compute)
    if spec.saves:
        wanted["rstd"] = (where.statistic_shape, compute)
    return compute, {name: contiguous(*one, x.device) for name, one in wanted.items()}


def _forward_kernel(
    spec: RowForwardSpec, inputs: Specs, results: Specs, where: Geometry, compute: DType
) -> RowKernel:
    y, new_residual, mean, rstd = results.values()
    operands = {**inputs, "y": y, "new_residual": new_residual, "mean": mean, "rstd": rstd}
    formula = spec.formula(
        gate=inputs["gate"] is not None,
        weight=inputs["weight"] is not None,
        x_dtype=present(inputs["x"]).dtype,
        compute=compute,
    )
    dtypes = dtypes_of(operands, (*kernels.FORWARD_ROWS, *PARAMETERS))
    types = kernels.ForwardTypes(compute=compute, formula=formula, **dtypes)
    width = where.rows.width
    numbers = (spec.scale(width), spec.mean_eps(width), spec.weight_offset)
    return kernels.row_kernel(types, where, operands, numbers)


def _lower_forward(kernel: RowKernel, caps: Caps, alignments: Alignments) -> Lowered:
    types, rows = kernel.types, kernel.where.rows
    assert isinstance(types, kernels.ForwardTypes)
    parts = 0
    if isinstance(caps, CpuCaps):
        launch, parts = cpu.cpu_forward(types, rows, caps), cpu.cpu_forward_parts(rows)
        launch = cpu.with_shared_rows(launch, rows) if parts else launch
    else:
        launch = cuda.cuda_forward(types, rows, kernel.access(alignments), caps)
    calls = [KernelCall(launch, kernel.args(), rows.elements, parts)]
    return Lowered((launch,), lambda: calls, workspace=0)


# --- the backward ---------------------------------------------------------------------------------


def plan_backward(spec: RowBackwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a backward; the specs are those of BACKWARD_INPUTS, then of NormGrads' fields."""
    function, count = spec.function, len(BACKWARD_INPUTS)
    inputs = dict(zip(BACKWARD_INPUTS, specs, strict=False))
    given = dict(zip(NormGrads._fields, specs[count:], strict=True))
    x = present(inputs["x"])
    where = geometry(function, x, spec.axis, spec.groups)
    if spec.center and inputs["mean"] is None:
        raise ValueError(
            f"{function}: mean is None, expected the mean that the forward returned, "
            "as center is True"
        )
    _check_inputs(function, inputs, where)
    _check_gradients(spec, inputs, where, given)
    x_dtype = spec.x_dtype or optional_dtype(given["dx"]) or x.dtype
    compute = FLOAT64 if FLOAT64 in (x.dtype, x_dtype) else FLOAT32
    for name in _STATISTICS:
        check_statistic(function, name, inputs[name], where, compute)
    names = (*BACKWARD_INPUTS, *spec.output_names)
    validate.same_device(function, x, zip(names, specs, strict=True))
    wanted = _gradients(spec, inputs, given, where, x_dtype)
    if spec.accumulate:
        validate.accumulators(function, wanted, given)
    results, outputs = with_new_outputs(given, wanted, count)
    reads = _read_inputs(spec, inputs, results)
    kernel = _backward_kernel(spec, reads, results, where, x_dtype, compute)
    params = ParamGradTypes(compute, **dtypes_of(results, SUMS), accumulate=spec.accumulate)
    return Plan(
        specs=(*inputs.values(), *results.values()),
        outputs=outputs,
        copies=_copies(reads, where),
        aliases={place: tuple(range(count)) for place in range(count, count + len(given))},
        shared=_shared_gradients(results, count),
        lower=partial(_lower_backward, kernel, params),
        workspace_bound=partial(workspace_bound, compute, where, params.outputs),
        is_empty=not any(results.values()) or not (where.rows.rows or params.outputs),
    )


def _check_gradients(spec: RowBackwardSpec, inputs: Specs, where: Geometry, given: Specs) -> None:
    """Check that the call has the gradients given, and can write them."""
    function = spec.function
    rows, row = (where.shape, where.row_axes), (where.row_shape, WHOLE)
    for (name, gradient), operand in zip(given.items(), _OPERANDS, strict=True):
        if operand not in spec.needs or inputs[operand] is None:
            reason = "its operand is absent or not in needs"
            validate.absent(function, f"out.{name}", gradient, reason)
        expected = row if operand in PARAMETERS else rows
        validate.output(function, f"out.{name}", gradient, *expected)
    validate.agreed_dtype(function, "x_dtype", spec.x_dtype, "out.dx", given["dx"])
    x = present(inputs["x"])
    validate.agreed_dtype(function, "x", x.dtype, "out.dresidual", given["dresidual"])


def _gradients(
    spec: RowBackwardSpec, inputs: Specs, given: Specs, where: Geometry, x_dtype: DType
) -> dict[str, TensorSpec]:
    """Return the specs of all gradients that are written; dresidual has x's dtype."""
    wanted, x = {}, present(inputs["x"])
    if "x" in spec.needs and (x_dtype is not x.dtype or given["dresidual"] is None):
        wanted["dx"] = contiguous(where.shape, x_dtype, x.device)
    if "x" in spec.needs and x_dtype is not x.dtype:
        wanted["dresidual"] = contiguous(where.shape, x.dtype, x.device)
    shapes = {"weight": where.row_shape, "bias": where.row_shape, "gate": where.shape}
    for name, shape in shapes.items():
        operand = inputs[name]
        if name in spec.needs and operand is not None:
            wanted[f"d{name}"] = contiguous(shape, operand.dtype, x.device)
    return wanted


def _shared_gradients(results: Specs, first: int) -> tuple[tuple[int, int], ...]:
    """Have one of dx and dresidual stand for both, where only it was written."""
    dx, dresidual = (first + NormGrads._fields.index(name) for name in ("dx", "dresidual"))
    if results["dx"] is None:
        return ((dx, dresidual),)
    return ((dresidual, dx),) if results["dresidual"] is None else ()


def _read_inputs(spec: RowBackwardSpec, inputs: Specs, results: Specs) -> Specs:
    """Return the inputs that the kernels read; the others are None.

    ::

        dbias                   dy                    and gate, where that is applied to n
        dweight                 the same, and what n is made of before weight
        dgate, of a post-gate   the same, and weight and bias
        all else                all but bias
    """
    wanted = {name for name, gradient in results.items() if gradient is not None}
    post_gate = spec.gate_position == "post"
    of_x = bool(wanted & {"dx", "dresidual"})
    needs_n = post_gate and "dgate" in wanted
    needs_dp = of_x or ("dgate" in wanted and not post_gate)
    needs_r = needs_dp or needs_n or "dweight" in wanted
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
    formula = spec.formula(
        gate=reads["gate"] is not None,
        weight=reads["weight"] is not None,
        x_dtype=x_dtype,
        compute=compute,
    )
    if results["dweight"] is None and (results["dgate"] is None or formula.pre_gate):
        formula = formula._replace(rounded=None)  # nothing but those has n
    formula = formula._replace(center=spec.center and reads["mean"] is not None)
    operands = {**reads, **results}
    dtypes = dtypes_of(operands, (*kernels.BACKWARD_ROWS, *PARAMETERS))
    dtypes |= {name: results[name] is not None for name in SUMS}
    types = kernels.BackwardTypes(compute=compute, formula=formula, **dtypes)
    numbers = (spec.scale(where.rows.width), spec.weight_offset)
    return kernels.row_kernel(types, where, operands, numbers)


def _lower_backward(
    kernel: RowKernel, params: ParamGradTypes, caps: Caps, alignments: Alignments
) -> Lowered:
    types, rows = kernel.types, kernel.where.rows
    assert isinstance(types, kernels.BackwardTypes)
    shared = 0
    if isinstance(caps, CpuCaps):
        launch = cpu.cpu_backward(types, rows.not_empty(), caps)
        shared = cpu.cpu_backward_parts(rows)
        launch = cpu.with_shared_rows(launch, rows) if shared else launch
    else:
        launch = cuda.cuda_backward(types, rows.not_empty(), kernel.access(alignments), caps)
    calls: list[KernelCall] = []
    sums = kernel.sums(launch)
    if rows.rows:
        calls.append(KernelCall(launch, kernel.args(sums), rows.elements, shared))
    if params.outputs:
        parts = launch.parts if rows.rows else 0
        sizes = (parts, launch.sums_pitch, rows.row_width)
        calls.append(param_grad_call(params, kernel.arrays, sums, *sizes, caps))
    size = params.outputs * launch.sums_size * types.compute.itemsize
    return Lowered(tuple(call.launch for call in calls), lambda: calls, size)


def workspace_bound(compute: DType, where: Geometry, parameters: int, caps: Caps | None) -> int:
    """Return the most bytes of the partial sums for a number of parameters."""
    rows = where.rows.not_empty()
    if isinstance(caps, CpuCaps):
        parts = cpu.cpu_parts(rows.rows)
    else:
        sm_count = MOST_SMS if caps is None else caps.sm_count
        parts = min(rows.rows, cuda.cuda_parts(rows, sm_count))
    return parameters * parts * rows.sums_pitch(twice=True) * compute.itemsize


# --- both -----------------------------------------------------------------------------------------


def _check_inputs(function: str, inputs: Specs, where: Geometry) -> None:
    for name, operand in inputs.items():
        if name not in _STATISTICS:
            check_operand(function, name, operand, where)


def _copies(inputs: Specs, where: Geometry) -> tuple[InputCopy, ...]:
    """Return the inputs whose strides the kernels cannot follow."""
    whole = (*PARAMETERS, *_STATISTICS)
    return tuple(
        InputCopy(place)
        for place, (name, spec) in enumerate(inputs.items())
        if spec is not None and (WHOLE if name in whole else where.row_axes).layout(spec) is None
    )
