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
    planned,
)
from cunorm.group_norm._calls import GroupBackward
from cunorm.group_norm._operands import copied, given_workspace
from cunorm.group_norm._run import run


def backward(told: Asked, arrays: tuple[Any, ...]) -> list[Any]:
    """Return the gradients; `arrays` are those of NAMES, absent ones None, and a workspace."""
    call, results = _again.run_again(told, None, arrays, FIRST_RESULT, len(ARGUMENTS))
    return _run(told, arrays, call) if results is None else results


def _run(told: Asked, arrays: tuple[Any, ...], as_made: _again.Call | None) -> list[Any]:
    function, workspace, arrays = told.function, arrays[-1], arrays[:-1]
    operands = describe_all(function, NAMES, arrays, required=4)
    plan = planned(told, forms(operands))
    x, given = operands[1], operands[FIRST_RESULT:]
    memory = None if workspace is None else given_workspace(function, workspace, x, plan.form)
    if any(given) or memory is not None:
        _outputs.check_writable(function, ARGUMENTS, arrays[FIRST_RESULT:], given)
        _outputs.check_overlap(
            plan, pointers((*operands, memory)), None if memory is None else memory.form
        )

    for place, form in plan.made:
        operands[place] = allocate(function, x, form, operands[OPERAND_OF[place]])
    if not plan.is_empty:
        read = copied(NAMES, operands, plan.to_copy, plan.where) if plan.to_copy else operands
        # As many as there are fields, which a list does not say.
        ran = run(GroupBackward(plan.form, *read, memory))  # type: ignore[call-arg]
        _again.remember(as_made, ran, operands, [place for place, _ in plan.made])
    return exported(operands[FIRST_RESULT:])
