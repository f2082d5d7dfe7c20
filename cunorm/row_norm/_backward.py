# SPDX-License-Identifier: MIT
"""The backward of every row norm: describe, check, allocate, run, hand back."""

from __future__ import annotations

from typing import Any, NamedTuple

from cunorm import _again, _checks, _outputs
from cunorm._arrays import describe_all
from cunorm._backend import run_backward
from cunorm._calls import Backward
from cunorm._operands import allocate, copied, exported, forms, pointers
from cunorm._remembered import Spelled, remembered, spelled
from cunorm.results import NormGrads
from cunorm.row_norm._backward_plan import (
    ARGUMENTS,
    FIRST_RESULT,
    NAMES,
    NEEDS,
    OPERAND_OF,
    Asked,
    asked,
    planned,
)
from cunorm.row_norm._variant import Numbers, Variant, checked_offset
from cunorm.row_norm._workspace import given_workspace

_NOT_GIVEN = NormGrads()


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


class Said(NamedTuple):
    """What the caller said by itself, checked."""

    told: Asked
    numbers: Numbers
    bits: bytes  # of the numbers


def backward(
    norm: NormBackward, arrays: GradArrays, out: NormGrads | None, workspace: Any
) -> NormGrads:
    """Run a backward; `out` has an array or None for each field of the result."""
    function, variant, c, weight_offset, x_dtype, needs, accumulate = norm
    has_weight = arrays.weight is not None
    more = (spelled(c), weight_offset, has_weight, x_dtype, needs, accumulate)
    said = said_backward(function, *variant, *more)
    return gradients(*run(said, (*arrays, *(out or _NOT_GIVEN), workspace)))


def run(said: Said, arrays: tuple[Any, ...]) -> list[Any]:
    """Run a backward; `arrays` are inputs, an array or None for each result, and a workspace."""
    told, numbers, bits = said
    call, results = _again.run_again(told, bits, arrays, FIRST_RESULT, len(_NOT_GIVEN))
    return _run(told, numbers, arrays, call) if results is None else results


@remembered
def said_backward(
    function: str,
    center: Any,
    axis: Any,
    groups: Any,
    round_before_weight: Any,
    gate_activation: Any,
    gate_position: Any,
    c: Spelled,
    weight_offset: Any,
    has_weight: bool,
    *rest: Any,
) -> Said:
    """Check what the caller said by itself; the rest are x_dtype, needs and accumulate."""
    numbers = Numbers(
        _checks.length(function, c and c[0]),
        checked_offset(function, weight_offset, has_weight or None) + 0.0,  # -0.0 equals 0.0
    )
    variant = (center, axis, groups, round_before_weight, gate_activation, gate_position)
    told = asked(function, Variant(*variant), numbers.weight_offset != 0.0, *rest)
    return Said(told, numbers, numbers.bits())


def _run(
    told: Asked, numbers: Numbers, arrays: tuple[Any, ...], as_made: _again.Call | None
) -> list[Any]:
    function, workspace, arrays = told.function, arrays[-1], arrays[:-1]
    operands = describe_all(function, NAMES, arrays, required=3)
    plan = planned(told, forms(operands))
    x, given = operands[1], operands[FIRST_RESULT:]
    sums = None if workspace is None else given_workspace(function, workspace, x, plan.form)
    if any(given) or sums is not None:
        _outputs.check_writable(function, ARGUMENTS, arrays[FIRST_RESULT:], given)
        _outputs.check_overlap(
            plan, pointers((*operands, sums)), None if sums is None else sums.form
        )

    for place, form in plan.made:
        operands[place] = allocate(function, x, form, operands[OPERAND_OF[place]])
    if not plan.is_empty:
        read = copied(NAMES, operands, plan.to_copy) if plan.to_copy else operands
        k = _checks.scale(numbers.c, plan.form.where.walk.width)
        # As many as there are fields, which a list does not say.
        call = Backward(plan.form, k, numbers.weight_offset, *read, sums)  # type: ignore[call-arg]
        ran = run_backward(call)
        _again.remember(as_made, ran, operands, [place for place, _ in plan.made])
    return exported(operands[FIRST_RESULT:])


def gradients(dx: Any, dweight: Any, dbias: Any, dgate: Any, dresidual: Any) -> NormGrads:
    """Return the gradients; one of dx and dresidual stands for both where only it was written."""
    if dx is None:
        dx = dresidual
    elif dresidual is None:
        dresidual = dx
    return NormGrads(dx, dweight, dbias, dgate, dresidual)
