# SPDX-License-Identifier: MIT
"""The forward of every row norm: describe, check, allocate, run, hand back."""

from __future__ import annotations

from typing import Any, NamedTuple

from cunorm import _again, _checks, _outputs
from cunorm._arrays import describe_all
from cunorm._backend import run_forward
from cunorm._calls import Forward
from cunorm._operands import allocate, copied, exported, forms, pointers
from cunorm.results import NormForward
from cunorm.row_norm._forward_plan import (
    FIRST_RESULT,
    Asked,
    Options,
    Plan,
    asked,
    check_overlap,
    planned,
)
from cunorm.row_norm._variant import Numbers, Variant, checked_offset

_NOT_GIVEN = NormForward()


class Norm(NamedTuple):
    """Which norm is computed, as its caller asked for it."""

    function: str
    variant: Variant
    eps: float
    c: float | None = None
    weight_offset: float = 0.0
    eps_of_sum: bool = False  # eps is added to the sum of squares, not to their mean


class Arrays(NamedTuple):
    """The arrays that the caller gave."""

    x: Any
    residual: Any = None
    gate: Any = None
    weight: Any = None
    bias: Any = None


def forward(norm: Norm, arrays: Arrays, options: Options, out: NormForward | None) -> NormForward:
    """Run a forward; `out` has an array or None for each field of the result."""
    numbers = _numbers(norm, arrays.weight)
    told = asked(norm.function, norm.variant, numbers.weight_offset != 0.0, options)
    taken = (*arrays, *(out or _NOT_GIVEN))
    call, results = _again.run_again(told, numbers.bits(), taken, FIRST_RESULT, len(_NOT_GIVEN))
    if results is None:
        results = _run(norm, told, numbers, taken, call)
    return _result(told, arrays.x, *results)


def _run(
    norm: Norm,
    told: Asked,
    numbers: Numbers,
    arrays: tuple[Any, ...],
    as_made: _again.Call | None,
) -> list[Any]:
    function = norm.function
    operands = describe_all(function, told.names, arrays, required=1)
    plan = planned(told, forms(operands))
    given = operands[FIRST_RESULT:]
    if any(given):
        _outputs.check_writable(function, told.arguments, arrays[FIRST_RESULT:], given)
        check_overlap(plan, pointers(operands))

    for place, form in plan.made:
        operands[place] = allocate(function, operands[0], form)
    if plan.form.where.walk.rows:
        ran = run_forward(_call(norm, numbers, plan, told.names, operands))
        _again.remember(as_made, ran, operands, [place for place, _ in plan.made])
    return exported(operands[FIRST_RESULT:])


def _result(told: Asked, x: Any, y: Any, residual: Any, mean: Any, rstd: Any) -> NormForward:
    """Return the results; x itself is the residual stream that did not have to be written."""
    if residual is None and told.has_stream:
        residual = x
    return NormForward(y, residual, mean, rstd)


def _numbers(norm: Norm, weight: Any) -> Numbers:
    function = norm.function
    return Numbers(
        _checks.length(function, norm.c),
        checked_offset(function, norm.weight_offset, weight),
        _checks.epsilon(function, norm.eps),
        norm.eps_of_sum,
    )


def _call(
    norm: Norm, numbers: Numbers, plan: Plan, names: tuple[str, ...], operands: list[Any]
) -> Forward:
    if plan.to_copy:
        operands = copied(names, operands, plan.to_copy)
    width = plan.form.where.walk.width
    k = _checks.scale(numbers.c, width)
    eps = numbers.eps / width if norm.eps_of_sum else numbers.eps
    return Forward(plan.form, k, eps, numbers.weight_offset, *operands)
