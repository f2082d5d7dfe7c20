# SPDX-License-Identifier: MIT
"""Calls of the row norms and the group norms by cases, each held to the oracle.

A case says what the operands are, which norm is computed of them, and how they lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import cunorm
from cunorm import GroupNormForward, GroupNormGrads, NormForward, NormGrads, reference
from tests.emulation.arrays import GROUP_LAYOUTS, ROW_LAYOUTS, Array, Draws, Placed, Samples
from tests.emulation.machine import gpu
from tests.support.bounds import check_backward, check_forward, ulp
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.operands import DTYPES

EPS = 1e-5
Case = Mapping[str, Any]
Results = dict[str, Array]

_ARRANGED = {
    "eps": EPS,
    "far": False,
    "layouts": None,
    "picked": None,
    "offset": 0,
    "in_place": None,
}
_NORM = {
    **{"c": None, "center": False, "groups": 1, "weight_offset": 0.0},
    **{"round_before_weight": False, "gate_activation": "silu", "gate_position": "post"},
}
# What a case says where it does not say otherwise. Dtypes of operands, None: there is none; of
# results, None: x's, or the operand's of which it is the gradient. `shape` has three leading axes,
# then the width of a group. `layouts` is the layout of all operands, or the number of the first
# one's, and the others have those that follow; None: all are contiguous. `picked` are the numbers
# of the rows or samples of which there are operands; None: all.
ROWS = _NORM | _ARRANGED | {"x": "float32", "gate": None, "weight": "float32", "bias": "float32"}
FORWARD = ROWS | {"stream": None, "y": None}
BACKWARD = ROWS | {
    **{"dy": "float32", "d_residual": None, "dx": None, "dgate": None},
    **{"needs": ("x", "weight", "bias", "gate"), "accumulate": None},
}
OF_CHANNELS = _ARRANGED | {
    **{"x": "float32", "weight": "float32", "bias": "float32", "activation": "silu"},
}
GROUP_FORWARD = OF_CHANNELS | {"y": None}
GROUP_BACKWARD = OF_CHANNELS | {
    **{"dy": "float32", "dx": None, "needs": ("x", "weight", "bias"), "accumulate": None},
}


class Call(NamedTuple):
    """A call of a function, whose arrays have been placed."""

    function: Callable[..., Any]
    inputs: dict[str, Placed | None]
    told: dict[str, Any]
    out: Any  # the function's result, of what is placed
    arrays: list[Placed]
    hold: Callable[[Any], Any]  # to the oracle

    def run(self) -> Any:
        """Make the call, and return its results; it writes nothing else."""
        for placed in self.arrays:
            placed.put()
        given = {name: placed and placed.array for name, placed in self.inputs.items()}
        places = [placed for placed in self.out if placed is not None]
        out = type(self.out)(*(placed and placed.array for placed in self.out))
        result = self.function(**given, **self.told, out=out if places else None)
        for placed in self.arrays:
            placed.check(written=any(placed is place for place in places))
        return type(result)(*(array if array is None else array.get() for array in result))

    def check(self) -> Any:
        """Make the call, hold its results to the oracle, and return them."""
        result = self.run()
        self.hold(result)
        return result


def _host(placed: Placed | None) -> Array | None:
    return None if placed is None else placed.host


def _taken(case: Case, names: Mapping[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in names}


def _arrangement(case: Case, names: tuple[str, ...]) -> dict[str, Any]:
    first = case["layouts"]
    layouts = (first or "contiguous",)
    if isinstance(first, int):
        layouts = (*names[first:], *names[:first])
    return {"layouts": layouts, "far": case["far"], "offset": case["offset"]}


def _row_draws(case: Case) -> Draws:
    *leading, width = case["shape"]
    columns, picked = width * case["groups"], case["picked"]
    drawn = shape = (*leading, columns)
    told = _arrangement(
        case, tuple(name for name in ROW_LAYOUTS if case["groups"] == 1 or name != "three strides")
    )
    if picked is not None:
        shape = (1, 1, len(picked), columns)
        told["pick"] = lambda values: values.reshape(-1, columns)[picked].reshape(shape)
    return Draws(gpu(), lambda dtype, at: ROW_LAYOUTS[at](shape, dtype), drawn, columns, **told)


def _norm(case: Case, make: Draws) -> tuple[dict[str, Any], Placed | None]:
    """Return keyword arguments of cunorm.normalize, and the gate."""
    told = _taken(case, _NORM)
    if case["weight"] is None:
        told["weight_offset"] = 0.0
    return told, make.large(case["gate"], near=True)


def row_forward(case: Case) -> Call:
    """Place a call of normalize_forward; `stream`: "+ float32" for a residual, or "as float32"."""
    case = FORWARD | case
    make = _row_draws(case)
    told, gate = _norm(case, make)
    kind, _, stream = (case["stream"] or "").partition(" ")
    x, residual = make.large(case["x"]), make.large(stream if kind == "+" else None)
    weight, bias = make.param(case["weight"]), make.param(case["bias"])
    told["eps"] = case["eps"]
    if kind == "as":
        told["residual_dtype"] = DTYPES[stream]
    y = x if case["in_place"] else make.result(case["y"] or case["x"])
    new = residual if case["in_place"] == "all" else make.result(stream) if kind else None
    inputs = {"x": x, "weight": weight, "bias": bias, "residual": residual, "gate": gate}
    given = [_host(inputs[name]) for name in ("x", "weight", "bias", "residual")]
    hold = partial(_hold_forward, given, told | {"gate": _host(gate)})
    return Call(cunorm.normalize_forward, inputs, told, NormForward(y, new), make.all, hold)


def _hold_forward(given: list[Any], told: dict[str, Any], result: Any) -> None:
    check_forward(result, *given, **told)


def row_backward(case: Case) -> Call:
    """Place a call of normalize_backward."""
    case = BACKWARD | case
    make = _row_draws(case)
    told, gate = _norm(case, make)
    dy, x = make.large(case["dy"], near=True), make.large(case["x"])
    d_residual = make.large(case["d_residual"], near=True)
    inputs = {"dy": dy, "x": x, "d_residual": d_residual, "gate": gate}
    inputs |= {name: make.param(case[name]) for name in ("weight", "bias")}
    x_dtype = case["dx"] or case["x"]
    hosts = {name: _host(placed) for name, placed in inputs.items()}
    hosts["x_dtype"] = DTYPES[x_dtype]
    wide = "float64" in (case["x"], x_dtype)
    names = ("center", "groups", "gate_activation", "gate_position")
    exact = reference.normalize_forward(x.host, gate=_host(gate), eps=EPS, **_taken(case, names))
    statistics = [exact.rstd, exact.mean if case["center"] else None]
    statistics = [None if s is None else s.astype(f"f{8 if wide else 4}") for s in statistics]
    inputs |= dict(zip(("rstd", "mean"), map(make.values, statistics), strict=True))
    needs = tuple(name for name in case["needs"] if inputs.get(name)) or ("x",)
    out = _gradients(case, make, inputs, needs, x_dtype)
    before = _accumulated(case, make, needs)
    called = told | {"needs": needs, "accumulate": bool(before), "x_dtype": hosts["x_dtype"]}
    hold = partial(
        _hold_backward, hosts, told, dict(zip(("rstd", "mean"), statistics, strict=True)), before
    )
    return Call(cunorm.normalize_backward, inputs, called, out._replace(**before), make.all, hold)


def _gradients(case: Case, make: Draws, inputs: Any, needs: Any, x_dtype: str) -> NormGrads:
    """Place dx, dgate and dresidual: over inputs, where it says so."""
    found: dict[str, Placed] = {}
    if "x" in needs:
        found["dx"] = inputs[case["in_place"]] if case["in_place"] else make.result(x_dtype)
        if x_dtype != case["x"]:
            found["dresidual"] = make.result(case["x"])
    if "gate" in needs:
        over = inputs["gate"] if case["in_place"] else None
        found["dgate"] = over or make.result(case["dgate"] or case["gate"])
    return NormGrads(**found)


def _accumulated(case: Case, make: Draws, needs: tuple[str, ...]) -> dict[str, Placed]:
    """Place what gradients of parameters are added to, if anything."""
    names = [f"d{name}" for name in ("weight", "bias") if name in needs]
    return {name: make.param(case["accumulate"]) for name in names if case["accumulate"]}


def _hold_backward(hosts: Any, told: Any, statistics: Any, before: Any, result: Any) -> None:
    operands = hosts | told
    if before:
        exact = reference.normalize_backward(**operands, **statistics)
        result = _less(result, before, exact)
    check_backward(result, **operands, eps=EPS)


def _less(result: Any, before: dict[str, Placed], exact: Any) -> Any:
    """Return a result less what it was added to: what is nearest to the exact sum and rounds so."""
    for name, placed in before.items():
        total = getattr(result, name)
        rounding = 0.5 * ulp(total, str(total.dtype))
        added = total.astype(np.float64) - placed.host.astype(np.float64)
        nearest = np.clip(getattr(exact, name), added - rounding, added + rounding)
        result = result._replace(**{name: nearest})
    return result


def _group_draws(case: Case) -> tuple[Draws, dict[str, Any]]:
    of: Samples = case["samples"]
    told, picked, shape = _arrangement(case, GROUP_LAYOUTS), case["picked"], of.shape
    if picked is not None:
        of = of._replace(samples=len(picked))
        told["pick"] = lambda values: values[picked]
    where = {"num_groups": of.groups, "channel_axis": of.channel_axis}
    draws = Draws(gpu(), of.empty, shape, of.channels, **told)
    return draws, where | {"activation": case["activation"]}


def group_forward(case: Case) -> Call:
    """Place a call of group_norm_forward."""
    case = GROUP_FORWARD | case
    make, told = _group_draws(case)
    inputs = {"x": make.large(case["x"])}
    inputs |= {name: make.param(case[name]) for name in ("weight", "bias")}
    y = inputs["x"] if case["in_place"] else make.result(case["y"] or case["x"])
    told["eps"] = case["eps"]
    hosts = {name: _host(placed) for name, placed in inputs.items()}
    hold = partial(_hold_group, check_group_forward, hosts | told)
    out = GroupNormForward(y)
    return Call(cunorm.group_norm_forward, inputs, told, out, make.all, hold)


def _hold_group(check: Any, operands: dict[str, Any], result: Any) -> None:
    check(result, **operands)


def group_backward(case: Case) -> Call:
    """Place a call of group_norm_backward."""
    case = GROUP_BACKWARD | case
    make, told = _group_draws(case)
    inputs = {"dy": make.large(case["dy"], near=True), "x": make.large(case["x"])}
    inputs |= {name: make.param(case[name]) for name in ("weight", "bias")}
    hosts = {name: _host(placed) for name, placed in inputs.items()}
    of = case["samples"]
    where = {"num_groups": of.groups, "channel_axis": of.channel_axis, "eps": EPS}
    exact = reference.group_norm_forward(hosts["x"], **where)
    compute = np.float64 if case["x"] == "float64" else np.float32
    statistics = {name: getattr(exact, name).astype(compute) for name in ("mean", "rstd")}
    inputs |= {name: make.values(array) for name, array in statistics.items()}
    needs = tuple(name for name in case["needs"] if inputs[name]) or ("x",)
    before = _accumulated(case, make, needs)
    out = GroupNormGrads(**before)
    if "x" in needs:
        over = inputs[case["in_place"]] if case["in_place"] else None
        out = out._replace(dx=over or make.result(case["dx"] or case["x"]))
    called = told | {"needs": needs, "accumulate": bool(before)}
    hold = partial(_hold_group_backward, hosts | told, statistics, before)
    return Call(cunorm.group_norm_backward, inputs, called, out, make.all, hold)


def _hold_group_backward(operands: Any, statistics: Any, before: Any, result: Any) -> None:
    if before:
        exact = reference.group_norm_backward(**operands, **statistics)
        result = _less(result, before, exact)
    check_group_backward(result, **operands, eps=EPS)


CALLS = {
    "row_norm_forward": row_forward,
    "row_norm_backward": row_backward,
    "group_norm_forward": group_forward,
    "group_norm_backward": group_backward,
}
