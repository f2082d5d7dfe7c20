# SPDX-License-Identifier: MIT
"""The OpDefs of the row norms: how calls and their launches on a device are planned."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from cunorm._core import validate
from cunorm._core.calls import by_name, check_gradients, check_inputs, check_results
from cunorm._core.caps import MAX_SMS, Caps, CpuCaps
from cunorm._core.dtypes import DType, compute_type, numpy_dtype
from cunorm._core.operands import Specs, arguments, dtypes_of, present
from cunorm._core.param_grad import param_grad_call
from cunorm._core.plan import (
    Aliases,
    Alignments,
    KernelCall,
    Lowered,
    OpDef,
    Plan,
    SharedOutputs,
    Sizes,
)
from cunorm._core.tensor import OptionalSpecs, TensorSpec, optional_dtype
from cunorm._row_norm import cpu_launches, launches
from cunorm._row_norm.geometry import Geometry, row_geometry
from cunorm._row_norm.kernels import PARAMETERS, TABLE, BackwardTypes, ForwardTypes
from cunorm._row_norm.modulation import Segments
from cunorm._row_norm.row_kernel import RowKernel
from cunorm._row_norm.spec import (
    CHECKS,
    RowBackwardSpec,
    RowForwardSpec,
    RowNormSpec,
    check_mean,
    check_sums,
)
from cunorm.reference import normalize_backward, normalize_forward
from cunorm.reference.axes import width
from cunorm.reference.rows import store


def plan_forward(
    spec: RowForwardSpec, specs: OptionalSpecs, kernel_type: type[RowKernel] = RowKernel
) -> Plan:
    types_of = kernel_type.forward_types
    inputs, given = by_name(types_of, specs)
    x, dtypes = present(inputs["x"]), spec.result_dtypes(dtypes_of(inputs | given))
    compute = compute_type(x.dtype, dtypes.get("residual_out") or _rstd_dtype(inputs))
    geometry = geometry_of(spec, x, compute)
    spec.check_options(inputs)
    check_inputs(spec.function, types_of, inputs, geometry)
    _check_given(spec, inputs, given)
    results, outputs = check_results(spec, types_of, inputs, given, geometry)
    operands, numbers = inputs | results, spec.numbers(geometry.rows.width)
    formula = spec.formula(inputs, spec.rounding_dtype(x.dtype), compute)
    types = types_of.from_specs(
        operands, compute, formula=formula, **spec.build_fields(dtypes_of(operands))
    )
    parameters = {name: inputs.get(name) for name in PARAMETERS}
    kernel = kernel_type(
        types, geometry, operands, numbers, function=spec.function, given=parameters
    )
    bound = partial(workspace_bound, geometry, 0, None)
    return kernel.plan(inputs, outputs, lower, bound, *_sharing(spec, inputs, results))


def _rstd_dtype(inputs: Specs) -> DType | None:
    """Return the dtype of given statistics, which have the compute type."""
    return optional_dtype(inputs.get("rstd"))


def _sharing(spec: RowForwardSpec, inputs: Specs, results: Specs) -> tuple[Aliases, SharedOutputs]:
    """Return which inputs' memory the results may have, and whether x is returned as the stream."""
    # The stream may overwrite only x and residual: after the kernel writes the stream, it reads
    # gate, weight and bias, but neither x nor residual. y may overwrite any input, except x where
    # x itself is returned as the stream.
    has_stream = spec.streams or spec.residual_dtype is not None
    slots, aliases = {name: slot for slot, name in enumerate((*inputs, *results))}, {}
    x, keeps_x = slots["x"], has_stream and results.get("residual_out") is None
    if "y" in slots:
        aliases[slots["y"]] = tuple(n for n in range(len(inputs)) if n != x or not keeps_x)
    if "residual_out" not in slots:
        return aliases, ()
    stream = slots["residual_out"]
    return aliases | {stream: (x, slots["residual"])}, ((stream, x),) if keeps_x else ()


def geometry_of(spec: RowNormSpec, x: TensorSpec, compute: DType) -> Geometry:
    is_branch, block = spec.gate_position == "branch", getattr(spec, "block", None)
    return row_geometry(
        spec.function, x, compute, spec.axis, spec.groups, branch_gate=is_branch, block=block
    )


def _check_given(spec: RowForwardSpec, inputs: Specs, given: Specs) -> None:
    """Check that a forward computes all given results, and check their dtypes."""
    function, residual_out = spec.function, given.get("residual_out")
    stream = spec.residual_dtype or optional_dtype(inputs.get("residual"))
    for name in ("mean", "correction") if not spec.center else ():
        reason = "without center there is no mean"
        validate.absent(function, f"out.{name}", given.get(name), reason)
    if spec.streams is None:
        validate.absent(function, "out.residual", residual_out, "there is no residual")
    spec.check_given(inputs, given)
    of_stream = ("the new residual stream", stream, "out.residual", residual_out)
    validate.agreed_dtype(function, *of_stream)


