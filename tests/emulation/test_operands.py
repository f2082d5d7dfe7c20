# SPDX-License-Identifier: MIT
"""By every kind of plan, answers are right for every pair of choices of operands and of a norm.

A case is a build or some, run with several rows, that lie in memory in one way or another, in
lockstep and in another order. What is idle in a case is given all the same, where it is legal.
"""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import pytest

from tests.emulation.arrays import GROUP_LAYOUTS, ROW_LAYOUTS
from tests.emulation.calls import CALLS
from tests.emulation.machine import SCHEDULES, needs_softgpu
from tests.emulation.plans import GROUP_PLANS, ROW_PLANS, Planned
from tests.support.covers import Case, label, pairwise
from tests.support.operands import DTYPES, assert_same_fields

pytestmark = needs_softgpu

NARROW = (None, "float32", "bfloat16")
ACTIVATIONS = ("silu", "gelu", "tanh", "relu", "sigmoid", "gelu_tanh", "identity")
NORM = {
    **{"center": (False, True), "c": (None, 1.0), "groups": (1, 3), "weight_offset": (0.0, 1.0)},
    **{"round_before_weight": (False, True), "gate_position": ("pre", "post")},
    **{"gate": (None, "float32", "bfloat16", "float16"), "gate_activation": ACTIVATIONS[:3]},
    **{"weight": NARROW, "bias": NARROW},
}
FACTORS = {
    "row_norm_forward": {
        **{"plan": tuple(ROW_PLANS), "x": tuple(DTYPES), "y": (None, *NARROW[1:])},
        **{"stream": (None, "+ float32", "as bfloat16"), "in_place": (None, "x", "all"), **NORM},
    },
    "row_norm_backward": {
        **{"plan": tuple(ROW_PLANS), "x": tuple(DTYPES), "dy": (*NARROW[1:], "float16")},
        **{
            "d_residual": NARROW,
            "dx": NARROW,
            "dgate": (None, "float32"),
            "in_place": (None, "dy"),
        },
        "needs": (("x", "weight", "bias", "gate"), ("x", "gate"), ("weight", "bias"), ("weight",)),
        **{"accumulate": (None, "float32", "float64"), **NORM},
    },
    "group_norm_forward": {
        **{"plan": tuple(GROUP_PLANS), "x": tuple(DTYPES), "y": NARROW, "in_place": (None, "x")},
        **{"weight": NARROW, "bias": NARROW, "activation": (None, "silu", "gelu", "relu")},
    },
    "group_norm_backward": {
        **{"plan": tuple(GROUP_PLANS), "x": tuple(DTYPES), "dy": NARROW[1:], "dx": NARROW},
        **{"weight": NARROW, "bias": NARROW, "activation": (None, "silu", "gelu", "relu")},
        **{"needs": (("x", "weight", "bias"), ("x",), ("weight", "bias"), ("bias",))},
        **{"accumulate": (None, "float32", "float64"), "in_place": (None, "dy", "x")},
    },
}


def legal(case: Case) -> Case:
    """Return a case less what cannot be: a result has the dtype of what it is written over."""
    more = {}
    if case["in_place"] == "dy":
        more = {"dx": case["dy"], "dgate": None}
    elif case["in_place"]:
        more = {"dx": None, "y": None}
    return case | {name: choice for name, choice in more.items() if name in case}


def telling(case: Case) -> Case:
    """Return what of a case, or of a part of one, is not idle."""
    idle: set[str] = set()
    if not case.get("gate", True):
        idle |= {"gate_activation", "gate_position", "dgate"}
    idle |= set() if case.get("weight", True) else {"weight_offset"}
    idle |= set() if not case.get("in_place") else {"y", "dx", "dgate"}
    needs = case.get("needs", ("x", "gate", "weight"))
    idle |= set() if "x" in needs else {"dx", "d_residual", "in_place"}
    idle |= set() if "gate" in needs else {"dgate"}
    idle |= set() if {"weight", "bias"} & set(needs) else {"accumulate"}
    return {name: choice for name, choice in case.items() if name not in idle}


def arranged(kernel: str, number: int, case: Case) -> Case:
    """Add how arrays lie in memory, and how the kernel is run."""
    draw = random.Random(f"{kernel} {number}")
    layouts = GROUP_LAYOUTS if "group" in kernel else ROW_LAYOUTS
    run = {"schedule": draw.choice([*SCHEDULES][1:]), "copies": draw.choice(["late", "early"])}
    # an array that a result is written over has no two elements in one place
    first = None if case["in_place"] else draw.choice([None, *range(len(layouts))])
    arrangement = {"layouts": first, "offset": draw.choice([0, 0, 1, 2, 4])}
    return legal(case) | arrangement | run | {"far": draw.choice([False, True])}


def cases(kernel: str, seed: int | None = None) -> list[Case]:
    """Return a cover of all pairs; another one for another seed, with more choices."""
    factors = FACTORS[kernel]
    if seed is not None:
        activations = {"gate_activation": ACTIVATIONS, "activation": (None, *ACTIVATIONS[:-1])}
        more = dict.fromkeys(("weight", "bias", "gate", "d_residual", "dx", "y"), (None, *DTYPES))
        more |= activations | {"dy": tuple(DTYPES)}
        factors = {name: more.get(name, choices) for name, choices in factors.items()}
        factors = dict(random.Random(seed).sample(list(factors.items()), len(factors)))
    found = pairwise(factors, telling)
    return [arranged(kernel, number, case) for number, case in enumerate(found)]


def check(kernel: str, case: Case) -> None:
    """Hold a case to the oracle, and its results in another order to these."""
    planned = Planned(kernel, case["plan"])
    of = planned.case
    if case.get("groups", 1) > 1 and of["shape"][-1] > 6000:
        of["shape"] = (1, 1, 2, of["shape"][-1])
    call = CALLS[kernel](of | case)
    with planned.machine():
        usual = call.check()
    with planned.machine(few=True, copies=case["copies"], **SCHEDULES[case["schedule"]]):
        assert_same_fields(call.run(), usual)


def sampled(kernel: str) -> list[Any]:
    """Return a third of a cover for CI; the others are exhaustive."""
    found = cases(kernel)
    in_ci = random.Random(kernel).sample(range(len(found)), len(found) // 3)
    return [
        pytest.param(
            *(kernel, case),
            id=f"{kernel}-{label(case)}",
            marks=() if number in in_ci else pytest.mark.exhaustive,
        )
        for number, case in enumerate(found)
    ]


@pytest.mark.parametrize(("kernel", "case"), list(chain(*map(sampled, CALLS))))
def test_answers_are_right_for_every_pair_of_choices(kernel, case):
    check(kernel, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kernel", CALLS)
def test_answers_are_right_for_other_choices_in_pairs_that_are_drawn(kernel, seed):
    failures = []
    for case in cases(kernel, seed):
        try:
            check(kernel, case)
        except (AssertionError, RuntimeError) as error:
            failures.append(f"{case}\n{error}")
    assert not failures, f"{len(failures)} fail, such as\n{failures[0]}"
