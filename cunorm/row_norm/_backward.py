# SPDX-License-Identifier: MIT
"""The backward of every row norm: describe, check, allocate, run, hand back."""

from __future__ import annotations

from typing import Any, NamedTuple

from cunorm import _checks, _outputs
from cunorm._arrays import Operand, describe_all
from cunorm._backend import run_backward
from cunorm._calls import Backward
from cunorm.results import NormGrads
from cunorm.row_norm._backward_plan import ARGUMENTS, NEEDS, Plan, asked, check_overlap, planned
from cunorm.row_norm._operands import allocate, copied, exported, forms, pointers
from cunorm.row_norm._variant import Variant, checked_offset
from cunorm.row_norm._workspace import given_workspace


class NormBackward(NamedTuple):
    """Which norm's gradients are computed, as their caller asked for them."""

    function: str
    variant: Variant
    c: float | None = None
    weight_offset: float = 0.0
    x_dtype: Any = None
    needs: Any = NEEDS
    accumulate: bool = False


class GradArrays(NamedTuple):
    """The arrays that the caller gave."""

    dy: Any
    x: Any
    rstd: Any
    mean: Any = None
    d_residual: Any = None
    gate: Any = None
    weight: Any = None
    bias: Any = None


def backward(norm: NormBackward, arrays: GradArrays, out: NormGrads, workspace: Any) -> NormGrads:
    """Run a backward; `out` has an array or None for each field of the result."""
    function, variant, c, weight_offset, x_dtype, needs, accumulate = norm
    offset = checked_offset(function, weight_offset, arrays.weight)
    c = _checks.length(function, c)
    told = asked(function, variant, offset != 0.0, x_dtype, needs, accumulate)
    inputs = describe_all(function, GradArrays._fields, arrays, required=3)
    given = _outputs.described(function, ARGUMENTS, out)
    plan = planned(told, forms(inputs), forms(given))
    x = inputs[1]
    sums = None if workspace is None else given_workspace(function, workspace, x, plan.form)
    if any(given) or sums is not None:
        workspace_place = None if sums is None else (sums.pointer, sums.form)
        check_overlap(plan, pointers((*given, *inputs)), workspace_place)

    results = given.copy()
    for place, form in plan.made:
        results[place] = allocate(function, x, form)
    if not plan.is_empty:
        run_backward(_call(c, offset, plan, inputs, results, sums))
    return _gradients(results)


def _call(
    c: float | None,
    weight_offset: float,
    plan: Plan,
    inputs: list[Any],
    results: list[Any],
    sums: Any,
) -> Backward:
    if plan.to_copy:
        inputs = copied(GradArrays._fields, inputs, plan.to_copy)
    k = _checks.scale(c, plan.form.where.walk.width)
    return Backward(plan.form, k, weight_offset, *inputs, *results, sums)  # type: ignore[call-arg]


def _gradients(results: list[Operand | None]) -> NormGrads:
    """Return the gradients; one of dx and dresidual stands for both where only it was written."""
    dx, dweight, dbias, dgate, dresidual = exported(results)
    if dx is None:
        dx = dresidual
    elif dresidual is None:
        dresidual = dx
    return NormGrads(dx, dweight, dbias, dgate, dresidual)
