# SPDX-License-Identifier: MIT
"""The OpDefs of rows that are split: their moments, and norms that are given statistics or sums."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from cunorm._core import validate
from cunorm._core.calls import by_name, check_inputs, check_results
from cunorm._core.dtypes import compute_type, numpy_dtype
from cunorm._core.operands import arguments, present
from cunorm._core.plan import OpDef, Plan
from cunorm._core.tensor import OptionalSpecs
from cunorm._row_norm.combine_plan import in_two
from cunorm._row_norm.plan import geometry_of, lower, plan_backward, plan_forward, workspace_bound
from cunorm._row_norm.row_kernel import RowKernel
from cunorm._row_norm.split_kernels import (
    GIVEN_TABLE,
    MOMENTS_TABLE,
    GivenKernel,
    GivenSumsTypes,
    MomentsKernel,
    SumsTypes,
)
from cunorm._row_norm.split_spec import (
    SPLIT_CHECKS,
    RowGivenSpec,
    RowGivenSumsSpec,
    RowMomentsSpec,
    RowSumsSpec,
    check_statistics,
)
from cunorm.reference import (
    normalize_backward,
    normalize_backward_sums,
    normalize_forward,
    row_moments,
)
from cunorm.reference.rows import store
from cunorm.results import Sums


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


# --- the reference --------------------------------------------------------------------------------


def _moments_by_reference(spec: RowMomentsSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(MOMENTS_TABLE.forward_inputs, MOMENTS_TABLE.forward_results, arrays)
    stream = results["residual"]
    options = {name: getattr(spec, name) for name in _MOMENT_OPTIONS}
    exact = row_moments(
        **inputs, residual_dtype=None if stream is None else stream.dtype, **options
    )
    if exact.mean is not None:
        mean, correction = in_two(exact.mean, results["mean"].dtype)
        exact = exact._replace(mean=mean, correction=correction)
    store(results, exact)


_MOMENT_OPTIONS = ("center", "axis", "groups", "gate_activation", "gate_position")


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
