# SPDX-License-Identifier: MIT
"""What a forward does, settled and checked by the forms of its arrays, once for all like them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from cunorm import _checks, _outputs
from cunorm._arrays import Form, contiguous_form
from cunorm._builds import ForwardTypes
from cunorm._calls import ForwardForm
from cunorm._checks import Geometry
from cunorm._dtypes import FLOAT32, FLOAT64, DType, parse_optional_dtype, promoted
from cunorm._layout import WHOLE
from cunorm._operands import input_layout, optional_dtype, output_layout, to_copy
from cunorm._remembered import remembered
from cunorm.results import NormForward
from cunorm.row_norm._variant import Variant, checked_variant

FIELDS = NormForward._fields

OptionalForms = tuple[Form | None, ...]


class Options(NamedTuple):
    """What the caller said about results."""

    dtype: Any = None
    residual_dtype: Any = None
    saves: bool = False  # mean and rstd are returned
    # Whether without residual x is the new residual stream; None where there is never a stream.
    streams: bool | None = False


class Forms(NamedTuple):
    """The forms of the inputs."""

    x: Form
    residual: Form | None
    gate: Form | None
    weight: Form | None
    bias: Form | None


FIRST_RESULT = len(Forms._fields)  # its place among all arrays, inputs and results


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What the caller said, checked by itself: one object for all who say the same."""

    function: str
    variant: Variant
    has_offset: bool
    options: Options
    names: tuple[str, ...]  # how the caller calls each array, inputs and results
    has_stream: bool  # a residual stream is returned even if none has to be written: x itself

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return how the caller calls the array for each result."""
        return self.names[FIRST_RESULT:]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a call does."""

    form: ForwardForm
    to_copy: tuple[str, ...]  # the inputs that are brought into C order first
    made: tuple[tuple[int, Form], ...]  # the results to allocate, by their place among all arrays
    overlaps: _outputs.Overlaps


class _Dtypes(NamedTuple):
    compute: DType
    y: DType
    stream: DType | None  # of the new residual stream, None where there is none


def asked(function: str, variant: Variant, has_offset: bool, options: Options) -> Asked:
    """Check what the caller said by itself."""
    return _asked(function, *variant, has_offset, *options)


@remembered
def _asked(function: str, *said: Any) -> Asked:
    *variant, has_offset, dtype, residual_dtype, saves, streams = said
    options = Options(
        parse_optional_dtype(function, "dtype", dtype),
        parse_optional_dtype(function, "residual_dtype", residual_dtype),
        saves,
        streams,
    )
    of_tuple = saves or streams
    arguments = (f"out.{name}" if of_tuple else "out" for name in FIELDS)
    return Asked(
        function,
        checked_variant(function, Variant(*variant)),
        has_offset,
        options,
        names=(*Forms._fields, *arguments),
        has_stream=bool(streams) or options.residual_dtype is not None,
    )


@lru_cache(maxsize=1024)
def planned(asked: Asked, forms: OptionalForms) -> Plan:
    """Settle a call; the forms of inputs are in the order of Forms, then of results in FIELDS'."""
    function, variant = asked.function, asked.variant
    inputs, given = forms[:FIRST_RESULT], forms[FIRST_RESULT:]
    operands = Forms(*inputs)  # type: ignore[arg-type]  # x is there
    where = _checks.geometry(function, operands.x, variant.axis, variant.groups)
    _checks.same_shape(function, "residual", operands.residual, where)
    _checks.same_shape(function, "gate", operands.gate, where)
    _checks.param_shape(function, "weight", operands.weight, where)
    _checks.param_shape(function, "bias", operands.bias, where)
    outputs = dict(zip(FIELDS, given, strict=True))
    _check_outputs(asked, where, outputs)
    dtypes = _dtypes(asked, operands, outputs)
    for name in ("mean", "rstd"):
        _checks.statistic(function, f"out.{name}", outputs[name], where, dtypes.compute)
    named = tuple(zip(asked.names, forms, strict=True))
    _checks.same_device(function, operands.x, named)
    made = {
        name: contiguous_form(shape, dtype, operands.x.device)
        for name, (shape, dtype) in _wanted(asked, operands, where, dtypes).items()
        if outputs[name] is None and dtype is not None
    }
    rows = dict.fromkeys(("x", "residual", "gate"), where.rows)
    results = {**outputs, **made}
    return Plan(
        _form(asked, operands, results, where, dtypes.compute),
        to_copy(operands._asdict(), {**rows, "weight": WHOLE, "bias": WHOLE}),
        tuple((FIRST_RESULT + FIELDS.index(name), form) for name, form in made.items()),
        _outputs.Overlaps(
            function,
            named,
            FIRST_RESULT,
            _in_place(asked, keeps_x=asked.has_stream and results.get("residual") is None),
        ),
    )


