# SPDX-License-Identifier: MIT
"""The OpDefs of row norms in forward mode: the tangents of y, and of a backward's dx."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from cunorm._core import validate
from cunorm._core.calls import by_name, check_inputs, check_results
from cunorm._core.dtypes import compute_type, numpy_dtype
from cunorm._core.operands import Kind, Specs, arguments, present
from cunorm._core.plan import OpDef, Plan
from cunorm._core.tensor import OptionalSpecs
from cunorm._row_norm.jvp_kernel import JvpKernel, JvpTypes, SecondTypes
from cunorm._row_norm.jvp_spec import RowJvpSpec
from cunorm._row_norm.plan import geometry_of, lower, workspace_bound
from cunorm._row_norm.spec import CHECKS
from cunorm.reference.jvp import normalize_backward_jvp, normalize_jvp
from cunorm.reference.rows import Array, Float64, round_to


def plan_jvp(spec: RowJvpSpec, specs: OptionalSpecs, types_of: type[JvpTypes]) -> Plan:
    function, (inputs, given) = spec.function, by_name(types_of, specs)
    x, rstd = present(inputs["x"]), present(inputs["rstd"])
    compute = compute_type(x.dtype, rstd.dtype)
    geometry = geometry_of(spec, x, compute)
    spec.check_options(dict.fromkeys(slot.name for slot in JvpTypes.inputs) | inputs)
    check_inputs(function, types_of, inputs, geometry)
    validate.agreed_dtype(function, "dtype", spec.dtype, "out", given["y_tangent"])
    results, outputs = check_results(spec, types_of, inputs, given, geometry)
    reads = _read_inputs(spec, inputs)
    operands = reads | results
    of_formula = {name: reads.get(name) for name in ("gate", "weight")}
    formula = spec.formula(of_formula, spec.x_dtype or x.dtype, compute)
    kernel = JvpKernel(
        types_of.from_specs(operands, compute, formula=formula),
        *(geometry, operands, spec.numbers(geometry.rows.width)),
        function=function,
        given={name: inputs.get(name) for name in types_of.parameters()},
    )
    like_x = (n for n, slot in enumerate(types_of.inputs) if slot.kind is Kind.LIKE_X)
    aliases = {len(inputs): tuple(like_x)}
    bound = partial(workspace_bound, geometry, 0, None)
    return kernel.plan(inputs, outputs, lower, bound, aliases)


def _read_inputs(spec: RowJvpSpec, inputs: Specs) -> Specs:
    """Return the inputs that the kernel reads; the others are None.

    The names are those of the formulas of `cunorm.normalize_jvp`: n' needs the weight for r', and
    y' needs n for the tangent of a post-gate.
    """
    of_gate, is_post = inputs.get("gate_tangent"), spec.gate_position == "post"
    needs_n = of_gate is not None and is_post
    has_r_tangent = inputs["x_tangent"] is not None or (of_gate is not None and not is_post)
    is_read = {"weight": has_r_tangent or needs_n, "bias": needs_n}
    return {name: one if is_read.get(name, True) else None for name, one in inputs.items()}


def _jvp_by_reference(spec: RowJvpSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(JvpTypes.inputs, JvpTypes.results, arrays)
    x_dtype = None if spec.x_dtype is None else numpy_dtype(spec.x_dtype)
    _store(results, normalize_jvp(**inputs, x_dtype=x_dtype, **spec.options()))


def _second_by_reference(spec: RowJvpSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(SecondTypes.inputs, SecondTypes.results, arrays)
    names = ("c", "center", "axis", "groups", "weight_offset")
    options = {name: getattr(spec, name) for name in names}
    _store(results, normalize_backward_jvp(**inputs, **options))


def _store(results: dict[str, Array], exact: Float64) -> None:
    (result,) = results.values()
    result[...] = round_to(exact, result.dtype)


ROW_JVP = OpDef(
    name="row_jvp",
    input_slots=JvpTypes.inputs,
    result_slots=JvpTypes.results,
    spec_type=RowJvpSpec,
    checks=CHECKS,
    plan=partial(plan_jvp, types_of=JvpTypes),
    reference=_jvp_by_reference,
)
ROW_SECOND = OpDef(
    name="row_second",
    input_slots=SecondTypes.inputs,
    result_slots=SecondTypes.results,
    spec_type=RowJvpSpec,
    checks=CHECKS,
    plan=partial(plan_jvp, types_of=SecondTypes),
    reference=_second_by_reference,
)
