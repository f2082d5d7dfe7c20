# SPDX-License-Identifier: MIT
"""The forward of every group norm: describe, check, allocate, run, hand back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from cunorm import _again, _checks, _outputs
from cunorm._arrays import Form, contiguous_form, describe_all
from cunorm._dtypes import FLOAT32, FLOAT64, DType, parse_optional_dtype
from cunorm._layout import WHOLE
from cunorm._operands import allocate, exported, forms, optional_dtype, pointers
from cunorm._remembered import remembered
from cunorm.group_norm._builds import GroupForwardTypes
from cunorm.group_norm._calls import GroupForward, GroupForwardForm
from cunorm.group_norm._layout import GroupGeometry, geometry
from cunorm.group_norm._operands import (
    check_result,
    check_shape,
    check_statistic,
    copied,
    given_workspace,
    lines,
    must_be_copied,
    optional_activation,
)
from cunorm.group_norm._run import run
from cunorm.results import GroupNormForward

INPUTS = ("x", "weight", "bias")
FIELDS = GroupNormForward._fields

_FIRST_RESULT = len(INPUTS)  # its place among all arrays
EACH_CHANNEL: Final = object()  # in place of a number of groups: as many as channels

OptionalForms = tuple[Form | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What the caller said, checked by itself: one object for all who say the same."""

    function: str
    num_groups: int | None  # None: EACH_CHANNEL
    activation: str
    channel_axis: int
    dtype: DType | None
    saves: bool
    names: tuple[str, ...]  # how the caller calls each array, inputs and results


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a call does."""

    form: GroupForwardForm
    where: GroupGeometry
    to_copy: tuple[str, ...]  # the inputs that are copied first
    made: tuple[tuple[int, Form], ...]  # the results to allocate, by their place among all arrays
    overlaps: _outputs.Overlaps


def forward(told: Asked, eps: Any, arrays: tuple[Any, ...]) -> list[Any]:
    """Return y, mean and rstd; `arrays` are x, weight, bias, one or None for each, a workspace.

    Calls with an eps of 0.0 and -0.0 are the same call, as no variance is -0.0.
    """
    eps = _checks.epsilon(told.function, eps)
    call, results = _again.run_again(told, eps, arrays, _FIRST_RESULT, len(FIELDS))
    return _run(told, eps, arrays, call) if results is None else results


def _run(
    told: Asked, eps: float, arrays: tuple[Any, ...], as_made: _again.Call | None
) -> list[Any]:
    function, workspace, arrays = told.function, arrays[-1], arrays[:-1]
    operands = describe_all(function, told.names, arrays, required=1)
    plan = planned(told, forms(operands))
    x, given = operands[0], operands[_FIRST_RESULT:]
    memory = None if workspace is None else given_workspace(function, workspace, x, plan.form)
    if any(given) or memory is not None:
        names, results = told.names[_FIRST_RESULT:], arrays[_FIRST_RESULT:]
        _outputs.check_writable(function, names, results, given)
        _outputs.check_overlap(
            plan, pointers((*operands, memory)), None if memory is None else memory.form
        )

    for place, form in plan.made:
        operands[place] = allocate(function, x, form)
    if plan.form.where.samples:
        read = copied(told.names, operands, plan.to_copy, plan.where) if plan.to_copy else operands
        # As many as there are fields, which a list does not say.
        ran = run(GroupForward(plan.form, eps, *read, memory))  # type: ignore[call-arg]
        _again.remember(as_made, ran, operands, [place for place, _ in plan.made])
    return exported(operands[_FIRST_RESULT:])


@remembered
def asked(
    function: str, num_groups: Any, activation: Any, channel_axis: Any, dtype: Any, saves: bool
) -> Asked:
    """Check what the caller said by itself; `num_groups` may be EACH_CHANNEL."""
    results = (f"out.{name}" if saves else "out" for name in FIELDS)
    return Asked(
        function,
        None if num_groups is EACH_CHANNEL else _checks.integer(function, "num_groups", num_groups),
        optional_activation(function, activation),
        _checks.integer(function, "channel_axis", channel_axis),
        parse_optional_dtype(function, "dtype", dtype),
        saves,
        (*INPUTS, *results),
    )


@lru_cache(maxsize=1024)
def planned(asked: Asked, forms: OptionalForms) -> Plan:
    """Settle a call; the forms are in the order of its arrays."""
    function = asked.function
    inputs = dict(zip(INPUTS, forms, strict=False))
    given = dict(zip(FIELDS, forms[_FIRST_RESULT:], strict=True))
    x = forms[0]
    assert x is not None
    where = geometry(function, x, asked.num_groups, asked.channel_axis)
    for name in ("weight", "bias"):
        check_shape(function, name, inputs[name], where.channel_shape, "one for each channel")
    compute = FLOAT64 if x.dtype is FLOAT64 else FLOAT32
    _check_outputs(asked, where, given, compute)
    named = tuple(zip(asked.names, forms, strict=True))
    _checks.same_device(function, x, named)
    made = _made(asked, where, x, given, compute)
    results = {**given, **made}
    return Plan(
        _form(asked, inputs, results, where, compute),
        where,
        tuple(name for name in INPUTS if must_be_copied(name, inputs[name], where)),
        tuple((_FIRST_RESULT + FIELDS.index(name), form) for name, form in made.items()),
        _outputs.Overlaps(function, named, _FIRST_RESULT, ((asked.names[_FIRST_RESULT], ("x",)),)),
    )


def _check_outputs(
    asked: Asked, where: GroupGeometry, given: dict[str, Form | None], compute: DType
) -> None:
    """Check the arrays given for results."""
    function, argument = asked.function, asked.names[_FIRST_RESULT]
    check_result(function, argument, given["y"], where)
    _checks.agreed_dtype(function, "dtype", asked.dtype, argument, given["y"])
    for name in ("mean", "rstd"):
        check_statistic(function, f"out.{name}", given[name], where, compute)
        shape = where.statistic_shape
        _outputs.check_form(function, f"out.{name}", given[name], shape, WHOLE)


def _made(
    asked: Asked, where: GroupGeometry, x: Form, given: dict[str, Form | None], compute: DType
) -> dict[str, Form]:
    """Return the forms of the results to allocate."""
    made = {} if given["y"] else {"y": where.result(asked.dtype or x.dtype, x)}
    if asked.saves:
        statistic = contiguous_form(where.statistic_shape, compute, x.device)
        made |= {name: statistic for name in ("mean", "rstd") if given[name] is None}
    return made


def _form(
    asked: Asked,
    inputs: dict[str, Form | None],
    results: dict[str, Form | None],
    where: GroupGeometry,
    compute: DType,
) -> GroupForwardForm:
    x, y = inputs["x"], results["y"]
    assert x is not None
    assert y is not None
    types = GroupForwardTypes(
        compute=compute,
        x=x.dtype,
        y=y.dtype,
        weight=optional_dtype(inputs["weight"]),
        bias=optional_dtype(inputs["bias"]),
        activation=asked.activation,
    )
    strides = (lines(x, where), lines(y, where))
    return GroupForwardForm(where.where, types, strides, asked.channel_axis)