def plan_backward(
    spec: RowBackwardSpec, specs: OptionalSpecs, types_of: type[BackwardTypes] = BackwardTypes
) -> Plan:
    function = spec.function
    inputs, given = by_name(types_of, specs)
    x = present(inputs["x"])
    x_dtype = spec.x_dtype or optional_dtype(given["dx"]) or x.dtype
    compute = compute_type(x.dtype, x_dtype)
    geometry = geometry_of(spec, x, compute)
    spec.check_options(inputs)
    check_mean(spec, inputs)
    check_inputs(function, types_of, inputs, geometry)
    _check_branch(spec, inputs)
    check_gradients(spec, types_of, inputs, given)
    validate.agreed_dtype(function, "x_dtype", spec.x_dtype, "out.dx", given["dx"])
    validate.agreed_dtype(function, "x", x.dtype, "out.dresidual", given["dresidual"])
    results, outputs = check_results(spec, types_of, inputs, given, geometry)
    reads = _read_inputs(spec, inputs, results)
    check_sums(spec, reads)
    operands = reads | results
    formula = spec.formula(reads, x_dtype, compute)
    if results["dweight"] is None and (results["dgate"] is None or formula.pre_gate):
        formula = formula._replace(rounded=None)  # only dweight and a post-gate's dgate round k * r
    formula = formula._replace(center=reads["mean"] is not None)
    types = types_of.from_specs(operands, compute, formula=formula)
    numbers = spec.numbers(geometry.rows.width)
    kernel = RowKernel(
        *(types, geometry, operands, numbers),
        function=function,
        given={name: inputs[name] for name in PARAMETERS},
        accumulate=spec.accumulate,
    )
    count = len(inputs)
    aliases = {slot: tuple(range(count)) for slot in range(count, len(operands))}
    # If only one of dx and dresidual is written, it is returned as both.
    dx, dresidual = map([*operands].index, ("dx", "dresidual"))
    shared: SharedOutputs = ()
    if results["dx"] is None:
        shared = ((dx, dresidual),)
    elif results["dresidual"] is None:
        shared = ((dresidual, dx),)
    bound = partial(workspace_bound, geometry, kernel.params.outputs, kernel.segments)
    return kernel.plan(inputs, outputs, lower, bound, aliases, shared)


def _check_branch(spec: RowBackwardSpec, inputs: Specs) -> None:
    """Check that a branch is given if its gate has a wanted gradient, and only with a gate."""
    function, branch = spec.function, inputs["branch"]
    if inputs["gate"] is None or spec.gate_position != "branch":
        validate.absent(function, "branch", branch, "there is no gate on the branch")
    elif branch is None and "gate" in spec.needs:
        raise ValueError(
            f"{function}: branch is None, expected the x that the forward added to the stream, as "
            "gate is in needs"
        )


def _read_inputs(spec: RowBackwardSpec, inputs: Specs, results: Specs) -> Specs:
    """Return the inputs that the kernels read; the others are None.

    The names are those of the formulas of `cunorm.normalize_backward`. dbias needs dy and, if it is
    a post-gate, the gate. Every other gradient needs dy, r and any gate. r needs the inputs that
    are not in `is_read`: x, rstd, the mean and its correction.
    """
    post_gate, dgate = spec.gate_position == "post", results["dgate"] is not None
    branch_gate = spec.gate_position == "branch"
    of_x = results["dx"] is not None or results["dresidual"] is not None
    needs_n = post_gate and dgate
    needs_dp = of_x or (dgate and not post_gate)
    needs_r = needs_dp or needs_n or results["dweight"] is not None
    is_read = {
        "dy": True,
        "dresidual_out": of_x or (dgate and branch_gate),
        "gate": of_x or dgate if branch_gate else needs_r or post_gate,
        "branch": dgate,
        "weight": needs_dp or needs_n,
        "bias": needs_n,
        "sum_dr": needs_dp,
        "sum_r_dr": needs_dp,
    }
    return {name: one if is_read.get(name, needs_r) else None for name, one in inputs.items()}


