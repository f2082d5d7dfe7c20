# SPDX-License-Identifier: MIT
"""What a group norm's backward does, settled by the forms of its arrays, once for all like them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cunorm import _checks, _outputs
from cunorm._arrays import Form, contiguous_form
from cunorm._builds import ParamGradTypes
from cunorm._dtypes import FLOAT32, FLOAT64, DType
from cunorm._layout import WHOLE
from cunorm._operands import optional_dtype
from cunorm._remembered import remembered
from cunorm.group_norm._builds import GroupBackwardTypes
from cunorm.group_norm._calls import GroupBackwardForm
from cunorm.group_norm._layout import GroupGeometry, geometry
from cunorm.group_norm._operands import (
    check_result,
    check_shape,
    check_statistic,
    lines,
    must_be_copied,
    optional_activation,
)
from cunorm.results import GroupNormGrads

NEEDS = ("x", "weight", "bias")
INPUTS = ("dy", "x", "mean", "rstd", "weight", "bias")
FIELDS = GroupNormGrads._fields
ARGUMENTS = tuple(f"out.{name}" for name in FIELDS)
NAMES = (*INPUTS, *ARGUMENTS)  # of all arrays, inputs and results
FIRST_RESULT = len(INPUTS)  # its place among them
# Of each result, by its place, the place of an operand that may have its form.
OPERAND_OF = {FIRST_RESULT + i: INPUTS.index(name) for i, name in enumerate(NEEDS)}
_IN_PLACE = (("out.dx", ("dy", "x")),)

Forms = dict[str, Form | None]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What the caller said, checked by itself: one object for all who say the same."""

    function: str
    num_groups: int
    activation: str
    channel_axis: int
    needs: frozenset[str]
    accumulate: bool


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a call does."""

    form: GroupBackwardForm
    where: GroupGeometry
    to_copy: tuple[str, ...]  # the inputs that are copied first
    made: tuple[tuple[int, Form], ...]  # the gradients to allocate, by their place in NAMES
    overlaps: _outputs.Overlaps
    is_empty: bool  # no gradient is wanted


def asked(
    function: str, num_groups: Any, activation: Any, channel_axis: Any, needs: Any, accumulate: Any
) -> Asked:
    """Check what the caller said by itself."""
    if type(needs) is not tuple:  # what could not be remembered, or would be as another type
        needs = tuple(sorted(_checks.names(function, "needs", needs, NEEDS)))
    return _asked(function, num_groups, activation, channel_axis, needs, accumulate)


@remembered
def _asked(
    function: str, num_groups: Any, activation: Any, channel_axis: Any, needs: Any, accumulate: Any
) -> Asked:
    return Asked(
        function,
        _checks.integer(function, "num_groups", num_groups),
        optional_activation(function, activation),
        _checks.integer(function, "channel_axis", channel_axis),
        _checks.names(function, "needs", needs, NEEDS),
        _checks.flag(function, "accumulate", accumulate),
    )


@lru_cache(maxsize=1024)
def planned(asked: Asked, forms: tuple[Form | None, ...]) -> Plan:
    """Settle a call; the forms are in the order of NAMES."""
    function = asked.function
    inputs: Forms = dict(zip(INPUTS, forms, strict=False))
    given: Forms = dict(zip(FIELDS, forms[FIRST_RESULT:], strict=True))
    x = forms[1]
    assert x is not None
    where = geometry(function, x, asked.num_groups, asked.channel_axis)
    compute = FLOAT64 if x.dtype is FLOAT64 else FLOAT32
    _check_inputs(function, inputs, where, compute)
    _check_outputs(asked, inputs, where, given)
    named = tuple(zip(NAMES, forms, strict=True))
    _checks.same_device(function, x, named)
    wanted = _wanted(asked, inputs, where)
    if asked.accumulate:
        _outputs.check_accumulators(function, wanted, given)
    made = {name: form for name, form in wanted.items() if given[name] is None}
    results = {**given, **made}
    form, reads = _form(asked, inputs, results, where, compute)
    return Plan(
        form,
        where,
        tuple(name for name, read in reads.items() if must_be_copied(name, read, where)),
        tuple((FIRST_RESULT + FIELDS.index(name), form) for name, form in made.items()),
        _outputs.Overlaps(function, named, FIRST_RESULT, _IN_PLACE),
        not any(results.values()),
    )


def _check_inputs(function: str, inputs: Forms, where: GroupGeometry, compute: DType) -> None:
    check_shape(function, "dy", inputs["dy"], where.shape, "the shape of x")
    for name in ("weight", "bias"):
        check_shape(function, name, inputs[name], where.channel_shape, "one for each channel")
    for name in ("mean", "rstd"):
        check_statistic(function, name, inputs[name], where, compute)


def _check_outputs(asked: Asked, inputs: Forms, where: GroupGeometry, given: Forms) -> None:
    """Check that there are such gradients, and that they can be written there."""
    function = asked.function
    for name, operand in zip(FIELDS, NEEDS, strict=True):
        if operand not in asked.needs or inputs[operand] is None:
            reason = "its operand is absent or not in needs"
            _outputs.refuse(function, f"out.{name}", given[name], reason)
    check_result(function, "out.dx", given["dx"], where)
    for name in ("dweight", "dbias"):
        _outputs.check_form(function, f"out.{name}", given[name], where.channel_shape, WHOLE)


def _wanted(asked: Asked, inputs: Forms, where: GroupGeometry) -> dict[str, Form]:
    """Return the forms of the gradients that are written, as they are where none is given."""
    x, wanted = inputs["x"], {}
    assert x is not None
    if "x" in asked.needs:
        wanted["dx"] = where.result(x.dtype, x)
    for name in ("weight", "bias"):
        parameter = inputs[name]
        if name in asked.needs and parameter is not None:
            wanted[f"d{name}"] = contiguous_form(where.channel_shape, parameter.dtype, x.device)
    return wanted


def _form(
    asked: Asked, inputs: Forms, results: Forms, where: GroupGeometry, compute: DType
) -> tuple[GroupBackwardForm, Forms]:
    """Return the form of the kernels' call, and the inputs that it reads."""
    needs_n = asked.activation != "identity"
    read = {
        **inputs,
        "weight": inputs["weight"] if needs_n or results["dx"] else None,
        "bias": inputs["bias"] if needs_n else None,
    }
    dy, x = read["dy"], read["x"]
    assert dy is not None
    assert x is not None
    types = GroupBackwardTypes(
        compute=compute,
        dy=dy.dtype,
        x=x.dtype,
        dx=optional_dtype(results["dx"]),
        weight=optional_dtype(read["weight"]),
        bias=optional_dtype(read["bias"]),
        dweight=results["dweight"] is not None,
        dbias=results["dbias"] is not None,
        activation=asked.activation,
    )
    param_types = ParamGradTypes(
        compute,
        optional_dtype(results["dweight"]),
        optional_dtype(results["dbias"]),
        asked.accumulate,
    )
    strides = tuple(lines(form, where) for form in (dy, x, results["dx"]))
    form = GroupBackwardForm(where.where, types, param_types, strides, asked.channel_axis)
    return form, read
