# SPDX-License-Identifier: MIT
"""The backward of every row norm: describe, check, allocate, run, hand back."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from cunorm import _checks, _outputs
from cunorm._arrays import Form, Operand, contiguous_form, describe
from cunorm._backend import run_backward
from cunorm._calls import Backward, BackwardForm
from cunorm._checks import Geometry
from cunorm._dtypes import FLOAT32, FLOAT64, DType, parse_optional_dtype
from cunorm._layout import WHOLE
from cunorm.results import NormGrads
from cunorm.row_norm._gradients import Reads, backward_form, read_inputs
from cunorm.row_norm._operands import allocate, copied, export, forms, to_copy
from cunorm.row_norm._variant import Variant, checked_offset, checked_variant
from cunorm.row_norm._workspace import given_workspace

NEEDS = ("x", "weight", "bias", "gate")


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


class Places(NamedTuple):
    """Where the caller wants results: an array or None for each gradient, and for partial sums."""

    out: dict[str, Any]
    workspace: Any = None


class _Inputs(NamedTuple):
    dy: Operand
    x: Operand
    rstd: Operand
    mean: Operand | None
    d_residual: Operand | None
    gate: Operand | None
    weight: Operand | None
    bias: Operand | None


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


class Asked(NamedTuple):
    """What the caller said, checked by itself; of the numbers, what changes the plan."""

    function: str
    variant: Variant
    has_offset: bool
    x_dtype: DType | None
    needs: frozenset[str]
    accumulate: bool


class _Plan(NamedTuple):
    """What a call does."""

    form: BackwardForm
    reads: Reads  # None for the inputs that are not read
    to_copy: tuple[str, ...]  # the inputs that are brought into C order first
    made: tuple[tuple[str, Form], ...]  # the gradients to allocate


def backward(norm: NormBackward, arrays: GradArrays, places: Places) -> NormGrads:
    """Run a backward; `places.out` has an array or None for each field of the result."""
    norm, asked = _asked(norm, arrays)
    inputs = _described(norm.function, arrays)
    given = _given(norm.function, places.out)
    plan = _planned(asked, Forms._make(forms(inputs)), forms(given))
    sums = given_workspace(norm.function, places.workspace, inputs.x, plan.form)
    if given is not _NOTHING or sums is not None:
        _check_overlap(norm.function, inputs, (*given, sums))

    results = dict(zip(_FIELDS, given, strict=True))
    for name, form in plan.made:
        results[name] = allocate(norm.function, inputs.x, form)
    if any(results.values()):
        run_backward(_call(norm, plan, inputs, results, sums))
    return _exported(results)


def _call(
    norm: NormBackward,
    plan: _Plan,
    inputs: _Inputs,
    results: dict[str, Operand | None],
    sums: Operand | None,
) -> Backward:
    if plan.to_copy:
        inputs = inputs._replace(**{name: copied(getattr(inputs, name)) for name in plan.to_copy})
    reads = plan.reads
    return Backward(
        plan.form,
        k=_checks.scale(norm.c, plan.form.where.walk.width),
        weight_offset=norm.weight_offset,
        dy=inputs.dy,
        x=inputs.x,
        d_residual=None if reads.d_residual is None else inputs.d_residual,
        gate=None if reads.gate is None else inputs.gate,
        dx=results["dx"],
        dresidual=results["dresidual"],
        dgate=results["dgate"],
        weight=None if reads.weight is None else inputs.weight,
        bias=None if reads.bias is None else inputs.bias,
        mean=None if reads.mean is None else inputs.mean,
        rstd=None if reads.rstd is None else inputs.rstd,
        dweight=results["dweight"],
        dbias=results["dbias"],
        sums=sums,
    )


def _exported(results: dict[str, Operand | None]) -> NormGrads:
    """Return the gradients; one of dx and dresidual stands for both where only it was written."""
    dx, dweight, dbias, dgate, dresidual = map(export, results.values())
    return NormGrads(
        dresidual if dx is None else dx,
        dweight,
        dbias,
        dgate,
        dx if dresidual is None else dresidual,
    )


def _asked(norm: NormBackward, arrays: GradArrays) -> tuple[NormBackward, Asked]:
    function, variant, c, weight_offset, x_dtype, needs, accumulate = norm
    variant = checked_variant(function, variant)
    offset = checked_offset(function, weight_offset, arrays.weight)
    asked = Asked(
        function,
        variant,
        offset != 0.0,
        parse_optional_dtype(function, "x_dtype", x_dtype),
        _checks.names(function, "needs", needs, NEEDS),
        _checks.flag(function, "accumulate", accumulate),
    )
    c = _checks.length(function, c)
    return NormBackward(function, variant, c, offset, x_dtype, needs, accumulate), asked


def _described(function: str, arrays: GradArrays) -> _Inputs:
    dy, x, rstd, mean, d_residual, gate, weight, bias = arrays
    return _Inputs(
        dy=describe(function, "dy", dy),
        x=describe(function, "x", x),
        rstd=describe(function, "rstd", rstd),
        mean=_checks.optional(function, "mean", mean),
        d_residual=_checks.optional(function, "d_residual", d_residual),
        gate=_checks.optional(function, "gate", gate),
        weight=_checks.optional(function, "weight", weight),
        bias=_checks.optional(function, "bias", bias),
    )


@lru_cache(maxsize=1024)
def _planned(asked: Asked, inputs: Forms, given: tuple[Form | None, ...]) -> _Plan:
    """Check all that does not depend on where arrays lie; `given` is in the order of _FIELDS."""
    function, variant = asked.function, asked.variant
    where = _checks.geometry(function, inputs.x, variant.axis, variant.groups)
    if variant.center and inputs.mean is None:
        raise ValueError(
            f"{function}: mean is None, expected the mean that the forward returned, "
            "as center is True"
        )
    for name in ("dy", "d_residual", "gate"):
        _checks.same_shape(function, name, getattr(inputs, name), where)
    _checks.param_shape(function, "weight", inputs.weight, where)
    _checks.param_shape(function, "bias", inputs.bias, where)
    outputs = dict(zip(_FIELDS, given, strict=True))
    if any(given):
        _check_outputs(asked, inputs, where, outputs)
    x_dtype = _x_dtype(asked, inputs.x.dtype, outputs)
    compute = FLOAT64 if FLOAT64 in (inputs.x.dtype, x_dtype) else FLOAT32
    _checks.statistic(function, "mean", inputs.mean, where, compute)
    _checks.statistic(function, "rstd", inputs.rstd, where, compute)
    named_outputs = [(f"out.{name}", form) for name, form in outputs.items()]
    _checks.same_device(function, inputs.x, [*inputs._asdict().items(), *named_outputs])
    wanted = _wanted(asked, inputs, outputs, where, x_dtype)
    if asked.accumulate:
        _check_accumulators(function, wanted, outputs)
    made = {
        name: contiguous_form(shape, dtype, inputs.x.device)
        for name, (shape, dtype) in wanted.items()
        if outputs[name] is None
    }
    results = {**outputs, **made}
    reads = read_inputs(variant, inputs, results)
    rows = dict.fromkeys(("dy", "x", "d_residual", "gate"), where.rows)
    whole = dict.fromkeys(("weight", "bias", "mean", "rstd"), WHOLE)
    return _Plan(
        backward_form(asked, reads, results, where, x_dtype, compute),
        reads,
        to_copy(reads._asdict(), {**rows, **whole}),
        tuple(made.items()),
    )


def _check_accumulators(
    function: str,
    wanted: dict[str, tuple[tuple[int, ...], DType]],
    given: dict[str, Form | None],
) -> None:
    """Check that there are arrays to which the parameters' gradients can be added."""
    for name in ("dweight", "dbias"):
        form = given[name]
        if name in wanted and (form is None or form.dtype not in (FLOAT32, FLOAT64)):
            got = "None" if form is None else f"of dtype {form.dtype}"
            raise ValueError(
                f"{function}: out.{name} is {got}, expected an array of float32 or float64 to add "
                "to, as accumulate is True"
            )


