# SPDX-License-Identifier: MIT
"""The backward of the group norm: describe, check, allocate, run, hand back."""

from __future__ import annotations

from typing import Any

from cunorm import _again, _outputs
from cunorm._arrays import describe_all
from cunorm._operands import allocate, exported, forms, pointers
from cunorm.group_norm._backward_plan import (
    ARGUMENTS,
    FIRST_RESULT,
    NAMES,
    OPERAND_OF,
    Asked,
    GroupNormBackward,
    asked,
    planned,
)
from cunorm.group_norm._calls import GroupBackward
from cunorm.group_norm._operands import copied, given_workspace
from cunorm.group_norm._run import run
from cunorm.results import GroupNormGrads

_NOT_GIVEN = GroupNormGrads()


def backward(
    norm: GroupNormBackward, arrays: tuple[Any, ...], out: GroupNormGrads | None, workspace: Any
) -> GroupNormGrads:
    """Run a backward on dy, x, mean, rstd, weight and bias; `out` has an array or None for each."""
    told = asked(norm)
    if out is None or workspace is None:
        return GroupNormGrads(*_run(told, arrays, out or _NOT_GIVEN, workspace, None))
    key = _again.key_of(told, b"", (*arrays, *out, workspace))
    if _again.ran_again(key):
        return GroupNormGrads(*out)
    return GroupNormGrads(*_run(told, arrays, out, workspace, key))


def _run(
    told: Asked,
    arrays: tuple[Any, ...],
    out: GroupNormGrads,
    workspace: Any,
    key: _again.Key | None,
) -> list[Any]:
    function = told.function
    operands = describe_all(function, NAMES, (*arrays, *out), required=4)
    plan = planned(told, forms(operands))
    x, given = operands[1], operands[FIRST_RESULT:]
    memory = None if workspace is None else given_workspace(function, workspace, x, plan.form)
    if any(given) or memory is not None:
        _outputs.check_writable(function, ARGUMENTS, out, given)
        _outputs.check_overlap(
            plan, pointers((*operands, memory)), None if memory is None else memory.form
        )

    for place, form in plan.made:
        operands[place] = allocate(function, x, form, operands[OPERAND_OF[place]])
    if not plan.is_empty:
        read = copied(NAMES, operands, plan.to_copy, plan.where) if plan.to_copy else operands
        # As many as there are fields, which a list does not say.
        call = GroupBackward(plan.form, *read, memory)  # type: ignore[call-arg]
        _again.remember(key, run(call))
    return exported(operands[FIRST_RESULT:])
