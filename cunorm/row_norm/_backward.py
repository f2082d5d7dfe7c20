# SPDX-License-Identifier: MIT
"""The backward of every row norm: describe, check, allocate, run, hand back."""

from __future__ import annotations

from typing import Any, NamedTuple

from cunorm import _checks, _outputs
from cunorm._arrays import Operand, describe
from cunorm._backend import Backward, run_backward
from cunorm._checks import Geometry
from cunorm._dtypes import FLOAT32, FLOAT64, DType, parse_dtype
from cunorm.results import NormGrads
from cunorm.row_norm._operands import allocate, contiguous, export, input_rows, output_rows

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
    where: Geometry
    dy: Operand
    x: Operand
    weight: Operand | None
    bias: Operand | None
    mean: Operand | None
    rstd: Operand
    d_residual: Operand | None


def backward(norm: NormBackward, arrays: dict[str, Any], out: dict[str, Any]) -> NormGrads:
    """Run a backward; `out` has an array or None for each field of the result."""
    function = norm.function
    center = _checks.flag(function, "center", norm.center)
    needs = _checks.names(function, "needs", norm.needs, NEEDS)
    inputs = _inputs(function, center, norm.axis, arrays)
    where = inputs.where
    k = _checks.scale(function, norm.c, where.width)
    given = _given(function, inputs, needs, out)
    x_dtype = _x_dtype(function, norm.x_dtype, inputs, given)
    compute = FLOAT64 if FLOAT64 in (inputs.x.dtype, x_dtype) else FLOAT32
    for name, operand in (("mean", inputs.mean), ("rstd", inputs.rstd)):
        _checks.statistic(function, name, operand, where, compute)
    named_inputs = list(zip(_Inputs._fields[1:], inputs[1:], strict=True))
    named_outputs = [
        (f"out.{name}", operand) for name, operand in given.items() if operand is not None
    ]
    _checks.same_device(function, inputs.x, (*named_inputs, *named_outputs))
    in_place = {argument: _Inputs._fields[1:] for argument, _ in named_outputs}
    _outputs.check_overlap(function, named_outputs, named_inputs, in_place)

    results = _allocated(function, inputs, given, needs, x_dtype)
    rstd = contiguous(inputs.rstd)
    assert rstd is not None
    call = Backward(
        where=where,
        dy=_checks.layout_of(inputs.dy, where),
        x=_checks.layout_of(inputs.x, where),
        d_residual=input_rows(inputs.d_residual if "x" in needs else None, where),
        dx=output_rows(results["dx"], where),
        dresidual=output_rows(results["dresidual"], where),
        weight=contiguous(inputs.weight),
        mean=contiguous(inputs.mean if center else None),
        rstd=rstd,
        dweight=results["dweight"],
        dbias=results["dbias"],
        compute=compute,
        center=center,
        k=k,
    )
    if any(operand is not None for operand in results.values()):
        run_backward(call)
    return _exported(results)


def _exported(results: dict[str, Operand | None]) -> NormGrads:
    """Return the gradients; one of dx and dresidual stands for both where only it was written."""
    exported = {name: export(operand) for name, operand in results.items()}
    if exported["dx"] is None:
        exported["dx"] = exported["dresidual"]
    if exported["dresidual"] is None:
        exported["dresidual"] = exported["dx"]
    return NormGrads(**exported, dgate=None)


def _inputs(function: str, center: bool, axis: object, arrays: dict[str, Any]) -> _Inputs:
    x = describe(function, "x", arrays["x"])
    where = _checks.geometry(function, x, axis)
    if center and arrays["mean"] is None:
        raise ValueError(
            f"{function}: mean is None, expected the mean that the forward returned, "
            "as center is True"
        )
    inputs = _Inputs(
        where=where,
        dy=describe(function, "dy", arrays["dy"]),
        x=x,
        weight=_checks.optional(function, "weight", arrays["weight"]),
        bias=_checks.optional(function, "bias", arrays["bias"]),
        mean=_checks.optional(function, "mean", arrays["mean"]),
        rstd=describe(function, "rstd", arrays["rstd"]),
        d_residual=_checks.optional(function, "d_residual", arrays["d_residual"]),
    )
    _checks.same_shape(function, "dy", inputs.dy, where)
    _checks.same_shape(function, "d_residual", inputs.d_residual, where)
    _checks.param_shape(function, "weight", inputs.weight, where)
    _checks.param_shape(function, "bias", inputs.bias, where)
    return inputs


def _given(
    function: str, inputs: _Inputs, needs: frozenset[str], out: dict[str, Any]
) -> dict[str, Operand | None]:
    """Describe the arrays given for gradients; there must be such a gradient."""
    where = inputs.where
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
    leading = where.leading_axes
    return {
        "dx": _outputs.given(function, "out.dx", out["dx"], where.shape, leading),
        "dresidual": _outputs.given(
            function, "out.dresidual", out["dresidual"], where.shape, leading
        ),
        "dweight": _outputs.given(function, "out.dweight", out["dweight"], where.row_shape, 0),
        "dbias": _outputs.given(function, "out.dbias", out["dbias"], where.row_shape, 0),
    }


def _x_dtype(function: str, asked: Any, inputs: _Inputs, given: dict[str, Operand | None]) -> DType:
    """Return dx's dtype; dresidual has that of x, the stream that was normalised."""
    x_dtype = None if asked is None else parse_dtype(function, "x_dtype", asked)
    dx, stream = given["dx"], inputs.x.dtype
    _checks.agreed_dtype(function, "x_dtype", x_dtype, "out.dx", dx)
    _checks.agreed_dtype(function, "x", stream, "out.dresidual", given["dresidual"])
    if x_dtype is not None:
        return x_dtype
    return stream if dx is None else dx.dtype


def _allocated(
    function: str,
    inputs: _Inputs,
    given: dict[str, Operand | None],
    needs: frozenset[str],
    x_dtype: DType,
) -> dict[str, Operand | None]:
    """Return an array for every gradient that is written."""
    x, where = inputs.x, inputs.where
    wanted: dict[str, tuple[tuple[int, ...], DType]] = {}
    if "x" in needs and (x_dtype is not x.dtype or given["dresidual"] is None):
        wanted["dx"] = (where.shape, x_dtype)
    if "x" in needs and x_dtype is not x.dtype:
        wanted["dresidual"] = (where.shape, x.dtype)
    if "weight" in needs and inputs.weight is not None:
        wanted["dweight"] = (where.row_shape, inputs.weight.dtype)
    if "bias" in needs and inputs.bias is not None:
        wanted["dbias"] = (where.row_shape, inputs.bias.dtype)
    results = dict(given)
    for name, (shape, dtype) in wanted.items():
        if results[name] is None:
            results[name] = allocate(function, x, shape, dtype)
    return results
