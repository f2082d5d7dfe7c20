# SPDX-License-Identifier: MIT
"""The forward of every row norm: describe, check, allocate, run, hand back."""

from __future__ import annotations

from typing import Any, NamedTuple

from cunorm import _again, _checks, _outputs
from cunorm._arrays import describe_all
from cunorm._backend import run_forward
from cunorm._calls import Forward
from cunorm._operands import allocate, copied, exported, forms, pointers
from cunorm._remembered import Spelled, remembered, spelled
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


class Said(NamedTuple):
    """What the caller said by itself, checked."""

    told: Asked
    numbers: Numbers
    bits: bytes  # of the numbers


def forward(norm: Norm, arrays: Arrays, options: Options, out: NormForward | None) -> NormForward:
    """Run a forward; `out` has an array or None for each field of the result."""
    function, variant, eps, c, weight_offset, eps_of_sum = norm
    numbers = (eps, spelled(c), weight_offset, arrays.weight is not None, eps_of_sum)
    said = said_forward(function, *variant, *numbers, *options)
    return NormForward(*run(said, (*arrays, *(out or _NOT_GIVEN))))


def run(said: Said, arrays: tuple[Any, ...]) -> list[Any]:
    """Run a forward; `arrays` are inputs, then an array or None for each of the results.

    x itself is the residual stream that does not have to be written.
    """
    told, numbers, bits = said
    call, results = _again.run_again(told, bits, arrays, FIRST_RESULT, len(_NOT_GIVEN))
    if results is None:
        results = _run(told, numbers, arrays, call)
    if results[1] is None and told.has_stream:
        results[1] = arrays[0]
    return results


@remembered
def said_forward(
    function: str,
    center: Any,
    axis: Any,
    groups: Any,
    round_before_weight: Any,
    gate_activation: Any,
    gate_position: Any,
    eps: Any,
    c: Spelled,
    weight_offset: Any,
    has_weight: bool,
    eps_of_sum: bool,
    *options: Any,
) -> Said:
    """Check what the caller said by itself; options are those of Options."""
    numbers = Numbers(
        _checks.length(function, c and c[0]),
        checked_offset(function, weight_offset, has_weight or None) + 0.0,  # -0.0 equals 0.0
        _checks.epsilon(function, eps),
        eps_of_sum,
    )
    variant = (center, axis, groups, round_before_weight, gate_activation, gate_position)
    told = asked(function, Variant(*variant), numbers.weight_offset != 0.0, Options(*options))
    return Said(told, numbers, numbers.bits())


def _run(
    told: Asked, numbers: Numbers, arrays: tuple[Any, ...], as_made: _again.Call | None
) -> list[Any]:
    function = told.function
    operands = describe_all(function, told.names, arrays, required=1)
    plan = planned(told, forms(operands))
    given = operands[FIRST_RESULT:]
    if any(given):
        _outputs.check_writable(function, told.arguments, arrays[FIRST_RESULT:], given)
        check_overlap(plan, pointers(operands))

    for place, form in plan.made:
        operands[place] = allocate(function, operands[0], form)
    if plan.form.where.walk.rows:
        ran = run_forward(_call(numbers, plan, told.names, operands))
        _again.remember(as_made, ran, operands, [place for place, _ in plan.made])
    return exported(operands[FIRST_RESULT:])


def _call(numbers: Numbers, plan: Plan, names: tuple[str, ...], operands: list[Any]) -> Forward:
    if plan.to_copy:
        operands = copied(names, operands, plan.to_copy)
    width = plan.form.where.walk.width
    k = _checks.scale(numbers.c, width)
    eps = numbers.eps / width if numbers.eps_of_sum else numbers.eps
    return Forward(plan.form, k, eps, numbers.weight_offset, *operands)
