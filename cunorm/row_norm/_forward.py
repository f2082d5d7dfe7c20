# SPDX-License-Identifier: MIT
"""The forward of every row norm: describe, check, allocate, run, hand back."""

from __future__ import annotations

from typing import Any, NamedTuple

from cunorm import _checks, _outputs
from cunorm._arrays import Operand, describe
from cunorm._backend import Forward, run_forward
from cunorm._checks import Geometry
from cunorm._dtypes import FLOAT32, FLOAT64, DType, parse_dtype
from cunorm.results import NormForward
from cunorm.row_norm._operands import allocate, contiguous, export, input_rows, output_rows


class Norm(NamedTuple):
    """Which norm is computed, as its caller asked for it."""

    function: str
    eps: float
    center: bool = False
    c: float | None = None
    eps_of_sum: bool = False  # eps is added to the sum of squares, not to their mean


class Options(NamedTuple):
    """What the caller said about axes, dtypes and results."""

    axis: int = -1
    dtype: Any = None
    residual_dtype: Any = None
    saves: bool = False  # mean and rstd are returned
    streams: bool = False  # without residual, x is the new residual stream


class _Inputs(NamedTuple):
    where: Geometry
    x: Operand
    residual: Operand | None
    weight: Operand | None
    bias: Operand | None


class _Dtypes(NamedTuple):
    compute: DType
    y: DType
    stream: DType | None  # of the new residual stream, None where there is none


def forward(
    norm: Norm, x: Any, residual: Any, weight: Any, bias: Any, options: Options, out: dict[str, Any]
) -> NormForward:
    """Run a forward; `out` has an array or None for each field of the result."""
    function = norm.function
    center = _checks.flag(function, "center", norm.center)
    eps = _checks.epsilon(function, norm.eps)
    inputs = _inputs(function, x, residual, weight, bias, options.axis)
    where = inputs.where
    k = _checks.scale(function, norm.c, where.width)
    argument = "out.{}" if options.saves or options.streams else "out"
    given = _given(function, where, center, out, argument)
    dtypes = _dtypes(function, inputs, options, given, argument)
    named_inputs = list(zip(_Inputs._fields[1:], inputs[1:], strict=True))
    named_outputs = [(argument.format(name), operand) for name, operand in given.items()]
    _checks.same_device(function, inputs.x, (*named_inputs, *named_outputs))
    in_place = _in_place(inputs, options, dtypes)
    _outputs.check_overlap(function, named_outputs, named_inputs, in_place)

    results = _allocated(function, inputs, given, dtypes, options.saves, center)
    if where.rows:
        call = Forward(
            where=where,
            x=_checks.layout_of(inputs.x, where),
            residual=input_rows(inputs.residual, where),
            weight=contiguous(inputs.weight),
            bias=contiguous(inputs.bias),
            y=output_rows(results["y"], where),
            new_residual=output_rows(results["residual"], where),
            mean=results["mean"],
            rstd=results["rstd"],
            compute=dtypes.compute,
            center=center,
            k=k,
            eps=eps / where.width if norm.eps_of_sum else eps,
        )
        run_forward(call)
    exported = {name: export(operand) for name, operand in results.items()}
    if exported["residual"] is None and _has_stream(options, dtypes):
        exported["residual"] = x
    return NormForward(**exported)


def _inputs(function: str, x: Any, residual: Any, weight: Any, bias: Any, axis: object) -> _Inputs:
    x_operand = describe(function, "x", x)
    where = _checks.geometry(function, x_operand, axis)
    inputs = _Inputs(
        where,
        x_operand,
        _checks.optional(function, "residual", residual),
        _checks.optional(function, "weight", weight),
        _checks.optional(function, "bias", bias),
    )
    _checks.same_shape(function, "residual", inputs.residual, where)
    _checks.param_shape(function, "weight", inputs.weight, where)
    _checks.param_shape(function, "bias", inputs.bias, where)
    return inputs


def _given(
    function: str, where: Geometry, center: bool, out: dict[str, Any], argument: str
) -> dict[str, Operand | None]:
    """Describe the arrays given for results; `argument` is how the caller calls them."""
    if not center:
        _outputs.refuse(function, "out.mean", out["mean"], "without center there is no mean")
    shapes = {
        "y": (where.shape, where.leading_axes),
        "residual": (where.shape, where.leading_axes),
        "mean": (where.leading_shape, 0),
        "rstd": (where.leading_shape, 0),
    }
    return {
        name: _outputs.given(function, argument.format(name), out[name], shape, leading_axes)
        for name, (shape, leading_axes) in shapes.items()
    }


def _dtypes(
    function: str,
    inputs: _Inputs,
    options: Options,
    given: dict[str, Operand | None],
    argument: str,
) -> _Dtypes:
    """Settle every result's dtype: by its array in `out`, else as asked, else as its input."""
    x = inputs.x.dtype
    asked = _asked(function, "dtype", options.dtype)
    _checks.agreed_dtype(function, "dtype", asked, argument.format("y"), given["y"])
    stream = _stream_dtype(function, inputs.residual, options.residual_dtype, given["residual"])
    compute = FLOAT64 if FLOAT64 in (x, stream) else FLOAT32
    for name in ("mean", "rstd"):
        _checks.statistic(function, f"out.{name}", given[name], inputs.where, compute)
    return _Dtypes(compute, given["y"].dtype if given["y"] else asked or x, stream)


def _stream_dtype(
    function: str, residual: Operand | None, residual_dtype: Any, given: Operand | None
) -> DType | None:
    """Return the dtype of the new residual stream: that of residual, else the one asked for."""
    asked = _asked(function, "residual_dtype", residual_dtype)
    _checks.agreed_dtype(function, "residual_dtype", asked, "residual", residual)
    if residual is not None:
        asked = residual.dtype
    _checks.agreed_dtype(function, "the new residual stream", asked, "out.residual", given)
    return given.dtype if given is not None else asked


def _has_stream(options: Options, dtypes: _Dtypes) -> bool:
    """Whether a residual stream is returned; where nothing had to be written, it is x itself."""
    return options.streams or dtypes.stream is not None


def _in_place(inputs: _Inputs, options: Options, dtypes: _Dtypes) -> dict[str, tuple[str, ...]]:
    """Return which inputs each result may be written over.

    The stream is written while weight and bias are still to be read. Where x itself is returned as
    the stream, y must leave it alone.
    """
    keeps_x = inputs.residual is None and _has_stream(options, dtypes)
    over_y = () if keeps_x else _Inputs._fields[1:]
    return {"out": over_y, "out.y": over_y, "out.residual": ("x", "residual")}


def _asked(function: str, argument: str, dtype: Any) -> DType | None:
    return None if dtype is None else parse_dtype(function, argument, dtype)


def _allocated(
    function: str,
    inputs: _Inputs,
    given: dict[str, Operand | None],
    dtypes: _Dtypes,
    saves: bool,
    center: bool,
) -> dict[str, Operand | None]:
    """Return an array for every result that is written."""
    x, where = inputs.x, inputs.where
    writes_stream = inputs.residual is not None or dtypes.stream not in (None, x.dtype)
    wanted = {
        "y": (where.shape, dtypes.y),
        "residual": (where.shape, dtypes.stream if writes_stream else None),
        "mean": (where.leading_shape, dtypes.compute if saves and center else None),
        "rstd": (where.leading_shape, dtypes.compute if saves else None),
    }
    results = dict(given)
    for name, (shape, dtype) in wanted.items():
        if results[name] is None and dtype is not None:
            results[name] = allocate(function, x, shape, dtype)
    return results