@lru_cache(maxsize=1024)  # where arrays lie comes again as their forms do
def check_overlap(plan: Plan, pointers: tuple[int, ...]) -> None:
    """Check that no array given for a result shares memory with another."""
    plan.overlaps.check(pointers)


def _in_place(asked: Asked, keeps_x: bool) -> _outputs.InPlace:
    """Return the inputs that a result may be exactly.

    The stream is written while gate, weight and bias are still to be read. Where x itself is
    returned as the stream, y must leave it alone; where the stream is written, x is not read again.
    """
    over_y = Forms._fields[1:] if keeps_x else Forms._fields
    return ((asked.arguments[0], over_y), ("out.residual", ("x", "residual")))


def _check_outputs(asked: Asked, where: Geometry, outputs: dict[str, Form | None]) -> None:
    """Check that there are such results, and that they can be written there."""
    function = asked.function
    if not asked.variant.center:
        _outputs.refuse(function, "out.mean", outputs["mean"], "without center there is no mean")
    if asked.options.streams is None:
        _outputs.refuse(function, "out.residual", outputs["residual"], "there is no residual")
    rows, statistics = (where.shape, where.rows), (where.leading_shape, WHOLE)
    expected = {"y": rows, "residual": rows, "mean": statistics, "rstd": statistics}
    for argument, (name, (shape, rows_of)) in zip(asked.arguments, expected.items(), strict=True):
        _outputs.check_form(function, argument, outputs[name], shape, rows_of)


def _form(
    asked: Asked,
    inputs: Forms,
    results: dict[str, Form | None],
    where: Geometry,
    compute: DType,
) -> ForwardForm:
    y, new_residual = results["y"], results["residual"]
    assert y is not None
    types = ForwardTypes(
        compute=compute,
        x=inputs.x.dtype,
        residual=optional_dtype(inputs.residual),
        gate=optional_dtype(inputs.gate),
        new_residual=optional_dtype(new_residual),
        weight=optional_dtype(inputs.weight),
        bias=optional_dtype(inputs.bias),
        y=y.dtype,
        formula=asked.variant.formula(
            gate=inputs.gate, offset=asked.has_offset, x_dtype=inputs.x.dtype, compute=compute
        ),
    )
    layouts = (
        input_layout(inputs.x, where.rows),
        input_layout(inputs.residual, where.rows),
        input_layout(inputs.gate, where.rows),
        output_layout(y, where.rows),
        output_layout(new_residual, where.rows),
    )
    return ForwardForm(where, types, layouts)


def _dtypes(asked: Asked, inputs: Forms, given: dict[str, Form | None]) -> _Dtypes:
    """Settle every result's dtype: by its array in `out`, else as asked, else as its input."""
    function, options = asked.function, asked.options
    x, y = inputs.x.dtype, given["y"]
    _checks.agreed_dtype(function, "dtype", options.dtype, asked.arguments[0], y)
    stream = _stream_dtype(function, options.residual_dtype, inputs.residual, given["residual"])
    compute = FLOAT64 if FLOAT64 in (x, stream) else FLOAT32
    default = x
    if asked.variant.round_before_weight and inputs.weight is not None:
        default = promoted(x, inputs.weight.dtype)
    return _Dtypes(compute, y.dtype if y is not None else options.dtype or default, stream)


def _stream_dtype(
    function: str, asked: DType | None, residual: Form | None, given: Form | None
) -> DType | None:
    """Return the dtype of the new residual stream: that of residual, else the one asked for."""
    _checks.agreed_dtype(function, "residual_dtype", asked, "residual", residual)
    if residual is not None:
        asked = residual.dtype
    _checks.agreed_dtype(function, "the new residual stream", asked, "out.residual", given)
    return given.dtype if given is not None else asked


def _wanted(
    asked: Asked, inputs: Forms, where: Geometry, dtypes: _Dtypes
) -> dict[str, tuple[tuple[int, ...], DType | None]]:
    """Return the shape of every result, and its dtype, None where it is not written."""
    writes_stream = inputs.residual is not None or dtypes.stream not in (None, inputs.x.dtype)
    statistic = dtypes.compute if asked.options.saves else None
    return {
        "y": (where.shape, dtypes.y),
        "residual": (where.shape, dtypes.stream if writes_stream else None),
        "mean": (where.leading_shape, statistic if asked.variant.center else None),
        "rstd": (where.leading_shape, statistic),
    }
