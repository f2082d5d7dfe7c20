# SPDX-License-Identifier: MIT
"""Calls of the generic row norm by cases: the dtype of each operand, and which norm it is.

Each case is a build of its own, for every width and any number of groups; it is held to the oracle
at several of both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import cunorm
from cunorm import NormGrads, reference
from tests.support.bounds import check_backward, check_forward
from tests.support.covers import Case
from tests.support.operands import DTYPES, assert_same_bits, at, draw, optional

DTYPE_NAMES = list(DTYPES)
OPTIONAL = [None, *DTYPE_NAMES]
ACTIVATIONS = ["identity", "sigmoid", "silu", "tanh", "relu", "gelu", "gelu_tanh"]
ROWS = 21
# Groups and the width of one. Packs are of 64 elements: most rows end in the midst of one, and
# most groups begin at an address of no alignment.
SHAPES = ((1, 1), (1, 33), (1, 128), (1, 1003), (3, 1), (3, 37), (2, 64), (5, 97))
EPS = 1e-5

NORM = {
    "center": [False, True],
    "c": [None, 3.0],
    "weight_offset": [0.0, 1.0],
    "round_before_weight": [False, True],
    "gate": OPTIONAL,
    "gate_activation": ACTIVATIONS,
    "gate_position": ["pre", "post"],
}
FORWARD = {
    "x": DTYPE_NAMES,
    "residual": OPTIONAL,
    "residual_dtype": [None],
    "weight": OPTIONAL,
    "bias": OPTIONAL,
    "y": DTYPE_NAMES,
    **NORM,
}
BACKWARD = {
    "dy": DTYPE_NAMES,
    "x": DTYPE_NAMES,
    "d_residual": OPTIONAL,
    "weight": OPTIONAL,
    "bias": OPTIONAL,
    "dx": DTYPE_NAMES,
    "dgate": [None, "float32"],  # None: gate's
    "needs": [("x", "weight", "bias", "gate"), ("x",), ("weight", "bias"), ("gate",)],
    "accumulate": [None, "float32", "float64"],  # onto arrays of this dtype
    **NORM,
}


def telling(case: Case) -> Case:
    """Return what of a case, or of a part of one, is not idle: not, say, the activation of no gate.

    That is so of a pair's cover; what is idle in a case is given all the same, where it is legal.
    """
    idle: set[str] = set()
    needs = case.get("needs", ())
    absent = [name for name in ("weight", "bias", "gate") if case.get(name, "") is None]
    if "gate" in absent:
        idle |= {"gate_activation", "gate_position", "dgate"}
    if "weight" in absent:
        idle |= {"weight_offset"}
    if "needs" in case:
        idle |= {"needs"} if set(needs) & set(absent) else set()
        idle |= set() if "gate" in needs else {"dgate"}
        idle |= set() if "x" in needs else {"dx", "d_residual"}
        parameters = {"weight", "bias"} & set(needs) - set(absent)
        idle |= set() if parameters else {"accumulate"}
    return {name: choice for name, choice in case.items() if name not in idle}


def check_forward_case(case: Case) -> None:
    for groups, width in SHAPES:
        shape = (ROWS, groups * width)
        x, gate = draw("x", shape, case["x"]), optional("gate", shape, case["gate"])
        residual = optional("residual", shape, case["residual"])
        parameters = [optional(name, shape[-1], case[name]) for name in ("weight", "bias")]
        stream = case["residual_dtype"] and DTYPES[case["residual_dtype"]]
        options = {"eps": EPS, "groups": groups, "gate": gate, **_formula(case)}
        result = cunorm.normalize_forward(
            x, *parameters, residual=residual, residual_dtype=stream, dtype=case["y"], **options
        )
        assert result.y.dtype == DTYPES[case["y"]]
        assert (result.residual is None) == (residual is None and stream is None)
        compute = (
            "float64"
            if "float64" in (case["x"], case["residual"] or case["residual_dtype"])
            else "float32"
        )
        assert result.rstd.dtype == compute
        with at(f"{groups} groups of width {width}"):
            check_forward(result, x, *parameters, residual, residual_dtype=stream, **options)


def check_backward_case(case: Case) -> None:
    for groups, width in SHAPES:
        shape = (ROWS, groups * width)
        operands = {name: draw(name, shape, case[name]) for name in ("dy", "x")}
        operands |= {n: optional(n, shape, case[n]) for n in ("d_residual", "gate")}
        operands |= {n: optional(n, shape[-1], case[n]) for n in ("weight", "bias")}
        norm = {"groups": groups, **_formula(case)}
        given = {**operands, **norm, **_statistics(operands, norm, case), "x_dtype": case["dx"]}
        given |= {"needs": case["needs"]}
        with at(f"{groups} groups of width {width}"):
            grads = cunorm.normalize_backward(**given, out=_gradients(shape, case))
            _check_which(grads, case)
            x_dtype = DTYPES[case["dx"]]
            check_backward(grads, **operands, **norm, eps=EPS, x_dtype=x_dtype)
            if case["accumulate"]:
                wanted = [n for n in ("weight", "bias") if case[n] and n in case["needs"]]
                sums = {f"d{name}": shape[-1] for name in wanted}
                call = partial(cunorm.normalize_backward, **given)
                out = partial(_gradients, shape, case)
                check_accumulated(call, out, sums, case["accumulate"])


def _formula(case: Case) -> dict[str, Any]:
    """Return what the norm is told beside its operands; an offset needs a weight."""
    formula = {name: case[name] for name in NORM if name != "gate"}
    return formula if case["weight"] is not None else formula | {"weight_offset": 0.0}


def _statistics(operands: dict[str, Any], norm: dict[str, Any], case: Case) -> dict[str, Any]:
    """Return the exact mean and rstd, rounded to the compute type."""
    told = {name: norm[name] for name in ("center", "groups", "gate_activation", "gate_position")}
    x, gate = operands["x"], operands["gate"]
    exact = reference.normalize_forward(x, gate=gate, eps=EPS, **told)
    compute = np.float64 if "float64" in (case["x"], case["dx"]) else np.float32
    mean = exact.mean.astype(compute) if case["center"] else None
    return {"rstd": exact.rstd.astype(compute), "mean": mean}


def _gradients(shape: tuple[int, int], case: Case) -> NormGrads:
    """Return the arrays that say that a gate's gradient has another dtype than it."""
    wanted = case["dgate"] and case["gate"] and "gate" in case["needs"]
    return NormGrads(dgate=np.empty(shape, DTYPES[case["dgate"]]) if wanted else None)


