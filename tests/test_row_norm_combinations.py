# SPDX-License-Identifier: MIT
"""Operands of any dtypes, present or absent, go together: pairs of choices here, all by command.

Each case is a build of its own. `pytest -m exhaustive` compiles those of `exhaustive_forward` and
`exhaustive_backward`, and says at its end how many builds there were.
"""

from itertools import chain, groupby

import numpy as np
import pytest
from bounds import check_backward, check_forward
from covers import everything, label, pairwise
from operands import DTYPES, at, draw, optional

import cunorm
from cunorm import reference

DTYPE_NAMES = list(DTYPES)
OPTIONAL = [None, *DTYPE_NAMES]
WIDTHS = (1, 33, 128, 1003)
ROWS = 21
EPS = 1e-5

FORWARD = {
    "x": DTYPE_NAMES,
    "residual": OPTIONAL,
    "residual_dtype": [None],
    "weight": OPTIONAL,
    "bias": OPTIONAL,
    "y": DTYPE_NAMES,
    "center": [False, True],
}
BACKWARD = {
    "dy": DTYPE_NAMES,
    "x": DTYPE_NAMES,
    "d_residual": OPTIONAL,
    "weight": OPTIONAL,
    "bias": OPTIONAL,
    "dx": DTYPE_NAMES,
    "center": [False, True],
    "needs": [("x", "weight", "bias"), ("x",), ("weight", "bias"), ("x", "bias"), ("x", "weight")],
}


# --- one combination ------------------------------------------------------------------------------


def check_forward_case(case):
    for width in WIDTHS:
        shape = (ROWS, width)
        x = draw("x", shape, case["x"])
        residual = optional("residual", shape, case["residual"])
        parameters = [optional(name, width, case[name]) for name in ("weight", "bias")]
        told = {"center": case["center"], "eps": EPS}
        stream = case["residual_dtype"] and DTYPES[case["residual_dtype"]]
        result = cunorm.normalize_forward(
            x, *parameters, residual=residual, residual_dtype=stream, dtype=case["y"], **told
        )
        assert result.y.dtype == DTYPES[case["y"]]
        assert (result.residual is None) == (residual is None and stream is None)
        compute = "float64" if "float64" in (case["x"], _stream(case)) else "float32"
        assert result.rstd.dtype == compute
        with at(f"width {width}"):
            check_forward(result, x, *parameters, residual, residual_dtype=stream, **told)


def check_backward_case(case):
    for width in WIDTHS:
        shape = (ROWS, width)
        x, dy = (draw(name, shape, case[name]) for name in ("x", "dy"))
        d_residual = optional("d_residual", shape, case["d_residual"])
        weight, bias = (optional(name, width, case[name]) for name in ("weight", "bias"))
        statistics = _statistics(x, case)
        grads = cunorm.normalize_backward(
            dy,
            x,
            weight,
            bias,
            **statistics,
            d_residual=d_residual,
            center=case["center"],
            x_dtype=case["dx"],
            needs=case["needs"],
        )
        _check_which(grads, case)
        with at(f"width {width}"):
            operands = (dy, x, weight, bias, d_residual)
            check_backward(grads, *operands, center=case["center"], eps=EPS)


def _statistics(x, case):
    """Return the exact mean and rstd, rounded to the compute type."""
    exact = reference.normalize_forward(x, center=case["center"], eps=EPS)
    compute = np.float64 if "float64" in (case["x"], case["dx"]) else np.float32
    mean = exact.mean.astype(compute) if case["center"] else None
    return {"rstd": exact.rstd.astype(compute), "mean": mean}


def _check_which(grads, case):
    for name in ("weight", "bias"):
        gradient = getattr(grads, f"d{name}")
        if case[name] is None or name not in case["needs"]:
            assert gradient is None
        else:
            assert gradient.dtype == DTYPES[case[name]]
    if "x" not in case["needs"]:
        assert grads.dx is None
        assert grads.dresidual is None
    else:
        assert grads.dx.dtype == DTYPES[case["dx"]]
        assert grads.dresidual.dtype == DTYPES[case["x"]]
        assert (grads.dx is grads.dresidual) == (case["dx"] == case["x"])


