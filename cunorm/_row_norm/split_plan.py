# SPDX-License-Identifier: MIT
"""The OpDefs of rows that are split: their moments, and norms that are given statistics or sums."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from cunorm._core import validate
from cunorm._core.build import ArgsWriter, KernelBuild, Launch, cuda_bool, cuda_type, numbers_of
from cunorm._core.calls import by_name, check_inputs, check_results
from cunorm._core.caps import Caps, CpuCaps
from cunorm._core.dtypes import FLOAT32, FLOAT64, compute_type, numpy_dtype
from cunorm._core.operands import Specs, arguments, dtypes_of, present
from cunorm._core.plan import (
    Alignments,
    InputCopy,
    KernelCall,
    Lowered,
    OpDef,
    OutputSpec,
    Plan,
)
from cunorm._core.tensor import (
    WHOLE,
    OptionalSpec,
    OptionalSpecs,
    RowAxes,
    TensorSpec,
    contiguous,
)
from cunorm._row_norm.plan import geometry_of, lower, plan_backward, plan_forward, workspace_bound
from cunorm._row_norm.row_kernel import RowKernel
from cunorm._row_norm.split_kernels import (
    COMBINED_TABLE,
    GIVEN_TABLE,
    MOMENTS_TABLE,
    GivenKernel,
    GivenSumsTypes,
    MomentsKernel,
    SumsTypes,
)
from cunorm._row_norm.split_spec import (
    COMBINE_CHECKS,
    SPLIT_CHECKS,
    CombineSpec,
    RowGivenSpec,
    RowGivenSumsSpec,
    RowMomentsSpec,
    RowSumsSpec,
    check_statistics,
)
from cunorm.reference import (
    combine_moments,
    normalize_backward,
    normalize_backward_sums,
    normalize_forward,
    row_moments,
)
from cunorm.reference.rows import Float64, store
from cunorm.results import Moments, Statistics, Sums

_THREADS = 128  # of a GPU's block, each with a row
_CPU_ROWS = 256  # of a CPU's thread


def plan_sums(spec: RowSumsSpec, specs: OptionalSpecs) -> Plan:
    inputs, given = by_name(SumsTypes, specs)
    x, rstd = present(inputs["x"]), present(inputs["rstd"])
    compute = compute_type(x.dtype, rstd.dtype)
    geometry = geometry_of(spec, x, compute)
    spec.check_options(inputs)
    check_statistics(spec, inputs)
    if not spec.center:
        validate.absent(spec.function, "out.sum_dr", given["sum_dr"], "center is False")
    check_inputs(spec.function, SumsTypes, inputs, geometry)
    results, outputs = check_results(spec, SumsTypes, inputs, given, geometry)
    operands = inputs | results
    formula = spec.formula(inputs, x.dtype, compute)._replace(rounded=None)
    types = SumsTypes.from_specs(operands, compute, formula=formula)
    kernel = RowKernel(
        *(types, geometry, operands, (1.0, spec.weight_offset)),
        function=spec.function,
        given={"weight": inputs["weight"]},
    )
    return kernel.plan(
        inputs, outputs, lower, partial(workspace_bound, geometry, 0, kernel.segments), {}
    )


# --- statistics of whole rows ---------------------------------------------------------------------


def plan_combine(spec: CombineSpec, specs: OptionalSpecs) -> Plan:
    inputs, given = by_name(_Combined, specs)  # type: ignore[arg-type]  # it has the slots
    m2 = present(inputs["m2"])
    _check_parts(spec, inputs, m2)
    results = dict(given)
    dtypes, outputs = spec.result_dtypes(dtypes_of(inputs)), []
    for slot, (name, one) in enumerate(given.items(), len(inputs)):
        argument = spec.output_names[slot - len(inputs)]
        if name not in dtypes:
            validate.absent(spec.function, argument, one, "moments.mean is None")
        elif one is not None:
            validate.output(spec.function, argument, one, m2.shape[1:], WHOLE)
            _check_dtype(spec, argument, one, m2)
        else:
            results[name] = new = contiguous(m2.shape[1:], m2.dtype, m2.device)
            outputs.append(OutputSpec(slot, new))
    names = (*(f"moments.{name}" for name in _Combined.names), *spec.output_names)
    arrays = (*inputs.values(), *given.values())
    validate.same_device(spec.function, m2, zip(names, arrays, strict=True), of="moments.m2")
    copies = tuple(
        InputCopy(slot)
        for slot, (name, one) in enumerate(inputs.items())
        if one is not None and name != "count" and RowAxes(1).layout(one) is None
    )
    return Plan(
        specs=(*inputs.values(), *results.values()),
        outputs=tuple(outputs),
        copies=copies,
        aliases={},
        shared=(),
        lower=partial(_lower_combined, spec, inputs | results),
        workspace_bound=lambda caps: 0,
        is_empty=prod(m2.shape[1:]) == 0,
    )


class _Combined:
    """The arrays of combine_moments."""

    inputs, results = COMBINED_TABLE.forward_inputs, COMBINED_TABLE.forward_results
    names = tuple(slot.name for slot in inputs)


def _check_parts(spec: CombineSpec, inputs: Specs, m2: TensorSpec) -> None:
    """Check the arrays of moments: of each part, stacked on a new first axis."""
    function = spec.function
    if not m2.shape or not m2.shape[0]:
        raise ValueError(
            f"{function}: moments.m2 has shape {m2.shape}, expected a first axis with an element "
            "for each part of the rows"
        )
    if m2.dtype not in (FLOAT32, FLOAT64):
        raise TypeError(f"{function}: moments.m2 has dtype {m2.dtype}, expected float32 or float64")
    if inputs["mean"] is None:
        reason = "moments.mean is None"
        validate.absent(function, "moments.correction", inputs["correction"], reason)
    for name, one in inputs.items():
        if one is not None:
            shape = m2.shape[:1] if name == "count" else m2.shape
            validate.shape_of(function, f"moments.{name}", one, shape)
            _check_dtype(spec, f"moments.{name}", one, m2)


def _check_dtype(spec: CombineSpec, argument: str, one: TensorSpec, m2: TensorSpec) -> None:
    if one.dtype is not m2.dtype:
        raise TypeError(
            f"{spec.function}: {argument} has dtype {one.dtype}, expected {m2.dtype}, that of "
            "moments.m2"
        )


def _lower_combined(
    spec: CombineSpec, operands: Specs, caps: Caps, alignments: Alignments
) -> Lowered:
    m2 = present(operands["m2"])
    parts, rows = m2.shape[0], prod(m2.shape[1:])
    threads, rows_of_thread = (1, _CPU_ROWS) if isinstance(caps, CpuCaps) else (_THREADS, 1)
    macros = (
        ("COMPUTE_T", cuda_type(m2.dtype)),
        ("CENTER", cuda_bool(operands["mean"] is not None)),
        ("THREADS", str(threads)),
        ("ROWS", str(rows_of_thread)),
    )
    grid = -(-rows // (threads * rows_of_thread))
    launch = Launch(KernelBuild("combine_moments", macros), grid, threads)

    def calls() -> list[KernelCall]:
        slots = {name: slot for slot, (name, one) in enumerate(operands.items()) if one is not None}
        writer = ArgsWriter(slots)
        for name in _Combined.names:
            writer.pointer(name)
            writer.integers(_stride(operands[name]))
        for name in ("mean_out", "rstd", "correction_out"):
            writer.pointer(name)
        writer.integers(parts, rows)
        numbers = numbers_of(FLOAT64, (spec.eps, spec.count or 0))
        return [KernelCall(launch, writer.finish(numbers), work=parts * rows)]

    return Lowered((launch,), calls, 0)


def _stride(spec: OptionalSpec) -> int:
    """Return the elements from one part to the next, in the array or in its copy."""
    if spec is None:
        return 0
    is_copied = len(spec.shape) > 1 and RowAxes(1).layout(spec) is None
    return (spec.dense() if is_copied else spec).strides[0]


# --- the reference --------------------------------------------------------------------------------


def _in_two(mean: Float64, dtype: Any) -> tuple[Float64, Float64]:
    """Return a mean as its rounded value and the rest."""
    rounded = mean.astype(dtype).astype(np.float64)
    return rounded, mean - rounded


def _moments_by_reference(spec: RowMomentsSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(MOMENTS_TABLE.forward_inputs, MOMENTS_TABLE.forward_results, arrays)
    stream = results["residual"]
    options = {name: getattr(spec, name) for name in _MOMENT_OPTIONS}
    exact = row_moments(
        **inputs, residual_dtype=None if stream is None else stream.dtype, **options
    )
    if exact.mean is not None:
        mean, correction = _in_two(exact.mean, results["mean"].dtype)
        exact = exact._replace(mean=mean, correction=correction)
    store(results, exact)


_MOMENT_OPTIONS = ("center", "axis", "groups", "gate_activation", "gate_position")


def _combined_by_reference(spec: CombineSpec, arrays: Sequence[Any]) -> None:
    given, results = arguments(_Combined.inputs, _Combined.results, arrays)
    inputs = {name: given[f"moments.{name}"] for name in _Combined.names}
    count = inputs.pop("count")
    moments = Moments(**inputs, count=spec.count if count is None else count)
    exact = combine_moments(moments, eps=spec.eps)
    if exact.mean is not None:
        mean, correction = _in_two(exact.mean, results["mean"].dtype)
        exact = Statistics(mean, exact.rstd, correction)
    store(results, exact)


def _given_by_reference(spec: RowGivenSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(GIVEN_TABLE.forward_inputs, GIVEN_TABLE.forward_results, arrays)
    x_dtype = None if spec.x_dtype is None else numpy_dtype(spec.x_dtype)
    store(results, normalize_forward(**inputs, count=spec.count, x_dtype=x_dtype, **spec.options()))


def _sums_by_reference(spec: RowSumsSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(SumsTypes.inputs, SumsTypes.results, arrays)
    options = {name: getattr(spec, name) for name in (*_MOMENT_OPTIONS, "weight_offset")}
    store(results, normalize_backward_sums(**inputs, **options))


def _given_sums_by_reference(spec: RowGivenSumsSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(GivenSumsTypes.inputs, GivenSumsTypes.results, arrays)
    sums = Sums(*(inputs.pop(f"sums.{name}") for name in Sums._fields))
    exact = normalize_backward(
        **inputs,
        sums=sums,
        count=spec.count,
        x_dtype=None if spec.x_dtype is None else numpy_dtype(spec.x_dtype),
        needs=spec.needs,
        **spec.options(),
    )
    store(results, exact, ("dweight", "dbias") if spec.accumulate else ())


ROW_MOMENTS = OpDef(
    name="row_moments",
    input_slots=MOMENTS_TABLE.forward_inputs,
    result_slots=MOMENTS_TABLE.forward_results,
    spec_type=RowMomentsSpec,
    checks=SPLIT_CHECKS,
    plan=partial(plan_forward, kernel_type=MomentsKernel),
    reference=_moments_by_reference,
)
COMBINE_MOMENTS = OpDef(
    name="combine_moments",
    input_slots=_Combined.inputs,
    result_slots=_Combined.results,
    spec_type=CombineSpec,
    checks=COMBINE_CHECKS,
    plan=plan_combine,
    reference=_combined_by_reference,
)
ROW_GIVEN = OpDef(
    name="row_given",
    input_slots=GIVEN_TABLE.forward_inputs,
    result_slots=GIVEN_TABLE.forward_results,
    spec_type=RowGivenSpec,
    checks=SPLIT_CHECKS,
    plan=partial(plan_forward, kernel_type=GivenKernel),
    reference=_given_by_reference,
)
ROW_SUMS = OpDef(
    name="row_sums",
    input_slots=SumsTypes.inputs,
    result_slots=SumsTypes.results,
    spec_type=RowSumsSpec,
    checks=SPLIT_CHECKS,
    plan=plan_sums,
    reference=_sums_by_reference,
)
ROW_GIVEN_SUMS = OpDef(
    name="row_given_sums",
    input_slots=GivenSumsTypes.inputs,
    result_slots=GivenSumsTypes.results,
    spec_type=RowGivenSumsSpec,
    checks=SPLIT_CHECKS,
    plan=partial(plan_backward, types_of=GivenSumsTypes),
    reference=_given_sums_by_reference,
)
