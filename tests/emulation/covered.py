# SPDX-License-Identifier: MIT
"""Calls of the row norms under emulation by cases of a cover, each held to the oracle.

A case says what the operands are, which norm is computed of them, how they lie in memory and how
the kernels are launched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cunorm import reference
from cunorm._features import Features
from tests.support.bounds import check_backward, check_forward, ulp
from tests.support.operands import WIDTHS

from .arrays import EPS, Array, Operands, empty, input_layouts, saved
from .kernels import emulate_backward, emulate_forward
from .plans import H200_SM_COUNT, SM_75_SM_COUNT, Plan

DTYPES = ("float32", "bfloat16", "float16", "float64")
OPTIONAL = (None, *DTYPES)
ACTIVATIONS = ("identity", "sigmoid", "silu", "tanh", "relu", "gelu", "gelu_tanh")

# Clusters share wider rows than these; of float64, and of gated backwards, some that are not.
MOST_OF_A_BLOCK = 8192

# Which norm it is. `width` is that of a group.
NORM = {
    "center": (False, True),
    "c": (None, 1.0),
    "groups": (1, 3),
    "weight_offset": (0.0, 1.0),
    "round_before_weight": (False, True),
    "gate_activation": ACTIVATIONS,
    "gate_position": ("pre", "post"),
}
# What both kernels' cases have: how operands lie in memory, and how kernels are launched. `far`
# rows have mean 1e4 and deviation 1. `layouts` is the number of the first operand's layout, the
# others have those that follow; None: all are contiguous. `features` are those that plans may use.
ARRANGEMENT = {
    "rows": ("several", "one"),
    "far": (False, True),
    "layouts": (None, *range(len(input_layouts(groups=1)))),
    "place": (("end", None), ("start", None), ("end", 1), ("start", 2), ("end", 4)),
    "grid": (None, 1),
    "order": ("forward", "reverse", "random"),
    "features": ("", "clusters"),
}
FORWARD = {
    "width": WIDTHS,
    "x": DTYPES,
    "stream": (None, *(f"+ {d}" for d in DTYPES), *(f"as {d}" for d in DTYPES)),
    "gate": OPTIONAL,
    "weight": OPTIONAL,
    "bias": OPTIONAL,
    "y": DTYPES,
    **NORM,
    **ARRANGEMENT,
}
BACKWARD = {
    "width": WIDTHS,
    "dy": DTYPES,
    "x": DTYPES,
    "d_residual": OPTIONAL,
    "gate": OPTIONAL,
    "dx": OPTIONAL,  # None: x's
    "dgate": OPTIONAL,  # None: gate's
    "outputs": ("dx", "dx dresidual", "dresidual", ""),
    "weight": OPTIONAL,
    "bias": OPTIONAL,
    "needs": (
        *(("weight", "bias", "gate"), ("weight", "bias"), ("weight", "gate"), ("weight",)),
        *(("bias", "gate"), ("bias",), ("gate",), ()),
    ),
    "accumulate": (None, "float32", "float64"),  # onto arrays of this dtype
    "sm_count": (H200_SM_COUNT, SM_75_SM_COUNT),
    **NORM,
    **ARRANGEMENT,
}

Case = dict[str, Any]


def telling(case: Case) -> Case:
    """Return what of a case makes a difference: not, say, the activation of no gate."""
    idle = set()
    if case["width"] <= MOST_OF_A_BLOCK:
        idle |= {"features"}
    if case["gate"] is None:
        idle |= {"gate_activation", "gate_position", "dgate"}
    if case["weight"] is None:
        idle |= {"weight_offset"}
    if "needs" not in case:
        return {name: choice for name, choice in case.items() if name not in idle}
    needs, outputs = _needs(case), case["outputs"].split()
    if "gate" not in needs:
        idle |= {"dgate"}
    if not {"weight", "bias"} & set(needs):
        idle |= {"accumulate"}
    if "dx" not in outputs:
        idle |= {"dx"} if outputs else {"dx", "d_residual"}
    return {name: choice for name, choice in case.items() if name not in idle} | {"needs": needs}


def _needs(case: Case) -> tuple[str, ...]:
    """Return which gradients are wanted of those whose operand there is."""
    return tuple(name for name in case["needs"] if case[name])


def check_forward_case(case: Case, **plan: Any) -> None:
    """Run a forward, by a plan with these changes, and hold its results to the oracle."""
    make = _Operands(case, narrow=(3, 3, 7), wide=(2, 3, 3))
    kind, _, stream = (case["stream"] or "").partition(" ")
    x, residual = make.optional_rows(case["x"]), make.optional_rows(stream if kind == "+" else None)
    weight, bias = make.optional_param(case["weight"]), make.optional_param(case["bias"])
    out = {"y": make.output(case["y"])} | ({"new_residual": make.output(stream)} if kind else {})
    options = make.norm() | {"eps": EPS, "residual_dtype": stream if kind == "as" else None}
    plan = replace(make.plan, **plan)
    ran = emulate_forward(x, weight, bias, residual=residual, out=out, plan=plan, **options)
    check_forward(ran.result, x, weight, bias, residual, **options)


def check_backward_case(case: Case, **plan: Any) -> None:
    """Run a backward, by a plan with these changes, and hold its results to the oracle."""
    make = _Operands(case, narrow=(3, 3, 7), wide=(1, 3, 2))
    dy, x, d_residual = (make.optional_rows(case[name]) for name in ("dy", "x", "d_residual"))
    weight, bias = make.optional_param(case["weight"]), make.optional_param(case["bias"])
    norm = make.norm()
    needs, outputs = _needs(case), case["outputs"].split()
    if not needs:
        outputs = outputs or ["dx"]  # something must be asked for
    x_dtype = case["dx"] if "dx" in outputs else None
    dtypes = {"dx": x_dtype or case["x"], "dresidual": case["x"]}
    out = {name: make.output(dtypes[name]) for name in outputs}
    if "gate" in needs:
        out["dgate"] = make.output(case["dgate"] or case["gate"])
    before = {
        f"d{name}": make.param(case["accumulate"])
        for name in ("weight", "bias")
        if case["accumulate"] and name in needs
    }
    given = {"d_residual": d_residual, "x_dtype": x_dtype, **norm}
    statistics = saved(x, x_dtype=x_dtype, **norm)
    ran = emulate_backward(
        *(dy, x, weight, bias),
        **given,
        **statistics,
        needs=(*needs, "x") if outputs else needs,
        accumulate=bool(before),
        out=out | before,
        plan=replace(make.plan, **plan),
    )
    result = ran.result
    if before:
        exact = reference.normalize_backward(dy, x, weight, bias, **given, **statistics)
        result = result._replace(
            **{
                name: _added(getattr(result, name), array, getattr(exact, name))
                for name, array in before.items()
            }
        )
    worst = check_backward(result, dy, x, weight, bias, eps=EPS, **given)
    assert worst.keys() >= {*outputs, *(f"d{name}" for name in needs)}


def _added(total: Array, before: Array, exact: Array) -> Array:
    """Return what was added to `before`: what is nearest to the exact sum, of what rounds so."""
    dtype = str(total.dtype)
    rounding = 0.5 * ulp(total, dtype)
    added = total.astype(np.float64) - before.astype(np.float64)
    return np.clip(exact, added - rounding, added + rounding)


class _Operands(Operands):
    """What a case asks for; of the arrays with rows, each has the layout after the last one's."""

    def __init__(self, case: Case, narrow: tuple[int, ...], wide: tuple[int, ...]) -> None:
        width = case["width"] * case["groups"]
        leading = narrow if width <= 3000 else wide if width <= 2**14 else (1, 2, 2)
        leading = (1, 1, 1) if case["rows"] == "one" else leading
        super().__init__((*leading, width), far=case["far"])
        self._case = case
        self._layouts = case["layouts"]
        at, offset = case["place"]
        self.plan = Plan(
            at=at,
            offset=offset,
            order=case["order"],
            seed=case["width"],
            features=Features(**dict.fromkeys(case["features"].split(), True)),
            grid=case["grid"],
            sm_count=case.get("sm_count", H200_SM_COUNT),
        )

    def norm(self) -> dict[str, Any]:
        """Return keyword arguments of cunorm.normalize; this draws the gate."""
        case = self._case
        norm = {name: case[name] for name in NORM} | {"gate": None}
        if case["gate"] is not None:
            norm["gate"] = self.rows(case["gate"], self._next_layout(), near=True)
        if case["weight"] is None:
            norm["weight_offset"] = 0.0
        return norm

    def optional_rows(self, dtype: str | None):
        return None if dtype is None else self.rows(dtype, self._next_layout())

    def optional_param(self, dtype: str | None):
        return None if dtype is None else self.param(dtype)

    def output(self, dtype: str):
        return empty(self.shape, dtype, self._next_layout())

    def _next_layout(self) -> str:
        if self._layouts is None:
            return "contiguous"
        self._layouts += 1
        layouts = input_layouts(self._case["groups"])
        return layouts[(self._layouts - 1) % len(layouts)]