def check_accumulated(call: Any, out: Any, sizes: dict[str, int], dtype: str) -> None:
    """Hold a call that adds to arrays to one that does not, and rounds nothing: to the bit."""
    before = {name: draw(name, size, dtype) for name, size in sizes.items()}
    exact = {name: np.empty(size) for name, size in sizes.items()}
    sums = {name: array.copy() for name, array in before.items()}
    plain = call(out=out()._replace(**exact))
    added = call(out=out()._replace(**sums), accumulate=True)
    for name, expected in plain._asdict().items():
        if name in before:
            assert getattr(added, name) is sums[name]
            expected = (before[name].astype(np.float64) + expected).astype(DTYPES[dtype])
        if expected is not None:
            assert_same_bits(getattr(added, name), expected, f"{name}, accumulated")


def _check_which(grads: NormGrads, case: Case) -> None:
    for name in ("weight", "bias", "gate"):
        gradient, dtype = getattr(grads, f"d{name}"), case[name]
        if dtype is None or name not in case["needs"]:
            assert gradient is None
        else:
            dtype = case["dgate"] or dtype if name == "gate" else dtype
            assert gradient.dtype == DTYPES[dtype]
    if "x" not in case["needs"]:
        assert grads.dx is None
        assert grads.dresidual is None
    else:
        assert grads.dx.dtype == DTYPES[case["dx"]]
        assert grads.dresidual.dtype == DTYPES[case["x"]]
        assert (grads.dx is grads.dresidual) == (case["dx"] == case["x"])
