# SPDX-License-Identifier: MIT
"""The backward of every row norm: describe, check, allocate, run, hand back."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from cunorm import _checks, _outputs
from cunorm._arrays import Form, Operand, contiguous_form, describe
from cunorm._backend import Backward, BackwardForm, run_backward
from cunorm._builds import BackwardTypes, ParamGradTypes
from cunorm._checks import Geometry
from cunorm._dtypes import FLOAT32, FLOAT64, DType, parse_optional_dtype
from cunorm.results import NormGrads
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

NEEDS = ("x", "weight", "bias", "gate")


class NormBackward(NamedTuple):
    """Which norm's gradients are computed, as their caller asked for them."""

    function: str
    center: bool = False
    c: float | None = None
    axis: int = -1
    x_dtype: Any = None
    needs: Any = NEEDS


class _Inputs(NamedTuple):
    dy: Operand
    x: Operand
    weight: Operand | None
    bias: Operand | None
    mean: Operand | None
    rstd: Operand
    d_residual: Operand | None


class _Forms(NamedTuple):
    dy: Form
    x: Form
    weight: Form | None
    bias: Form | None
    mean: Form | None
    rstd: Form
    d_residual: Form | None


class _Asked(NamedTuple):
    """What the caller said, checked by itself."""

    function: str
    center: bool
    c: float | None
    axis: int
    x_dtype: DType | None
    needs: frozenset[str]


class _Plan(NamedTuple):
    """What a call does."""

    form: BackwardForm
    to_copy: tuple[str, ...]  # the inputs that are brought into C order first
    made: tuple[tuple[str, Form], ...]  # the gradients to allocate


def backward(norm: NormBackward, arrays: dict[str, Any], out: dict[str, Any]) -> NormGrads:
    """Run a backward; `out` has an array or None for each field of the result."""
    asked = _asked(norm)
    inputs = _described(norm.function, arrays)
    given = _given(asked, inputs, out)
    plan = _planned(asked, _Forms._make(forms(inputs)), forms(given.values()))
    if given != _NOTHING:
        _check_overlap(norm.function, inputs, given)

    results = dict(given)
    for name, form in plan.made:
        results[name] = allocate(norm.function, inputs.x, form)
    if results != _NOTHING:
        run_backward(_call(asked, plan, inputs, results))
    return _exported(results)


def _call(
    asked: _Asked, plan: _Plan, inputs: _Inputs, results: dict[str, Operand | None]
) -> Backward:
    if plan.to_copy:
        inputs = inputs._replace(**{name: copied(getattr(inputs, name)) for name in plan.to_copy})
    types = plan.form.types
    return Backward(
        plan.form,
        k=_checks.scale(asked.c, plan.form.where.width),
        dy=inputs.dy,
        x=inputs.x,
        d_residual=None if types.d_residual is None else inputs.d_residual,
        dx=results["dx"],
        dresidual=results["dresidual"],
        weight=inputs.weight,
        mean=inputs.mean if types.center else None,
        rstd=inputs.rstd,
        dweight=results["dweight"],
        dbias=results["dbias"],
    )


def _exported(results: dict[str, Operand | None]) -> NormGrads:
    """Return the gradients; one of dx and dresidual stands for both where only it was written."""
    exported = {name: export(operand) for name, operand in results.items()}
    if exported["dx"] is None:
        exported["dx"] = exported["dresidual"]
    if exported["dresidual"] is None:
        exported["dresidual"] = exported["dx"]
    return NormGrads(**exported, dgate=None)


def _asked(norm: NormBackward) -> _Asked:
    function = norm.function
    return _Asked(
        function,
        _checks.flag(function, "center", norm.center),
        _checks.length(function, norm.c),
        _checks.integer(function, "axis", norm.axis),
        parse_optional_dtype(function, "x_dtype", norm.x_dtype),
        _checks.names(function, "needs", norm.needs, NEEDS),
    )


def _described(function: str, arrays: dict[str, Any]) -> _Inputs:
    return _Inputs(
        dy=describe(function, "dy", arrays["dy"]),
        x=describe(function, "x", arrays["x"]),
        weight=_checks.optional(function, "weight", arrays["weight"]),
        bias=_checks.optional(function, "bias", arrays["bias"]),
        mean=_checks.optional(function, "mean", arrays["mean"]),
        rstd=describe(function, "rstd", arrays["rstd"]),
        d_residual=_checks.optional(function, "d_residual", arrays["d_residual"]),
    )


