# SPDX-License-Identifier: MIT
"""Calls of the group norms under emulation by cases of a cover, each held to the oracle.

A case says what the operands are, how they lie in memory and how the kernels are launched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cunorm import reference
from tests.support.group_bounds import check_group_backward, check_group_forward

from .covered import ACTIVATIONS, DTYPES, OPTIONAL, _added
from .emulator import ORDERS
from .group_arrays import EPS, INPUT_LAYOUTS, LAYOUTS, Grid, Operands, saved, small_tiling
from .group_kernels import GroupPlan, emulate_group_backward, emulate_group_forward

SPATIAL = {1: (), 2: (2,), 7: (7, 1), 31: (31,), 64: (4, 8, 2), 3007: (97, 31)}
GROUPS = ("one", "some", "all")
PLANS = {"usual": {}, "three launches": {"passes": 3}, "small tiles": {"tiling": small_tiling}}
_MOST = 130_000  # elements of a sample; beyond, there are fewer positions

COMMON = {
    "positions": tuple(SPATIAL),
    "channels": (1, 3, 10, 32, 40, 96, 320),
    "groups": GROUPS,
    "samples": (1, 3),
    "channels_last": (True, False),
    "channel_axis": (-1, 1),
    "x": DTYPES,
    "weight": OPTIONAL,
    "bias": OPTIONAL,
    "activation": (None, *ACTIVATIONS[1:]),
    "far": (False, True),
    "layouts": (None, *range(len(INPUT_LAYOUTS))),  # of the first operand; others have those after
    "place": (("end", None), ("start", None), ("end", 1), ("start", 2), ("end", 4)),
    "plan": tuple(PLANS),
    "chunk": (None, 1),
    "order": ORDERS,
}
FORWARD = {**COMMON, "y": DTYPES, "saves": (True, False), "in_place": (False, True)}
BACKWARD = {
    **COMMON,
    "dy": DTYPES,
    "dx": DTYPES,
    "needs": (("x", "weight", "bias"), ("x",), ("weight", "bias"), ("weight",), ("bias",)),
    "accumulate": (None, "float32", "float64"),  # onto arrays of this dtype
    "in_place": (None, "dy", "x"),
}

Case = dict[str, Any]


def telling(case: Case) -> Case:
    """Return what of a case makes a difference: not, say, a dtype of no result."""
    idle = {"chunk"} if case.get("samples") == 1 else set()
    if "needs" in case:
        needs = {name for name in case["needs"] if name == "x" or case.get(name)}
        idle |= set() if needs - {"x"} else {"accumulate"}
        idle |= set() if "x" in needs else {"dx", "in_place"}
    if case.get("in_place"):
        idle |= {"y", "dx"}
    return {name: choice for name, choice in case.items() if name not in idle}


def check_forward_case(case: Case, **plan: Any) -> None:
    """Run a forward, by a plan with these changes, and hold its results to the oracle."""
    make = _Operands(case)
    layout = make.result_layout() if case["in_place"] else make.next_layout()
    x, weight, bias = (
        make.x(case["x"], layout),
        make.param(case["weight"]),
        make.param(case["bias"]),
    )
    y = x if case["in_place"] else make.grid.empty(case["y"], make.result_layout())
    told = make.told | {"eps": EPS}
    ran = emulate_group_forward(
        *(x, make.groups, weight, bias),
        **told,
        saves=case["saves"],
        out={"y": y},
        plan=replace(make.plan, **plan),
    )
    check_group_forward(ran.result, x, make.groups, weight, bias, **told)
    assert (ran.result.mean is not None) == (ran.result.rstd is not None) == case["saves"]


def check_backward_case(case: Case, **plan: Any) -> None:
    """Run a backward, by a plan with these changes, and hold its results to the oracle."""
    make = _Operands(case)
    weight, bias = make.param(case["weight"]), make.param(case["bias"])
    given = {"x": True, "weight": weight is not None, "bias": bias is not None}
    needs = tuple(name for name in case["needs"] if given[name]) or ("x",)
    in_place = case["in_place"] if "x" in needs else None
    dy, x = (
        draw(case[name], make.result_layout() if name == in_place else make.next_layout())
        for name, draw in (("dy", make.dy), ("x", make.x))
    )
    out = {}
    if "x" in needs:
        dx = {"dy": dy, "x": x}.get(in_place)
        out["dx"] = make.grid.empty(case["dx"], make.result_layout()) if dx is None else dx
    parameters = [f"d{name}" for name in needs if name != "x"] if case["accumulate"] else []
    before = {name: make.param(case["accumulate"]) for name in parameters}
    statistics = saved(x, make.groups, case["channel_axis"])
    ran = emulate_group_backward(
        *(dy, x, make.groups, weight, bias),
        **make.told,
        **statistics,
        needs=needs,
        accumulate=bool(before),
        out=out | before,
        plan=replace(make.plan, **plan),
    )
    result = ran.result
    if before:
        operands = (dy, x, make.groups, weight, bias)
        exact = reference.group_norm_backward(*operands, **make.told, **statistics)
        result = result._replace(
            **{
                name: _added(getattr(result, name), array, getattr(exact, name))
                for name, array in before.items()
            }
        )
    worst = check_group_backward(result, dy, x, make.groups, weight, bias, eps=EPS, **make.told)
    assert worst.keys() == {f"d{name}" for name in needs}


class _Operands(Operands):
    """What a case asks for; each of its arrays has the layout after the last one's."""

    def __init__(self, case: Case) -> None:
        channels, spatial = case["channels"], SPATIAL[case["positions"]]
        if case["positions"] * channels > _MOST:
            spatial = (_MOST // channels // 7, 7)
        # Of one position or one channel, the longer lines are taken.
        last = case["channels_last"] if channels > 1 else False
        last = last or case["positions"] == 1
        grid = Grid(case["samples"], spatial, channels, last, case["channel_axis"])
        super().__init__(grid, far=case["far"])
        self.groups = groups_of(case["groups"], channels)
        names = ("activation", "channel_axis")
        self.told = {name: case[name] for name in names}
        self._layouts = case["layouts"]
        at, offset = case["place"]
        self.plan = GroupPlan(
            at=at,
            offset=offset,
            order=case["order"],
            seed=channels,
            chunk=case["chunk"],
            **PLANS[case["plan"]],
        )

    def next_layout(self, layouts: tuple[str, ...] = INPUT_LAYOUTS) -> str:
        if self._layouts is None:
            return "contiguous"
        self._layouts += 1
        return layouts[(self._layouts - 1) % len(layouts)]

    def result_layout(self) -> str:
        return self.next_layout(LAYOUTS)


def groups_of(choice: str, channels: int) -> int:
    """Return how many groups there are: one, some, or as many as channels."""
    if choice != "some":
        return 1 if choice == "one" else channels
    return next((n for n in (32, 8, 5, 3) if channels % n == 0 and n < channels), 1)
