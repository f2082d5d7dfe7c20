# SPDX-License-Identifier: MIT
"""The forward of every row norm: describe, check, allocate, run, hand back."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from cunorm import _checks, _outputs
from cunorm._arrays import Form, Operand, contiguous_form, describe
from cunorm._backend import run_forward
from cunorm._builds import ForwardTypes
from cunorm._calls import Forward, ForwardForm
from cunorm._checks import Geometry
from cunorm._dtypes import FLOAT32, FLOAT64, DType, parse_optional_dtype, promoted
from cunorm._layout import WHOLE
from cunorm.results import NormForward
from cunorm.row_norm._operands import (
    allocate,
    copied,
    export,
    forms,
    input_layout,
    optional_dtype,
    output_layout,
    to_copy,
)
from cunorm.row_norm._variant import Variant, checked_offset, checked_variant


class Norm(NamedTuple):
    """Which norm is computed, as its caller asked for it."""

    function: str
    variant: Variant
    eps: float
    c: float | None = None
    weight_offset: float = 0.0
    eps_of_sum: bool = False  # eps is added to the sum of squares, not to their mean


class Options(NamedTuple):
    """What the caller said about results."""

    dtype: Any = None
    residual_dtype: Any = None
    saves: bool = False  # mean and rstd are returned
    streams: bool = False  # without residual, x is the new residual stream


class Arrays(NamedTuple):
    """The arrays that the caller gave."""

    x: Any
    residual: Any = None
    gate: Any = None
    weight: Any = None
    bias: Any = None


class _Inputs(NamedTuple):
    x: Operand
    residual: Operand | None
    gate: Operand | None
    weight: Operand | None
    bias: Operand | None


class _Forms(NamedTuple):
    x: Form
    residual: Form | None
    gate: Form | None
    weight: Form | None
    bias: Form | None


class _Dtypes(NamedTuple):
    compute: DType
    y: DType
    stream: DType | None  # of the new residual stream, None where there is none


class _Asked(NamedTuple):
    """What the caller said, checked by itself; of the numbers, what changes the plan."""

    function: str
    variant: Variant
    has_offset: bool
    options: Options


class _Plan(NamedTuple):
    """What a call does."""

    form: ForwardForm
    to_copy: tuple[str, ...]  # the inputs that are brought into C order first
    made: tuple[tuple[str, Form], ...]  # the results to allocate
    has_stream: bool  # a residual stream is returned; where none had to be written, it is x itself


def forward(norm: Norm, arrays: Arrays, options: Options, out: dict[str, Any]) -> NormForward:
    """Run a forward; `out` has an array or None for each field of the result."""
    norm, asked = _asked(norm, arrays, options)
    inputs = _described(norm.function, arrays)
    given = _given(asked, out)
    plan = _planned(asked, _Forms._make(forms(inputs)), forms(given))
    if given is not _NOTHING:
        _check_overlap(asked, plan, inputs, given)

    results = dict(zip(_FIELDS, given, strict=True))
    for name, form in plan.made:
        results[name] = allocate(norm.function, inputs.x, form)
    if plan.form.where.walk.rows:
        run_forward(_call(norm, plan, inputs, results))
    exported = NormForward._make(map(export, results.values()))
    if plan.has_stream and exported.residual is None:
        return exported._replace(residual=arrays.x)
    return exported


def _call(norm: Norm, plan: _Plan, inputs: _Inputs, results: dict[str, Operand | None]) -> Forward:
    y = results["y"]
    assert y is not None
    if plan.to_copy:
        inputs = inputs._replace(**{name: copied(getattr(inputs, name)) for name in plan.to_copy})
    width = plan.form.where.walk.width
    return Forward(
        plan.form,
        k=_checks.scale(norm.c, width),
        eps=norm.eps / width if norm.eps_of_sum else norm.eps,
        weight_offset=norm.weight_offset,
        x=inputs.x,
        residual=inputs.residual,
        gate=inputs.gate,
        weight=inputs.weight,
        bias=inputs.bias,
        y=y,
        new_residual=results["residual"],
        mean=results["mean"],
        rstd=results["rstd"],
    )


def _asked(norm: Norm, arrays: Arrays, options: Options) -> tuple[Norm, _Asked]:
    """Check what the caller said by itself, and return it in the types that it is meant to have."""
    function, variant, eps, c, weight_offset, eps_of_sum = norm
    dtype, residual_dtype, saves, streams = options
    variant = checked_variant(function, variant)
    offset = checked_offset(function, weight_offset, arrays.weight)
    eps = _checks.epsilon(function, eps)
    norm = Norm(function, variant, eps, _checks.length(function, c), offset, eps_of_sum)
    options = Options(
        parse_optional_dtype(function, "dtype", dtype),
        parse_optional_dtype(function, "residual_dtype", residual_dtype),
        saves,
        streams,
    )
    return norm, _Asked(function, variant, offset != 0.0, options)


def _described(function: str, arrays: Arrays) -> _Inputs:
    x, residual, gate, weight, bias = arrays
    return _Inputs(
        describe(function, "x", x),
        _checks.optional(function, "residual", residual),
        _checks.optional(function, "gate", gate),
        _checks.optional(function, "weight", weight),
        _checks.optional(function, "bias", bias),
    )


@lru_cache(maxsize=1024)
def _planned(asked: _Asked, inputs: _Forms, given: tuple[Form | None, ...]) -> _Plan:
    """Check all that does not depend on where arrays lie; `given` is in the order of _FIELDS."""
    function, variant, _, options = asked
    where = _checks.geometry(function, inputs.x, variant.axis, variant.groups)
    _checks.same_shape(function, "residual", inputs.residual, where)
    _checks.same_shape(function, "gate", inputs.gate, where)
    _checks.param_shape(function, "weight", inputs.weight, where)
    _checks.param_shape(function, "bias", inputs.bias, where)
    outputs = dict(zip(_FIELDS, given, strict=True))
    if any(given):
        _check_outputs(asked, where, outputs)
    dtypes = _dtypes(asked, inputs, outputs)
    for name in ("mean", "rstd"):
        _checks.statistic(function, f"out.{name}", outputs[name], where, dtypes.compute)
    named_outputs = [(_argument(options, name), form) for name, form in outputs.items()]
    _checks.same_device(function, inputs.x, [*inputs._asdict().items(), *named_outputs])
    made = {
        name: contiguous_form(shape, dtype, inputs.x.device)
        for name, (shape, dtype) in _wanted(asked, inputs, where, dtypes).items()
        if outputs[name] is None and dtype is not None
    }
    rows = dict.fromkeys(("x", "residual", "gate"), where.rows)
    return _Plan(
        _form(asked, inputs, {**outputs, **made}, where, dtypes.compute),
        to_copy(inputs._asdict(), {**rows, "weight": WHOLE, "bias": WHOLE}),
        tuple(made.items()),
        has_stream=options.streams or dtypes.stream is not None,
    )


def _form(
    asked: _Asked,
    inputs: _Forms,
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


_FIELDS = NormForward._fields
_NOTHING: tuple[Operand | None, ...] = (None,) * len(_FIELDS)


def _argument(options: Options, name: str) -> str:
    """Return how the caller calls the array for a result."""
    return f"out.{name}" if options.saves or options.streams else "out"


def _given(asked: _Asked, out: dict[str, Any]) -> tuple[Operand | None, ...]:
    """Describe the arrays given for results."""
    if all(array is None for array in out.values()):
        return _NOTHING
    arguments = [_argument(asked.options, name) for name in out]
    return _outputs.described(asked.function, arguments, out.values())


def _check_outputs(asked: _Asked, where: Geometry, outputs: dict[str, Form | None]) -> None:
    """Check that there are such results, and that they can be written there."""
    function = asked.function
    if not asked.variant.center:
        _outputs.refuse(function, "out.mean", outputs["mean"], "without center there is no mean")
    rows, statistics = (where.shape, where.rows), (where.leading_shape, WHOLE)
    expected = {"y": rows, "residual": rows, "mean": statistics, "rstd": statistics}
    for name, (shape, rows_of) in expected.items():
        argument = _argument(asked.options, name)
        _outputs.check_form(function, argument, outputs[name], shape, rows_of)


def _dtypes(asked: _Asked, inputs: _Forms, given: dict[str, Form | None]) -> _Dtypes:
    """Settle every result's dtype: by its array in `out`, else as asked, else as its input."""
    function, options = asked.function, asked.options
    x, y = inputs.x.dtype, given["y"]
    _checks.agreed_dtype(function, "dtype", options.dtype, _argument(options, "y"), y)
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


def _check_overlap(
    asked: _Asked, plan: _Plan, inputs: _Inputs, given: tuple[Operand | None, ...]
) -> None:
    """Check that arrays for results share no memory, but exactly that of some inputs.

    The stream is written while gate, weight and bias are still to be read. Where x itself is
    returned as the stream, y must leave it alone.
    """
    keeps_x = inputs.residual is None and plan.has_stream
    y = _argument(asked.options, "y")
    in_place = ((y, () if keeps_x else _Inputs._fields), ("out.residual", ("x", "residual")))
    arguments = [_argument(asked.options, name) for name in _FIELDS]
    _outputs.check_overlap(
        asked.function,
        _outputs.places(arguments, given),
        _outputs.places(_Inputs._fields, inputs),
        in_place,
    )


def _wanted(
    asked: _Asked, inputs: _Forms, where: Geometry, dtypes: _Dtypes
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
