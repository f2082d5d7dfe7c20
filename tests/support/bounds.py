# SPDX-License-Identifier: MIT
"""Error bounds of results, and the checks against them.

Bounds are absolute and per element, as float64 arrays. Storing a result in a type narrower than the
compute type adds one rounding: half an ulp of the element in the storage dtype. Errors of float32
computations are counted in ulps of float32. Errors of float64 computations are counted in ulps of
float64, and the counts are doubled, because the oracle computes in float64 and rounds too.

Bounds hold for inputs whose squares neither overflow nor underflow in the compute type. Only the
bounds of gates, activations and products with them allow for a flush of subnormals to 0.

`row_errors`, `gate_bounds` (activations), `branch_bounds` (gates of the branch) and `group_bounds`
(group norms) have the bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cunorm import reference
from cunorm.reference.rows import sum_to
from tests.support.branch_bounds import branch_of
from tests.support.gate_bounds import count
from tests.support.row_errors import Options, Rows
from tests.support.ulps import Array, assert_same_numbers, assert_within, rounding, ulp, unit

__all__ = ["assert_within", "check_backward", "check_forward", "param_grad_bound", "ulp"]


class Expected(NamedTuple):
    """The exact results of a norm, and bounds of a kernel's errors.

    `errors` has, for each field, a function that bounds the field's error before the store. For
    dweight and dbias it returns two arrays: the sum of abs(summand), and a further error.
    With a gate on the branch, a stream may be off by its bound, and `of_stream` returns what is
    expected of the norm of the stream that a call returned.
    """

    exact: Any
    errors: dict[str, Callable[[], Any]]
    compute: str
    of_stream: Callable[..., Expected] | None = None

    @np.errstate(all="ignore")
    def bound(self, name: str, dtype: str) -> Array:
        """Bound the error of a field that is stored in a dtype."""
        exact, error = getattr(self.exact, name), self.errors[name]()
        if name in ("dweight", "dbias"):
            magnitude, more = error
            return param_grad_bound(exact, magnitude, dtype, self.compute) + more
        # The error may carry a number past a power of two, where an ulp is twice as large.
        return error + rounding(np.abs(exact) + error, dtype, self.compute)

    def check(self, result: Any) -> dict[str, float]:
        """Check fields that are not None; return each field's worst error in units of its bound."""
        if self.of_stream is not None and result.residual is not None:
            return self.of_stream(stream=result.residual).check(result)
        worst = {}
        for name, actual in sorted(result._asdict().items(), key=lambda one: one[0] != "residual"):
            if actual is None:
                continue
            exact = getattr(self.exact, name)
            assert exact is not None, f"{name} does not apply here, and should be None"
            if name not in self.errors:  # a stream that is exact
                worst[name] = assert_same_numbers(actual, exact, name)
            else:
                bound = self.bound(name, str(actual.dtype))
                worst[name] = assert_within(actual, exact, bound, name)
        return worst


def check_forward(result: Any, *given: Any, **options: Any) -> dict[str, float]:
    """Check a NormForward of NumPy arrays against the oracle; fields that are None are skipped.

    Takes x, weight, bias, residual and, as keywords, residual_dtype and the fields of
    `row_errors.Options`. For `l2_norm`, pass c=1, and eps divided by the width. Returns the worst
    error of each field in units of its bound.
    """
    return expected_forward(*given, **options).check(result)


def check_backward(grads: Any, *given: Any, **options: Any) -> dict[str, float]:
    """Check a NormGrads of NumPy arrays against the oracle; fields that are None are skipped.

    Takes dy, x, weight, bias, d_residual and options. If the forward returned a stream, x is the
    stream, and x_dtype is the dtype of the forward's x, to which round_before_weight rounds. With a
    gate on the branch, `branch` is the forward's x, without which dgate is None. The oracle
    computes its own statistics from x. Returns the worst error of each field in units of its bound.
    """
    return expected_backward(*given, **options).check(grads)


