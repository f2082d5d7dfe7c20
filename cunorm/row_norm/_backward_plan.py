# SPDX-License-Identifier: MIT
"""What a backward does, settled and checked by the forms of its arrays, once for all like them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from cunorm import _checks, _outputs
from cunorm._arrays import Form, contiguous_form
from cunorm._calls import BackwardForm
from cunorm._checks import Geometry
from cunorm._dtypes import FLOAT32, FLOAT64, DType, parse_optional_dtype
from cunorm._layout import WHOLE
from cunorm._operands import to_copy
from cunorm._remembered import remembered
from cunorm.results import NormGrads
from cunorm.row_norm._gradients import backward_form, read_inputs
from cunorm.row_norm._variant import Variant, checked_variant

NEEDS = ("x", "weight", "bias", "gate")
FIELDS = NormGrads._fields
ARGUMENTS = tuple(f"out.{name}" for name in FIELDS)
_OPERANDS = ("x", "weight", "bias", "gate", "x")  # whose gradients the fields are

OptionalForms = tuple[Form | None, ...]


class Forms(NamedTuple):
    """The forms of the inputs."""

    dy: Form
    x: Form
    rstd: Form
    mean: Form | None
    d_residual: Form | None
    gate: Form | None
    weight: Form | None
    bias: Form | None


NAMES = (*Forms._fields, *ARGUMENTS)  # of all arrays, inputs and results
FIRST_RESULT = len(Forms._fields)  # its place among them
# Of each result, by its place, the place of an operand that may have its form.
OPERAND_OF = {
    FIRST_RESULT + FIELDS.index(result): Forms._fields.index(operand)
    for result, operand in (
        ("dx", "x"),
        ("dweight", "weight"),
        ("dbias", "bias"),
        ("dgate", "gate"),
        ("dresidual", "x"),
    )
}
# A gradient may be exactly any input: nobody reads an element of that after it is written.
_IN_PLACE = tuple((argument, Forms._fields) for argument in ARGUMENTS)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What the caller said, checked by itself: one object for all who say the same."""

    function: str
    variant: Variant
    has_offset: bool
    x_dtype: DType | None
    needs: frozenset[str]
    accumulate: bool


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a call does."""

    form: BackwardForm
    to_copy: tuple[str, ...]  # the inputs that are brought into C order first
    made: tuple[tuple[int, Form], ...]  # the gradients to allocate, by their place in NAMES
    overlaps: _outputs.Overlaps
    is_empty: bool  # no gradient is wanted


def asked(
    function: str, variant: Variant, has_offset: bool, x_dtype: Any, needs: Any, accumulate: Any
) -> Asked:
    """Check what the caller said by itself."""
    if type(needs) is not tuple:  # what could not be remembered, or would be as another type
        needs = tuple(sorted(_checks.names(function, "needs", needs, NEEDS)))
    return _asked(function, *variant, has_offset, x_dtype, needs, accumulate)


@remembered
def _asked(function: str, *said: Any) -> Asked:
    *variant, has_offset, x_dtype, needs, accumulate = said
    return Asked(
        function,
        checked_variant(function, Variant(*variant)),
        has_offset,
        parse_optional_dtype(function, "x_dtype", x_dtype),
        _checks.names(function, "needs", needs, NEEDS),
        _checks.flag(function, "accumulate", accumulate),
    )


@lru_cache(maxsize=1024)
def planned(asked: Asked, forms: OptionalForms) -> Plan:
    """Settle a call; the forms are in the order of NAMES."""
    function, variant = asked.function, asked.variant
    inputs, given = forms[:FIRST_RESULT], forms[FIRST_RESULT:]
    operands = Forms(*inputs)  # type: ignore[arg-type]  # the first three are there
    where = _checks.geometry(function, operands.x, variant.axis, variant.groups)
    _check_inputs(asked, operands, where)
    outputs = dict(zip(FIELDS, given, strict=True))
    _check_outputs(asked, operands, where, outputs)
    x_dtype = _x_dtype(asked, operands.x.dtype, outputs)
    compute = FLOAT64 if FLOAT64 in (operands.x.dtype, x_dtype) else FLOAT32
    _checks.statistic(function, "mean", operands.mean, where, compute)
    _checks.statistic(function, "rstd", operands.rstd, where, compute)
    named = tuple(zip(NAMES, forms, strict=True))
    _checks.same_device(function, operands.x, named)
    wanted = _wanted(asked, operands, outputs, where, x_dtype)
    if asked.accumulate:
        _outputs.check_accumulators(function, wanted, outputs)
    made = {
        name: contiguous_form(shape, dtype, operands.x.device)
        for name, (shape, dtype) in wanted.items()
        if outputs[name] is None
    }
    results = {**outputs, **made}
    reads = read_inputs(variant, operands, results)
    rows = dict.fromkeys(("dy", "x", "d_residual", "gate"), where.rows)
    whole = dict.fromkeys(("weight", "bias", "mean", "rstd"), WHOLE)
    return Plan(
        backward_form(asked, reads, results, where, x_dtype, compute),
        to_copy(reads._asdict(), {**rows, **whole}),
        tuple((FIRST_RESULT + FIELDS.index(name), form) for name, form in made.items()),
        _outputs.Overlaps(function, named, FIRST_RESULT, _IN_PLACE),
        not any(results.values()),
    )


def _check_inputs(asked: Asked, inputs: Forms, where: Geometry) -> None:
    function = asked.function
    if asked.variant.center and inputs.mean is None:
        raise ValueError(
            f"{function}: mean is None, expected the mean that the forward returned, "
            "as center is True"
        )
    for name in ("dy", "d_residual", "gate"):
        _checks.same_shape(function, name, getattr(inputs, name), where)
    _checks.param_shape(function, "weight", inputs.weight, where)
    _checks.param_shape(function, "bias", inputs.bias, where)


def _check_outputs(
    asked: Asked, inputs: Forms, where: Geometry, outputs: dict[str, Form | None]
) -> None:
    """Check that there are such gradients, and that they can be written there."""
    rows, row = (where.shape, where.rows), (where.row_shape, WHOLE)
    for name, operand in zip(FIELDS, _OPERANDS, strict=True):
        if operand not in asked.needs or getattr(inputs, operand) is None:
            reason = "its operand is absent or not in needs"
            _outputs.refuse(asked.function, f"out.{name}", outputs[name], reason)
        expected = row if operand in ("weight", "bias") else rows
        _outputs.check_form(asked.function, f"out.{name}", outputs[name], *expected)


def _x_dtype(asked: Asked, stream: DType, given: dict[str, Form | None]) -> DType:
    """Return dx's dtype; dresidual has that of x, the stream that was normalised."""
    function, x_dtype, dx = asked.function, asked.x_dtype, given["dx"]
    _checks.agreed_dtype(function, "x_dtype", x_dtype, "out.dx", dx)
    _checks.agreed_dtype(function, "x", stream, "out.dresidual", given["dresidual"])
    if x_dtype is not None:
        return x_dtype
    return stream if dx is None else dx.dtype


def _wanted(
    asked: Asked,
    inputs: Forms,
    given: dict[str, Form | None],
    where: Geometry,
    x_dtype: DType,
) -> dict[str, tuple[tuple[int, ...], DType]]:
    """Return the shape and dtype of every gradient that is written."""
    stream, wanted = inputs.x.dtype, {}
    if "x" in asked.needs and (x_dtype is not stream or given["dresidual"] is None):
        wanted["dx"] = (where.shape, x_dtype)
    if "x" in asked.needs and x_dtype is not stream:
        wanted["dresidual"] = (where.shape, stream)
    shapes = {"weight": where.row_shape, "bias": where.row_shape, "gate": where.shape}
    for name, shape in shapes.items():
        operand = getattr(inputs, name)
        if name in asked.needs and operand is not None:
            wanted[f"d{name}"] = (shape, operand.dtype)
    return wanted
