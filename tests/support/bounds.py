# SPDX-License-Identifier: MIT
"""How far a result may be from the exact one, and why; the one place that says so.

Bounds are absolute and per element, as float64 arrays. "ulp" is the spacing of a format's numbers.
What is stored in a narrower type than it was computed in has been rounded once more, on the store:
half an ulp of the element in the storage dtype, besides the error of the computation. What is
stored in the compute type has its last rounding counted in the error of the computation.

The error of a computation in float32 is counted in ulps of float32. One in float64 has the same
counts in ulps of float64, twice: once for the kernel and once for the oracle, which is float64 too
and held to the same counts (see `test_reference_is_exact_to_its_own_ulps`).

Bounds are for inputs whose squares neither overflow nor vanish in the compute type, and do not
allow for flush-to-zero of subnormals but in a gate's tail.

The reasons are in `error_bounds` for the norm itself, in `gate_bounds` for a gate's activation, in
`row_errors` for what that, or a rounding before weight, comes to; the checks are here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cunorm import reference
from tests.support.error_bounds import (
    Array,
    dx_bound,
    dx_terms,
    mean_bound,
    param_grad_bound,
    rstd_bound,
    y_bound,
)
from tests.support.gate_bounds import gate_error, gate_slope_error
from tests.support.row_errors import Options, rows_of
from tests.support.ulps import assert_same_numbers, assert_within, rounding, row_max, ulp

__all__ = [
    "assert_same_numbers",
    "assert_within",
    "check_backward",
    "check_forward",
    "dx_bound",
    "dx_terms",
    "gate_error",
    "gate_slope_error",
    "mean_bound",
    "param_grad_bound",
    "row_max",
    "rstd_bound",
    "ulp",
    "y_bound",
]


@np.errstate(all="ignore")
def check_forward(
    result: Any,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    residual: Array | None = None,
    *,
    residual_dtype: Any = None,
    **options: Any,
) -> dict[str, float]:
    """Hold a NormForward of NumPy arrays to the oracle; a field that is None is not looked at.

    The options are those of `row_errors.Options`: eps, without default, and the keyword arguments
    of cunorm.normalize. For `l2_norm`, give c=1 and eps/d. Returns each field's worst error in
    units of its bound.
    """
    norm = Options(**options)
    exact = reference.normalize_forward(
        x, weight, bias, residual=residual, residual_dtype=residual_dtype, **options
    )
    _assert_fields(result, exact)
    compute = _compute_type(x, residual, exact.residual)
    stream = x if exact.residual is None else exact.residual
    rows = rows_of(stream, weight, bias, norm, compute=compute, rounded_to=x.dtype)
    width = rows.s.shape[-1]
    worst = {}
    if result.y is not None:
        error = np.broadcast_to(rows.y_error(), rows.s.shape).reshape(x.shape)
        bound = error + rounding(exact.y, str(result.y.dtype), compute)
        worst["y"] = assert_within(result.y, exact.y, bound, "y")
    if result.residual is not None:
        worst["residual"] = assert_same_numbers(result.residual, exact.residual, "residual")
    if result.mean is not None:
        bound = mean_bound(rows.mean, rows.rstd, compute, width=width) + rows.mean_error
        worst["mean"] = assert_within(
            result.mean, exact.mean, bound.reshape(exact.mean.shape), "mean"
        )
    if result.rstd is not None:
        bound = rstd_bound(rows.rstd, compute, width=width) + rows.rstd * rows.rstd_error
        worst["rstd"] = assert_within(
            result.rstd, exact.rstd, bound.reshape(exact.rstd.shape), "rstd"
        )
    return worst


@np.errstate(all="ignore")
def check_backward(
    grads: Any,
    dy: Array,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    d_residual: Array | None = None,
    *,
    x_dtype: Any = None,
    **options: Any,
) -> dict[str, float]:
    """Hold a NormGrads of NumPy arrays to the oracle; a field that is None is not looked at.

    x is what was normalised: the forward's residual where there is one; x_dtype is then the dtype
    of the forward's x, which round_before_weight rounds to. The exact statistics are computed from
    x, whatever the kernel was given. Options and result are as in `check_forward`.
    """
    norm = Options(**options)
    x_dtype = x.dtype if x_dtype is None else x_dtype
    f = reference.normalize_forward(x, **vars(norm.up_to_r()))
    told = {name: value for name, value in options.items() if name != "eps"}
    statistics = {"rstd": f.rstd, "mean": f.mean, "d_residual": d_residual, "x_dtype": x_dtype}
    exact = reference.normalize_backward(dy, x, weight, bias, **statistics, **told)
    _assert_fields(grads, exact)
    compute = _compute_type(x)
    rows = rows_of(x, weight, bias, norm, compute=compute, rounded_to=x_dtype)
    dy = norm.rows(dy)
    stream = () if d_residual is None else (norm.rows(d_residual), str(d_residual.dtype))
    worst = {}
    for name in ("dx", "dresidual", "dgate"):
        actual = getattr(grads, name)
        if actual is not None:
            expected = getattr(exact, name)
            error = rows.dgate_error(dy) if name == "dgate" else rows.ds_error(dy, *stream)
            error = np.broadcast_to(error, dy.shape).reshape(x.shape)
            bound = error + rounding(expected, str(actual.dtype), compute)
            worst[name] = assert_within(actual, expected, bound, name)
    for name, terms in (("dweight", rows.dweight_terms), ("dbias", rows.dbias_terms)):
        actual = getattr(grads, name)
        if actual is not None:
            expected = getattr(exact, name)
            magnitude, error = (t.sum(axis=0).reshape(expected.shape) for t in terms(dy))
            bound = param_grad_bound(expected, magnitude, str(actual.dtype), compute) + error
            worst[name] = assert_within(actual, expected, bound, name)
    return worst


def _assert_fields(result: Any, exact: Any) -> None:
    for name in result._fields:
        if getattr(result, name) is not None and getattr(exact, name) is None:
            raise AssertionError(f"{name} does not apply here, and should be None")


def _compute_type(*operands: Array | None) -> str:
    """Return the type of statistics, sums and arithmetic: float64 if x or the stream is."""
    given = [str(operand.dtype) for operand in operands if operand is not None]
    return "float64" if "float64" in given else "float32"