def workspace_bound(
    geometry: Geometry, parameters: int, segments: Segments | None, caps: Caps | None
) -> int:
    """Return an upper bound of the bytes of partial sums; if caps is None, it holds for any GPU.

    `parameters` is how many parameters have a wanted gradient that is a sum.
    """
    rows, has_segments = geometry.rows.not_empty(), segments is not None
    if segments is not None:
        rows = rows._replace(rows=segments.rows).not_empty()
        parameters *= segments.number
    if isinstance(caps, CpuCaps):
        of_rows = {"has_segments": has_segments, "strided": geometry.strided}
        parts = cpu_launches.cpu_sums(rows, **of_rows)
    else:
        sm_count = MAX_SMS if caps is None else caps.sm_count
        parts = min(rows.rows, launches.cuda_parts(rows, sm_count, has_segments=has_segments))
    return parameters * parts * rows.sums_pitch(twice=True) * geometry.compute.itemsize


def lower(kernel: RowKernel, caps: Caps, alignments: Alignments) -> Lowered:
    """Plan a call's launches; `sizes` of the result says what another number of rows changes."""
    types, params, shape, segments = kernel.types, kernel.params, kernel.shape, kernel.segments
    outputs, count, is_cpu = params.outputs, segments and segments.number, isinstance(caps, CpuCaps)
    rows_of = launches.RowsOf(kernel.macros(is_cpu=is_cpu), count)
    if isinstance(caps, CpuCaps):
        planned = cpu_launches.cpu_launch(types, shape.not_empty(), caps, rows_of)
    else:
        axes = max(layout.axes for layout in kernel.row_layouts())  # leading axes
        call = (shape.not_empty(), kernel.access(alignments), caps, axes, rows_of)
        if isinstance(types, ForwardTypes):
            planned = launches.cuda_forward(types, *call)
        else:
            planned = launches.cuda_backward(types, *call)
    launch, pitch = planned.launch, planned.launch.sums_pitch
    _, row_parts, own_macros = planned.cut(shape.not_empty().rows)
    sums, calls = kernel.sums(launch.sums_size), []
    if kernel.geometry.rows.rows:
        args = kernel.args(sums)
        calls.append(KernelCall(launch, args, kernel.geometry.rows.elements, row_parts))
    if outputs:
        parts = launch.parts if kernel.geometry.rows.rows else 0
        per_segment = kernel.parts(parts // (count or 1))
        sizes = (parts, pitch, shape.row_width)
        calls.append(param_grad_call(params, kernel.slots, sums, *sizes, caps, per_segment))
    row_width, itemsize = shape.row_width, types.compute.itemsize
    cut, blocks_per_part = planned.cut, planned.blocks_per_part

    def sizes_of(rows: int) -> Sizes | None:
        parts, _, macros = cut(rows)
        if macros != own_macros:
            return None
        grid, work = parts * blocks_per_part, rows * row_width
        if not outputs:
            return 0, [(grid, work, (rows,))]
        sums_size = parts * pitch
        offsets = [offset for offset in kernel.sums(sums_size) if offset is not None]
        return outputs * sums_size * itemsize, [
            (grid, work, (*offsets, rows)),
            (calls[1].launch.grid, parts * row_width, (*offsets, parts)),
        ]

    size = outputs * launch.sums_size * itemsize
    other_rows = None if kernel.has_rows or segments else sizes_of
    return Lowered(tuple(call.launch for call in calls), lambda: calls, size, other_rows)


def _forward_by_reference(spec: RowForwardSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(TABLE.forward_inputs, TABLE.forward_results, arrays)
    stream = results["residual"]
    exact = normalize_forward(
        **inputs,
        residual_dtype=None if stream is None else stream.dtype,
        eps=spec.mean_eps(width(inputs["x"].shape, spec.axis) // spec.groups),
        **spec.options(),
    )
    store(results, exact)


def _backward_by_reference(spec: RowBackwardSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(TABLE.backward_inputs, TABLE.backward_results, arrays)
    exact = normalize_backward(
        **inputs,
        x_dtype=None if spec.x_dtype is None else numpy_dtype(spec.x_dtype),
        needs=spec.needs,
        **spec.options(),
    )
    store(results, exact, ("dweight", "dbias") if spec.accumulate else ())


ROW_FORWARD = OpDef(
    name="row_forward",
    input_slots=TABLE.forward_inputs,
    result_slots=TABLE.forward_results,
    spec_type=RowForwardSpec,
    checks=CHECKS,
    plan=plan_forward,
    reference=_forward_by_reference,
)
ROW_BACKWARD = OpDef(
    name="row_backward",
    input_slots=TABLE.backward_inputs,
    result_slots=TABLE.backward_results,
    spec_type=RowBackwardSpec,
    checks=CHECKS,
    plan=plan_backward,
    reference=_backward_by_reference,
)
