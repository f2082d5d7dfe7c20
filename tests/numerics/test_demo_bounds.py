# SPDX-License-Identifier: MIT
"""The bounds of `python -m cunorm demo`, which the package cannot take from the tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cunorm import reference
from cunorm._demo import _group_tolerance
from cunorm._demo._group_operators import GroupOracle, group_operators_of
from cunorm._demo._operators import Oracle, operators_of
from cunorm._demo._tolerance import LARGEST_GATE, backward_bounds, forward_bounds
from cunorm._demo._ulps import worst_error
from cunorm._dtypes import FLOAT32
from cunorm.results import AddNorm
from tests.support.error_bounds import param_grad_bound, rstd_bound
from tests.support.group_bounds import (
    activation_slope,
    as_rows,
    by_channel,
    group_mean_bound,
    group_rstd_bound,
    like,
    y_error,
)
from tests.support.group_bounds import rows_of as groups_of
from tests.support.operands import NORMS, draw, parameters
from tests.support.row_errors import Options, rows_of
from tests.support.ulps import rounding

Array = Any


@pytest.mark.parametrize("operator", operators_of(FLOAT32), ids=str)
def test_the_demos_bounds_are_those_of_the_tests_or_somewhat_wider(operator):
    operands = drawn("bfloat16" if operator.form == "Llama" else "float32")
    exact, rows = operator.forward(reference, operands), Oracle(operator, operands).rows
    grads = operator.backward(reference, operands, exact)
    dtype = str(operands["x"].dtype)
    demo = forward_bounds(rows, exact, dtype)
    stream = operands["d_residual"] if operator.has_residual else None
    demo |= backward_bounds(rows, grads, operands["dy"], stream)
    for name, bound in bounds_of_the_tests(operator, operands, exact, grads).items():
        ratio = demo[name][1] / bound
        assert 0.999 < ratio.min() <= ratio.max() < 8.0, name


def drawn(dtype: str) -> dict[str, Any]:
    """Draw what the demo's operators take, a gate in the range of the demo's."""
    rows = ("x", "residual", "dy", "d_residual")
    operands = {name: draw(name, (7, 48), dtype) for name in rows}
    operands |= parameters(NORMS["layer_norm"], 48, "float32")
    gate = np.clip(draw("gate", (7, 48), dtype, deviation=2.0), -LARGEST_GATE, LARGEST_GATE)
    return operands | {"gate": gate.astype(operands["x"].dtype)}


def bounds_of_the_tests(operator, operands, exact, grads) -> dict[str, Array]:
    width = 48 if operator.base == "l2_norm" else 1
    told = {"center": operator.center, "c": operator.c, "eps": operator.eps / width}
    norm = Options(**told | operator.options(operands))
    x = exact.residual if operator.has_residual else operands["x"]
    weight, bias = (operands[n] if n in operator.parameters else None for n in ("weight", "bias"))
    rows = rows_of(x, weight, bias, norm, compute="float32", rounded_to=x.dtype)
    dy, stream = norm.rows(operands["dy"]), ()
    if operator.has_residual:
        stream = (norm.rows(operands["d_residual"]), str(x.dtype))
    errors = {"y": rows.y_error(), "dx": rows.ds_error(dy, *stream)}
    if operator.has_gate:
        errors["dgate"] = rows.dgate_error(dy)
    results = exact._asdict() | grads._asdict()
    bounds = {
        name: np.broadcast_to(error, dy.shape).reshape(x.shape)
        + rounding(results[name], str(x.dtype), "float32")
        for name, error in errors.items()
    }
    of_rstd = rstd_bound(rows.rstd, width=48) + rows.rstd * rows.rstd_error
    bounds["rstd"] = of_rstd.reshape(exact.rstd.shape)
    for parameter in operator.parameters:
        terms = {"weight": rows.dweight_terms, "bias": rows.dbias_terms}[parameter](dy)
        gradient = results[f"d{parameter}"]
        size, error = (term.sum(axis=0).reshape(gradient.shape) for term in terms)
        bounds[f"d{parameter}"] = param_grad_bound(gradient, size, "float32") + error
    return bounds


@pytest.mark.parametrize("operator", group_operators_of(FLOAT32), ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demos_bounds_of_group_norms_are_those_of_the_tests_or_somewhat_wider(operator, dtype):
    rows = {name: draw(name, (48, 40), dtype) for name in ("x", "dy")}
    operands = operator.taken(rows | parameters(NORMS["layer_norm"], 40, "float32"))
    exact, oracle = operator.forward(reference, operands), GroupOracle(operator, operands)
    grads = operator.backward(reference, operands, exact)
    demo = _group_tolerance.forward_bounds(oracle.groups, exact, dtype)
    demo |= _group_tolerance.backward_bounds(oracle.groups, grads, operands["dy"])
    for name, bound in group_bounds_of_the_tests(operator, operands, exact, grads).items():
        ratio = demo.pop(name)[1] / bound
        assert 0.999 < ratio.min() <= ratio.max() < 1.1, name
    assert not demo


def group_bounds_of_the_tests(operator, operands, exact, grads) -> dict[str, Array]:
    x, axis = operands["x"], operator.channel_axis
    count, activation = operator.groups(operands), operator.activation or "identity"
    told = {"eps": 1e-5, "channel_axis": axis}
    rows = groups_of(x, count, operands["weight"], operands["bias"], **told)
    sloped = replace(rows, after=activation_slope(rows, activation))
    dy = as_rows(operands["dy"], count, axis)
    bounds = {"mean": group_mean_bound(rows), "rstd": group_rstd_bound(rows)}
    for name, of, error in (
        ("y", exact.y, y_error(rows, activation)),
        ("dx", grads.dx, sloped.dp_error(dy)),
    ):
        bounds[name] = like(x, error, axis) + rounding(of, str(x.dtype), "float32")
    for name, terms in (("dweight", sloped.dweight_terms), ("dbias", sloped.dbias_terms)):
        size, error = (by_channel(term, x.shape[axis]) for term in terms(dy))
        bounds[name] = param_grad_bound(getattr(grads, name), size, "float32") + error
    return bounds


def test_a_missing_or_infinite_result_is_no_small_error():
    bounds = {"y": (np.array([[1.0, 2.0]]), np.array([[1e-6, 1e-6]]))}
    for wrong in (np.nan, np.inf, -np.inf):
        assert worst_error(AddNorm(np.float32([[1.0, wrong]])), bounds, ["y"]) == np.inf
    assert worst_error(AddNorm(np.float32([[1.0, 2.0]])), bounds, ["y"]) == 0.0
    assert worst_error(AddNorm(), bounds, ["y"]) == np.inf