@lru_cache(maxsize=1024)
def _planned(asked: _Asked, inputs: _Forms, given: tuple[Form | None, ...]) -> _Plan:
    """Check all that does not depend on where arrays lie; `given` is in the order of _NOTHING."""
    function = asked.function
    where = _checks.geometry(function, inputs.x, asked.axis)
    if asked.center and inputs.mean is None:
        raise ValueError(
            f"{function}: mean is None, expected the mean that the forward returned, "
            "as center is True"
        )
    _checks.same_shape(function, "dy", inputs.dy, where)
    _checks.same_shape(function, "d_residual", inputs.d_residual, where)
    _checks.param_shape(function, "weight", inputs.weight, where)
    _checks.param_shape(function, "bias", inputs.bias, where)
    outputs = dict(zip(_NOTHING, given, strict=True))
    x_dtype = _x_dtype(asked, inputs.x.dtype, outputs)
    compute = FLOAT64 if FLOAT64 in (inputs.x.dtype, x_dtype) else FLOAT32
    _checks.statistic(function, "mean", inputs.mean, where, compute)
    _checks.statistic(function, "rstd", inputs.rstd, where, compute)
    named_outputs = [(f"out.{name}", form) for name, form in outputs.items()]
    _checks.same_device(function, inputs.x, [*inputs._asdict().items(), *named_outputs])
    made = {
        name: contiguous_form(shape, dtype, inputs.x.device)
        for name, (shape, dtype) in _wanted(asked, inputs, outputs, where, x_dtype).items()
        if outputs[name] is None
    }
    read, axes = _read(asked, inputs), where.leading_axes
    leading_axes = {"dy": axes, "x": axes, "d_residual": axes, "weight": 0, "mean": 0, "rstd": 0}
    return _Plan(
        _form(asked, read, {**outputs, **made}, where, compute),
        to_copy(read._asdict(), leading_axes),
        tuple(made.items()),
    )


def _read(asked: _Asked, inputs: _Forms) -> _Forms:
    """Return the inputs that the kernels read; the others are as if absent."""
    return inputs._replace(
        bias=None,
        mean=inputs.mean if asked.center else None,
        d_residual=inputs.d_residual if "x" in asked.needs else None,
    )


def _form(
    asked: _Asked,
    read: _Forms,
    results: dict[str, Form | None],
    where: Geometry,
    compute: DType,
) -> BackwardForm:
    types = BackwardTypes(
        compute=compute,
        dy=read.dy.dtype,
        x=read.x.dtype,
        d_residual=optional_dtype(read.d_residual),
        dx=optional_dtype(results["dx"]),
        dresidual=optional_dtype(results["dresidual"]),
        weight=optional_dtype(read.weight),
        center=asked.center,
        dweight=results["dweight"] is not None,
        dbias=results["dbias"] is not None,
    )
    param_types = ParamGradTypes(
        compute, optional_dtype(results["dweight"]), optional_dtype(results["dbias"])
    )
    axes = where.leading_axes
    layouts = (
        input_layout(read.dy, axes),
        input_layout(read.x, axes),
        input_layout(read.d_residual, axes),
        output_layout(results["dx"], axes),
        output_layout(results["dresidual"], axes),
    )
    return BackwardForm(where, types, param_types, layouts)


def _check_overlap(function: str, inputs: _Inputs, given: dict[str, Operand | None]) -> None:
    """Check that arrays for gradients share no memory; each may be exactly an input."""
    outputs = [(f"out.{name}", operand) for name, operand in given.items()]
    in_place = {argument: _Inputs._fields for argument, _ in outputs}
    _outputs.check_overlap(function, outputs, list(inputs._asdict().items()), in_place)


_NOTHING: dict[str, Operand | None] = dict.fromkeys(("dx", "dresidual", "dweight", "dbias"))


def _given(asked: _Asked, inputs: _Inputs, out: dict[str, Any]) -> dict[str, Operand | None]:
    """Describe the arrays given for gradients; there must be such a gradient."""
    if all(array is None for array in out.values()):
        return _NOTHING
    function, needs = asked.function, asked.needs
    where = _checks.geometry(function, inputs.x.form, asked.axis)
    absent = {
        "dx": "x" not in needs,
        "dresidual": "x" not in needs,
        "dweight": "weight" not in needs or inputs.weight is None,
        "dbias": "bias" not in needs or inputs.bias is None,
        "dgate": True,
    }
    for name, is_absent in absent.items():
        if is_absent:
            reason = "its operand is absent or not in needs"
            _outputs.refuse(function, f"out.{name}", out[name], reason)
    rows, row = (where.shape, where.leading_axes), (where.row_shape, 0)
    expected = {"dx": rows, "dresidual": rows, "dweight": row, "dbias": row}
    return {
        name: _outputs.given(function, f"out.{name}", out[name], *shape_and_leading_axes)
        for name, shape_and_leading_axes in expected.items()
    }


def _x_dtype(asked: _Asked, stream: DType, given: dict[str, Form | None]) -> DType:
    """Return dx's dtype; dresidual has that of x, the stream that was normalised."""
    function, x_dtype, dx = asked.function, asked.x_dtype, given["dx"]
    _checks.agreed_dtype(function, "x_dtype", x_dtype, "out.dx", dx)
    _checks.agreed_dtype(function, "x", stream, "out.dresidual", given["dresidual"])
    if x_dtype is not None:
        return x_dtype
    return stream if dx is None else dx.dtype


def _wanted(
    asked: _Asked,
    inputs: _Forms,
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
    if "weight" in asked.needs and inputs.weight is not None:
        wanted["dweight"] = (where.row_shape, inputs.weight.dtype)
    if "bias" in asked.needs and inputs.bias is not None:
        wanted["dbias"] = (where.row_shape, inputs.bias.dtype)
    return wanted