@np.errstate(all="ignore")
def expected_forward(
    x, weight, bias, residual=None, *, residual_dtype=None, stream=None, **options
) -> Expected:
    """Return what is expected of a forward; `check_forward` has the arguments.

    With a gate on the branch, `stream` is the stream that the call returned.
    """
    norm, more = Options(**options), {"residual": residual, "residual_dtype": residual_dtype}
    exact = reference.normalize_forward(x, weight, bias, **more, **options)
    compute, normed = compute_type(x, exact.residual), exact.residual
    branch, errors, of_stream = branch_of(x, norm, compute), {}, None
    if branch is not None:
        if stream is None:
            of_stream = partial(expected_forward, x, weight, bias, **more, **options)
        else:
            assert stream.dtype == normed.dtype, f"residual is {stream.dtype}"
            given, normed = (np.zeros_like(x), weight, bias), stream  # the sum is the stream
            exact = reference.normalize_forward(*given, residual=stream, **options | {"gate": None})
        exact = exact._replace(residual=branch.stream(residual))
        errors["residual"] = lambda: branch.stream_error(residual)
    normed = x if normed is None else normed
    rows = Rows(normed, weight, bias, norm, compute=compute, rounded_to=x.dtype)
    errors |= {
        "y": lambda: np.broadcast_to(rows.y_error(), rows.s.shape).reshape(x.shape),
        "mean": lambda: rows.mean_error().reshape(exact.mean.shape),
        "rstd": lambda: rows.rstd_error().reshape(exact.rstd.shape),
    }
    return Expected(exact, errors, compute, of_stream)


@np.errstate(all="ignore")
def expected_backward(
    dy, x, weight, bias, d_residual=None, *, branch=None, x_dtype=None, **options
) -> Expected:
    norm, x_dtype = Options(**options), x.dtype if x_dtype is None else x_dtype
    f = reference.normalize_forward(x, **vars(norm.up_to_r()))
    kwargs = {name: value for name, value in options.items() if name != "eps"}
    kwargs |= {"rstd": f.rstd, "mean": f.mean, "d_residual": d_residual, "x_dtype": x_dtype}
    compute = compute_type(x)
    gated = branch_of(branch, norm, compute)
    if gated is not None:
        kwargs["branch"] = branch
        kwargs["needs"] = ("x", "weight", "bias", *["gate"] * (branch is not None))
    exact = reference.normalize_backward(dy, x, weight, bias, **kwargs)
    rows = Rows(x, weight, bias, norm, compute=compute, rounded_to=x_dtype)
    dy = norm.rows(dy)
    stream = () if d_residual is None else (norm.rows(d_residual), str(d_residual.dtype))

    def row_bound(error: Callable[..., Array], *given: Any) -> Callable[[], Array]:
        return lambda: np.broadcast_to(error(dy, *given), dy.shape).reshape(x.shape)

    def sum_bound(terms: Callable[..., Any], operand: Any) -> Callable[[], Any]:
        return lambda: [sum_to(t.reshape(x.shape), operand.shape) for t in terms(dy)]

    errors = dict.fromkeys(("dx", "dresidual"), row_bound(rows.ds_error, *stream))
    errors["dgate"] = row_bound(rows.dgate_error)
    if gated is not None:
        ds, ds_error = exact.dresidual, errors["dresidual"]
        errors["dx"] = lambda: gated.dx_error(ds, ds_error())
        errors["dgate"] = lambda: gated.dgate_error(ds, ds_error())
    errors["dweight"] = sum_bound(rows.dweight_terms, weight)
    errors["dbias"] = sum_bound(rows.dbias_terms, bias)
    return Expected(exact, errors, compute)


def param_grad_bound(exact: Array, magnitude: Array, dtype: str, compute: str = "float32") -> Array:
    """Bound the error of dweight or dbias: 8 u times `magnitude`, the sum over rows of |summand|.

    A summand of dweight, dy * k * r, has the error of r, a few u. The sum over rows, in parts of
    bounded length, adds about as much. Rounding to the parameter's dtype adds half an ulp.
    """
    return count(8, compute) * unit(compute) * magnitude + 0.5 * ulp(exact, dtype)


def compute_type(*operands: Array | None) -> str:
    """Return the compute type: float64 if x or the stream is float64, else float32."""
    given = [str(operand.dtype) for operand in operands if operand is not None]
    return "float64" if "float64" in given else "float32"