def _stream(case):
    return case["residual"] or case["residual_dtype"]


# --- pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", pairwise(FORWARD), ids=label)
def test_forward_takes_any_pair_of_choices(case):
    check_forward_case(case)


@pytest.mark.parametrize("case", pairwise(BACKWARD), ids=label)
def test_backward_takes_any_pair_of_choices(case):
    check_backward_case(case)


# --- the product ----------------------------------------------------------------------------------


def exhaustive_forward():
    """All of x, the stream, which parameters there are, and center; then all of y, of weight with
    another bias, and of a stream that is x in another dtype, each with the rest held.
    """
    alike = [
        case | {"bias": case["bias"] and (case["weight"] or case["x"]), "y": case["x"]}
        for case in everything(FORWARD | {"bias": [None, "given"], "y": [None]})
    ]
    outputs = everything(FORWARD | {"weight": ["float32"], "bias": [None]})
    parameters = [
        case | {"y": case["x"]} for case in everything(FORWARD | {"residual": [None], "y": [None]})
    ]
    streams = FORWARD | {"residual": [None], "residual_dtype": DTYPE_NAMES, "y": ["float32"]}
    casts = everything(streams | {"weight": ["float32"], "bias": [None]})
    return _distinct(chain(alike, outputs, parameters, casts))


def exhaustive_backward():
    """All of dy, x and dx with and without d_residual; all of d_residual, weight and which
    gradients there are for one dtype of the rows.
    """
    held = {"weight": ["float32"], "bias": ["float32"], "needs": [("x", "weight", "bias")]}
    dtypes = [
        case | {"d_residual": case["d_residual"] and case["x"]}
        for case in everything(BACKWARD | held | {"d_residual": [None, "given"]})
    ]
    one = {"dy": [None], "dx": [None], "bias": ["float32"]}
    which = [
        case | {"dy": case["x"], "dx": case["x"]}
        for case in everything(BACKWARD | one)
        if (case["weight"] is not None or case["needs"] in (("x",), ("x", "bias")))
        and (case["d_residual"] is None or "x" in case["needs"])
    ]
    return _distinct(chain(dtypes, which))


def exhaustive_param_grad():
    """All dtypes of both parameters, in both compute types."""
    held = {"dy": ["float32"], "d_residual": [None], "dx": [None], "center": [True]}
    needs = {"needs": [("weight", "bias")]}
    return _distinct(
        case | {"dx": case["x"]}
        for case in everything(BACKWARD | held | needs | {"x": ["float32", "float64"]})
        if case["weight"] is not None or case["bias"] is not None
    )


def _distinct(cases):
    return list({tuple(case.items()): case for case in cases}.values())


def _in_tests(cases, *names):
    """Split cases into one list for each combination of those choices, for the workers to share."""

    def key(case):
        return [str(case[name]) for name in names]

    groups = (list(group) for _, group in groupby(sorted(cases, key=key), key))
    return [pytest.param(group, id="-".join(key(group[0]))) for group in groups]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("record_builds")
@pytest.mark.parametrize("cases", _in_tests(exhaustive_forward(), "x", "residual", "center"))
def test_every_forward_is_within_its_bounds(cases):
    for case in cases:
        with at(label(case)):
            check_forward_case(case)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("record_builds")
@pytest.mark.parametrize("cases", _in_tests(exhaustive_backward(), "x", "weight", "center"))
def test_every_backward_is_within_its_bounds(cases):
    for case in cases:
        with at(label(case)):
            check_backward_case(case)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("record_builds")
@pytest.mark.parametrize("cases", _in_tests(exhaustive_param_grad(), "x", "weight"))
def test_every_param_grad_is_within_its_bounds(cases):
    for case in cases:
        with at(label(case)):
            check_backward_case(case)
