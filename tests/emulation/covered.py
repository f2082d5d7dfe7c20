# SPDX-License-Identifier: MIT
"""Calls of the row norms under emulation by cases of a cover, each held to the oracle.

A case says what the operands are, how they lie in memory and how the kernels are launched.
"""

from __future__ import annotations

from typing import Any

from bounds import check_backward, check_forward

from .kernels import H200_SM_COUNT, SM_75_SM_COUNT, Plan, emulate_backward, emulate_forward
from .operands import EPS, LAYOUTS, WIDTHS, Operands, empty, statistics

DTYPES = ("float32", "bfloat16", "float16", "float64")
OPTIONAL = (None, *DTYPES)
_LAYOUTS = (*LAYOUTS, "expanded")

# What both kernels' cases have: how operands lie in memory, and how kernels are launched.
_ARRANGEMENT = {
    "rows": ("several", "one"),
    "far": (False, True),  # rows of mean 1e4 and deviation 1
    "layouts": (None, *range(len(_LAYOUTS))),  # which one the first operand has; None: contiguous
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
    **_ARRANGEMENT,
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
    **_ARRANGEMENT,
}

Case = dict[str, Any]


def check_forward_case(case: Case) -> None:
    """Run a forward and hold its results to the oracle."""
    make = _Operands(case, narrow=(3, 3, 7), wide=(2, 3, 3))
    kind, _, stream = (case["stream"] or "").partition(" ")
    x = make.rows(case["x"])
    residual = make.rows(stream) if kind == "+" else None
    weight, bias = make.param(case["weight"]), make.param(case["bias"])
    out = {"y": make.output(case["y"])}
    if kind:
        out["new_residual"] = make.output(stream)
    options = {"c": case["c"], "center": case["center"], "eps": EPS}
    options["residual_dtype"] = stream if kind == "as" else None
    result = emulate_forward(
        x, weight, bias, residual=residual, out=out, plan=make.plan, **options
    ).result
    check_forward(result, x, weight, bias, residual, **options)


def check_backward_case(case: Case) -> None:
    """Run a backward and hold its results to the oracle."""
    make = _Operands(case, narrow=(3, 3, 7), wide=(1, 3, 2))
    dy, x, d_residual = (make.rows(case[name]) for name in ("dy", "x", "d_residual"))
    weight, bias = make.param(case["weight"]), make.param(case["bias"])
    needs, outputs = case["needs"], case["outputs"]
    if not any(case[name] for name in needs):
        outputs = outputs or "dx"  # something must be asked for
    x_dtype = case["dx"] if outputs.startswith("dx") else None
    dtypes = {"dx": x_dtype or case["x"], "dresidual": case["x"]}
    options = {"c": case["c"], "center": case["center"]}
    result = emulate_backward(
        dy,
        x,
        weight,
        bias,
        d_residual=d_residual,
        x_dtype=x_dtype,
        needs=(*needs, "x") if outputs else needs,
        out={name: make.output(dtypes[name]) for name in outputs.split()},
        plan=make.plan,
        **options,
        **statistics(x, center=case["center"], x_dtype=x_dtype),
    ).result
    assert {name for name in ("dx", "dresidual") if getattr(result, name) is not None} >= set(
        outputs.split()
    )
    check_backward(result, dy, x, weight, bias, d_residual, eps=EPS, **options)


class _Operands(Operands):
    """The operands that a case asks for; those with rows get one layout after the other."""

    def __init__(self, case: Case, narrow: tuple[int, ...], wide: tuple[int, ...]) -> None:
        leading = narrow if case["width"] <= 1000 else wide
        leading = (1, 1, 1) if case["rows"] == "one" else leading
        super().__init__((*leading, case["width"]), case["far"])
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

    def rows(self, dtype, **options):  # noqa: ANN
        return None if dtype is None else super().rows(dtype, self._next_layout(), **options)

    def param(self, dtype):
        return None if dtype is None else super().param(dtype)

    def output(self, dtype: str):
        return empty(self.shape, dtype, self._next_layout())

    def _next_layout(self) -> str:
        if self._layouts is None:
            return "contiguous"
        self._layouts = (self._layouts + 1) % len(_LAYOUTS)
        return _LAYOUTS[self._layouts - 1]