_FIELDS = NormGrads._fields
_NOTHING: tuple[Operand | None, ...] = (None,) * len(_FIELDS)
_ARGUMENTS = tuple(f"out.{name}" for name in _FIELDS)
_IN_PLACE = tuple((argument, _Inputs._fields) for argument in _ARGUMENTS)


def _given(function: str, out: dict[str, Any]) -> tuple[Operand | None, ...]:
    """Describe the arrays given for gradients."""
    if all(array is None for array in out.values()):
        return _NOTHING
    return _outputs.described(function, _ARGUMENTS, out.values())


def _check_overlap(function: str, inputs: _Inputs, outputs: tuple[Operand | None, ...]) -> None:
    """Check that arrays for gradients share no memory; each may be exactly an input."""
    _outputs.check_overlap(
        function,
        _outputs.places((*_ARGUMENTS, "workspace"), outputs),
        _outputs.places(_Inputs._fields, inputs),
        _IN_PLACE,
    )


def _check_outputs(
    asked: Asked, inputs: Forms, where: Geometry, outputs: dict[str, Form | None]
) -> None:
    """Check that there are such gradients, and that they can be written there."""
    operands = {"dx": "x", "dresidual": "x", "dweight": "weight", "dbias": "bias", "dgate": "gate"}
    rows, row = (where.shape, where.rows), (where.row_shape, WHOLE)
    expected = {"dx": rows, "dresidual": rows, "dweight": row, "dbias": row, "dgate": rows}
    for name, operand in operands.items():
        if operand not in asked.needs or getattr(inputs, operand) is None:
            reason = "its operand is absent or not in needs"
            _outputs.refuse(asked.function, f"out.{name}", outputs[name], reason)
        _outputs.check_form(asked.function, f"out.{name}", outputs[name], *expected[name])


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
    for name, shape in (
        ("weight", where.row_shape),
        ("bias", where.row_shape),
        ("gate", where.shape),
    ):
        operand = getattr(inputs, name)
        if name in asked.needs and operand is not None:
            wanted[f"d{name}"] = (shape, operand.dtype)
    return wanted
