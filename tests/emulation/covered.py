# SPDX-License-Identifier: MIT
"""Calls of the row norms under emulation by cases of a cover, each held to the oracle.

A case says what the operands are, how they lie in memory and how the kernels are launched.
"""

from __future__ import annotations

from typing import Any

from bounds import check_backward, check_forward
from operands import WIDTHS

from .arrays import EPS, INPUT_LAYOUTS, Operands, empty, saved
from .kernels import H200_SM_COUNT, SM_75_SM_COUNT, Plan, emulate_backward, emulate_forward

DTYPES = ("float32", "bfloat16", "float16", "float64")
OPTIONAL = (None, *DTYPES)

# What both kernels' cases have: how operands lie in memory, and how kernels are launched. `far`
# rows have mean 1e4 and deviation 1. `layouts` is the number of the first operand's layout, the
# others have those that follow; None: all are contiguous.
ARRANGEMENT = {
    "rows": ("several", "one"),
    "far": (False, True),
    "layouts": (None, *range(len(INPUT_LAYOUTS))),
    "place": (("end", None), ("start", None), ("end", 1), ("start", 2), ("end", 4)),
    "grid": (None, 1),
    "order": ("forward", "reverse", "random"),
}
FORWARD = {
    "width": WIDTHS,
    "x": DTYPES,
    "stream": (None, *(f"+ {d}" for d in DTYPES), *(f"as {d}" for d in DTYPES)),
    "weight": OPTIONAL,
    "bias": OPTIONAL,
    "y": DTYPES,
    "center": (False, True),
    "c": (None, 1.0),
    **ARRANGEMENT,
}
BACKWARD = {
    "width": WIDTHS,
    "dy": DTYPES,
    "x": DTYPES,
    "d_residual": OPTIONAL,
    "dx": OPTIONAL,  # None: x's
    "outputs": ("dx", "dx dresidual", "dresidual", ""),
    "weight": OPTIONAL,
    "bias": OPTIONAL,
    "needs": (("weight", "bias"), ("weight",), ("bias",), ()),
    "center": (False, True),
    "c": (None, 1.0),
    "sm_count": (H200_SM_COUNT, SM_75_SM_COUNT),
    **ARRANGEMENT,
}

Case = dict[str, Any]


def check_forward_case(case: Case) -> None:
    """Run a forward and hold its results to the oracle."""
    make = _Operands(case, narrow=(3, 3, 7), wide=(2, 3, 3))
    kind, _, stream = (case["stream"] or "").partition(" ")
    x, residual = make.optional_rows(case["x"]), make.optional_rows(stream if kind == "+" else None)
    weight, bias = make.optional_param(case["weight"]), make.optional_param(case["bias"])
    out = {"y": make.output(case["y"])} | ({"new_residual": make.output(stream)} if kind else {})
    options = {"c": case["c"], "center": case["center"], "eps": EPS}
    options["residual_dtype"] = stream if kind == "as" else None
    ran = emulate_forward(x, weight, bias, residual=residual, out=out, plan=make.plan, **options)
    check_forward(ran.result, x, weight, bias, residual, **options)


def check_backward_case(case: Case) -> None:
    """Run a backward and hold its results to the oracle."""
    make = _Operands(case, narrow=(3, 3, 7), wide=(1, 3, 2))
    dy, x, d_residual = (make.optional_rows(case[name]) for name in ("dy", "x", "d_residual"))
    weight, bias = make.optional_param(case["weight"]), make.optional_param(case["bias"])
    needs, outputs = case["needs"], case["outputs"].split()
    if not any(case[name] for name in needs):
        outputs = outputs or ["dx"]  # something must be asked for
    x_dtype = case["dx"] if "dx" in outputs else None
    dtypes = {"dx": x_dtype or case["x"], "dresidual": case["x"]}
    options = {"d_residual": d_residual, "c": case["c"], "center": case["center"]}
    ran = emulate_backward(
        *(dy, x, weight, bias),
        x_dtype=x_dtype,
        needs=(*needs, "x") if outputs else needs,
        out={name: make.output(dtypes[name]) for name in outputs},
        plan=make.plan,
        **options,
        **saved(x, center=case["center"], x_dtype=x_dtype),
    )
    worst = check_backward(ran.result, dy, x, weight, bias, eps=EPS, **options)
    assert worst.keys() >= {*outputs, *(f"d{name}" for name in needs if case[name])}


class _Operands(Operands):
    """What a case asks for; of the arrays with rows, each has the layout after the last one's."""

    def __init__(self, case: Case, narrow: tuple[int, ...], wide: tuple[int, ...]) -> None:
        leading = narrow if case["width"] <= 1000 else wide
        leading = (1, 1, 1) if case["rows"] == "one" else leading
        super().__init__((*leading, case["width"]), far=case["far"])
        self._layouts = case["layouts"]
        at, offset = case["place"]
        self.plan = Plan(
            at=at,
            offset=offset,
            order=case["order"],
            seed=case["width"],
            grid=case["grid"],
            sm_count=case.get("sm_count", H200_SM_COUNT),
        )

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
        return INPUT_LAYOUTS[(self._layouts - 1) % len(INPUT_LAYOUTS)]
