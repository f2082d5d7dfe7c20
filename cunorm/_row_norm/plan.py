# SPDX-License-Identifier: MIT
"""Plans of the row norms: their operands checked, their outputs, and the launches of a device."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from cunorm._core import validate
from cunorm._core.caps import MOST_SMS, Caps, CpuCaps
from cunorm._core.dtypes import FLOAT32, FLOAT64, DType, promoted
from cunorm._core.param_grad import ParamGradTypes, param_grad_call
from cunorm._core.plan import Alignments, InputCopy, KernelCall, Lowered, OutputSpec, Plan
from cunorm._core.rows import WHOLE
from cunorm._core.tensor import OptionalSpecs, TensorSpec, contiguous, optional_dtype
from cunorm._row_norm import cpu, cuda
from cunorm._row_norm.geometry import (
    Geometry,
    check_parameter,
    check_row_operand,
    check_statistic,
    geometry,
)
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes, RowKernel
from cunorm._row_norm.spec import RowBackwardSpec, RowForwardSpec
from cunorm.results import NormForward, NormGrads

Specs = dict[str, TensorSpec | None]
Shapes = dict[str, tuple[tuple[int, ...], DType]]

FORWARD_INPUTS = ("x", "residual", "gate", "weight", "bias")
BACKWARD_INPUTS = ("dy", "x", "rstd", "mean", "d_residual", "gate", "weight", "bias")
_ROW_INPUTS = ("x", "residual", "gate", "dy", "d_residual")
_OPERANDS = ("x", "weight", "bias", "gate", "x")  # whose gradients the fields of NormGrads are


def plan_forward(spec: RowForwardSpec, specs: OptionalSpecs) -> Plan:
    """Plan a forward; the specs are those of FORWARD_INPUTS, then of NormForward's fields."""
    function, count = spec.function, len(FORWARD_INPUTS)
    inputs = dict(zip(FORWARD_INPUTS, specs, strict=False))
    given = dict(zip(NormForward._fields, specs[count:], strict=True))
    x = specs[0]
    assert x is not None
    where = geometry(function, x, spec.axis, spec.groups)
    for name in ("residual", "gate"):
        check_row_operand(function, name, inputs[name], where)
    for name in ("weight", "bias"):
        check_parameter(function, name, inputs[name], where)
    _check_forward_outputs(spec, where, given)
    dtypes = _forward_dtypes(spec, inputs, given)
    for name in ("mean", "rstd"):
        check_statistic(function, f"out.{name}", given[name], where, dtypes.compute)
    validate.same_device(
        function, x, zip((*FORWARD_INPUTS, *spec.output_names), specs, strict=True)
    )
    outputs = _new_outputs(_forward_outputs(spec, inputs, where, dtypes), given, x)
    results = {**given, **outputs}
    kernel = _forward_kernel(spec, inputs, results, where, dtypes.compute)
    keeps_x = spec.has_stream and results["residual"] is None
    over_y = tuple(range(1 if keeps_x else 0, count))
    return Plan(
        specs=(*inputs.values(), *results.values()),
        outputs=_placed(outputs, NormForward._fields, count),
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
    """Check that a call has such outputs, and that they can be written there."""
    function = spec.function
    if not spec.center:
        validate.absent(function, "out.mean", given["mean"], "without center there is no mean")
    if spec.streams is None:
        validate.absent(function, "out.residual", given["residual"], "there is no residual")
    rows, statistics = (where.shape, where.row_axes), (where.statistic_shape, WHOLE)
    for argument, (name, output) in zip(spec.output_names, given.items(), strict=True):
        expected = statistics if name in ("mean", "rstd") else rows
        validate.output(function, argument, output, *expected)


class _ForwardDtypes(NamedTuple):
    compute: DType
    y: DType
    stream: DType | None  # of the new residual stream, None where there is none


def _forward_dtypes(spec: RowForwardSpec, inputs: Specs, given: Specs) -> _ForwardDtypes:
    """Return every output's dtype: that of a given array, else of the spec, else of its input."""
    function, y, weight = spec.function, given["y"], inputs["weight"]
    x = _present(inputs["x"]).dtype
    validate.agreed_dtype(function, "dtype", spec.dtype, spec.output_names[0], y)
    stream = spec.residual_dtype
    validate.agreed_dtype(function, "residual_dtype", stream, "residual", inputs["residual"])
    stream = optional_dtype(inputs["residual"]) or stream
    out_stream = given["residual"]
    validate.agreed_dtype(function, "the new residual stream", stream, "out.residual", out_stream)
    stream = optional_dtype(out_stream) or stream
    compute = FLOAT64 if FLOAT64 in (x, stream) else FLOAT32
    default = promoted(x, weight.dtype) if spec.rounds_row and weight is not None else x
    return _ForwardDtypes(compute, optional_dtype(y) or spec.dtype or default, stream)


def _forward_outputs(
    spec: RowForwardSpec, inputs: Specs, where: Geometry, dtypes: _ForwardDtypes
) -> Shapes:
    """Return shape and dtype of every output that is written."""
    compute, y, stream = dtypes
    wanted = {"y": (where.shape, y)}
    x = _present(inputs["x"]).dtype
    if stream is not None and (inputs["residual"] is not None or stream is not x):
        wanted["residual"] = (where.shape, stream)
    if spec.saves and spec.center:
        wanted["mean"] = (where.statistic_shape, compute)
    if spec.saves:
        wanted["rstd"] = (where.statistic_shape, compute)
    return wanted


def _forward_kernel(
    spec: RowForwardSpec, inputs: Specs, results: Specs, where: Geometry, compute: DType
) -> RowKernel:
    x, axes = _present(inputs["x"]), where.row_axes
    operands = {
        **inputs,
        **{name: results[name] for name in ("y", "mean", "rstd")},
        "new_residual": results["residual"],
    }
    types = ForwardTypes(
        compute=compute,
        x=x.dtype,
        y=_present(results["y"]).dtype,
        new_residual=optional_dtype(results["residual"]),
        **{name: optional_dtype(inputs[name]) for name in FORWARD_INPUTS[1:]},
        formula=spec.formula(
            gate=inputs["gate"] is not None,
            weight=inputs["weight"] is not None,
            x_dtype=x.dtype,
            compute=compute,
        ),
    )
    layouts = (
        *(axes.layout_of_input(inputs[name]) for name in ("x", "residual", "gate")),
        *(axes.layout_of_input(results[name]) for name in ("y", "residual")),
    )
    names = (*FORWARD_INPUTS, "y", "new_residual", "mean", "rstd")
    width = where.rows.width
    numbers = (spec.scale(width), spec.mean_eps(width), spec.weight_offset)
    return RowKernel(types, where, layouts, _places(names, operands), numbers)


def _lower_forward(kernel: RowKernel, caps: Caps, alignments: Alignments) -> Lowered:
    types, rows = kernel.types, kernel.where.rows
    assert isinstance(types, ForwardTypes)
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
    x = _present(inputs["x"])
    where = geometry(function, x, spec.axis, spec.groups)
    _check_backward_inputs(spec, inputs, where)
    _check_gradients(spec, inputs, where, given)
    x_dtype = _x_dtype(spec, x.dtype, given)
    compute = FLOAT64 if FLOAT64 in (x.dtype, x_dtype) else FLOAT32
    for name in ("mean", "rstd"):
        check_statistic(function, name, inputs[name], where, compute)
    names = (*BACKWARD_INPUTS, *spec.output_names)
    validate.same_device(function, x, zip(names, specs, strict=True))
    wanted = _gradients(spec, inputs, given, where, x_dtype)
    if spec.accumulate:
        validate.accumulators(function, wanted, given)
    outputs = _new_outputs(wanted, given, x)
    results = {**given, **outputs}
    reads = _read_inputs(spec, inputs, results)
    kernel = _backward_kernel(spec, reads, results, where, x_dtype, compute)
    params = ParamGradTypes(
        *(compute, optional_dtype(results["dweight"]), optional_dtype(results["dbias"])),
        accumulate=spec.accumulate,
    )
    is_empty = not any(results.values()) or not (where.rows.rows or params.outputs)
    return Plan(
        specs=(*inputs.values(), *results.values()),
        outputs=_placed(outputs, NormGrads._fields, count),
        copies=_copies(reads, where),
        aliases={place: tuple(range(count)) for place in range(count, count + len(given))},
        shared=_shared_gradients(results, count),
        lower=partial(_lower_backward, kernel, params),
        workspace_bound=partial(workspace_bound, compute, where, params.outputs),
        is_empty=is_empty,
    )


def _check_backward_inputs(spec: RowBackwardSpec, inputs: Specs, where: Geometry) -> None:
    function = spec.function
    if spec.center and inputs["mean"] is None:
        raise ValueError(
            f"{function}: mean is None, expected the mean that the forward returned, "
            "as center is True"
        )
    for name in ("dy", "d_residual", "gate"):
        check_row_operand(function, name, inputs[name], where)
    for name in ("weight", "bias"):
        check_parameter(function, name, inputs[name], where)


def _check_gradients(spec: RowBackwardSpec, inputs: Specs, where: Geometry, given: Specs) -> None:
    """Check that a call has such gradients, and that they can be written there."""
    rows, row = (where.shape, where.row_axes), (where.row_shape, WHOLE)
    for (name, gradient), operand in zip(given.items(), _OPERANDS, strict=True):
        argument = f"out.{name}"
        if operand not in spec.needs or inputs[operand] is None:
            reason = "its operand is absent or not in needs"
            validate.absent(spec.function, argument, gradient, reason)
        expected = row if operand in ("weight", "bias") else rows
        validate.output(spec.function, argument, gradient, *expected)


def _x_dtype(spec: RowBackwardSpec, stream: DType, given: Specs) -> DType:
    """Return dx's dtype; dresidual has that of x, the stream that was normalised."""
    function, x_dtype, dx = spec.function, spec.x_dtype, given["dx"]
    validate.agreed_dtype(function, "x_dtype", x_dtype, "out.dx", dx)
    validate.agreed_dtype(function, "x", stream, "out.dresidual", given["dresidual"])
    return x_dtype or optional_dtype(dx) or stream


def _gradients(
    spec: RowBackwardSpec, inputs: Specs, given: Specs, where: Geometry, x_dtype: DType
) -> Shapes:
    """Return shape and dtype of every gradient that is written."""
    wanted: Shapes = {}
    stream = _present(inputs["x"]).dtype
    if "x" in spec.needs and (x_dtype is not stream or given["dresidual"] is None):
        wanted["dx"] = (where.shape, x_dtype)
    if "x" in spec.needs and x_dtype is not stream:
        wanted["dresidual"] = (where.shape, stream)
    shapes = {"weight": where.row_shape, "bias": where.row_shape, "gate": where.shape}
    for name, shape in shapes.items():
        operand = inputs[name]
        if name in spec.needs and operand is not None:
            wanted[f"d{name}"] = (shape, operand.dtype)
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
    types = BackwardTypes(
        compute=compute,
        dy=_present(reads["dy"]).dtype,
        **{n: optional_dtype(reads[n]) for n in ("x", "d_residual", "gate", "weight", "bias")},
        **{name: optional_dtype(results[name]) for name in ("dx", "dresidual", "dgate")},
        dweight=results["dweight"] is not None,
        dbias=results["dbias"] is not None,
        formula=formula._replace(center=spec.center and reads["mean"] is not None),
    )
    operands = {**reads, **results}
    axes = where.row_axes
    layouts = tuple(axes.layout_of_input(operands[name]) for name in _BACKWARD_ROW_OPERANDS)
    names = (*BACKWARD_INPUTS, *NormGrads._fields, "workspace")
    numbers = (spec.scale(where.rows.width), spec.weight_offset)
    return RowKernel(types, where, layouts, _places(names, operands), numbers)


_BACKWARD_ROW_OPERANDS = ("dy", "x", "d_residual", "gate", "dx", "dresidual", "dgate")


def _lower_backward(
    kernel: RowKernel, params: ParamGradTypes, caps: Caps, alignments: Alignments
) -> Lowered:
    types, rows = kernel.types, kernel.where.rows
    assert isinstance(types, BackwardTypes)
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
    """Return the bytes that partial sums for so many parameters take at most."""
    rows = where.rows.not_empty()
    if isinstance(caps, CpuCaps):
        parts = cpu.cpu_parts(rows.rows)
    else:
        sm_count = MOST_SMS if caps is None else caps.sm_count
        parts = min(rows.rows, cuda.cuda_parts(rows, sm_count))
    return parameters * parts * rows.sums_pitch(twice=True) * compute.itemsize


# --- both -----------------------------------------------------------------------------------------


def _present(spec: TensorSpec | None) -> TensorSpec:
    assert spec is not None
    return spec


def _new_outputs(wanted: Shapes, given: Specs, x: TensorSpec) -> dict[str, TensorSpec]:
    """Return the specs of the outputs to allocate."""
    return {
        name: contiguous(shape, dtype, x.device)
        for name, (shape, dtype) in wanted.items()
        if given[name] is None
    }


def _placed(
    outputs: dict[str, TensorSpec], fields: tuple[str, ...], first: int
) -> tuple[OutputSpec, ...]:
    return tuple(OutputSpec(first + fields.index(name), spec) for name, spec in outputs.items())


def _copies(inputs: Specs, where: Geometry) -> tuple[InputCopy, ...]:
    """Return the inputs whose strides the kernels cannot follow."""
    return tuple(
        InputCopy(place)
        for place, (name, spec) in enumerate(inputs.items())
        if spec is not None
        and (where.row_axes if name in _ROW_INPUTS else WHOLE).layout(spec) is None
    )


def _places(names: tuple[str, ...], operands: Specs) -> dict[str, int]:
    """Return the places of the arrays that there are, of names in the order of a call's arrays."""
    return {
        name: place
        for place, name in enumerate(names)
        if name == "workspace" or operands[name] is not None
    }
