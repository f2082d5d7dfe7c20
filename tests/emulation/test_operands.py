# SPDX-License-Identifier: MIT
"""Every kind of plan gives right results for every pair of choices of operands and options.

A case runs one or more builds, with several rows or samples in some memory layout, in lockstep and
in another order of threads. Choices without effect in a case are also passed, if they are valid.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.emulation.machine import SCHEDULES, needs_softgpu
from tests.emulation.plans import KERNELS, PLANS, Planned
from tests.support.case_covers import arranged, cover
from tests.support.cases import call_of
from tests.support.covers import label
from tests.support.operands import assert_same_fields, at

pytestmark = needs_softgpu


def cases(kernel: str, seed: int | None = None) -> list[Any]:
    """Return a cover of all pairs, plans included; a seed gives another cover."""
    draw = random.Random(kernel)
    found = cover(kernel, {"plan": tuple(PLANS[kernel])}, seed)
    return [arranged(kernel, draw, case) for case in found]


def sampled(kernel: str) -> list[Any]:
    """Return a cover as test parameters; CI runs a tenth of them."""
    found = cases(kernel)
    in_ci = random.Random(kernel).sample(range(len(found)), len(found) // 10)
    return [
        pytest.param(
            *(kernel, case),
            id=f"{kernel}-{label(case)}",
            marks=() if number in in_ci else pytest.mark.exhaustive,
        )
        for number, case in enumerate(found)
    ]


def check(kernel: str, case: Any) -> None:
    """Check a case against the oracle; another order of threads must give the same results."""
    planned, draw = Planned(kernel, case["plan"]), random.Random(f"{kernel} {case}")
    planned_case = planned.case
    if case.get("groups", 1) > 1 and planned_case["shape"][-1] > 6000:
        planned_case["shape"] = (1, 1, 2, planned_case["shape"][-1])
    call = call_of(kernel, planned_case | case)
    with planned.machine() as launches:
        usual = call.check()
    order = SCHEDULES[draw.choice([*SCHEDULES][1:])]
    # One block or cluster walks the rows of each group. A group norm's launch has few samples.
    is_row = planned.rows is not None
    few = {"grid": launches[0].build.cluster * case["groups"]} if is_row else {"few": 2}
    with planned.machine(**few, copies=draw.choice(["late", "early"]), **order):
        assert_same_fields(call.run(), usual)


@pytest.mark.parametrize(("kernel", "case"), [case for k in KERNELS for case in sampled(k)])
def test_answers_are_right_for_every_pair_of_choices(kernel, case):
    check(kernel, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kernel", KERNELS)
def test_answers_are_right_for_drawn_pairs_of_choices(kernel, seed):
    for case in cases(kernel, seed):
        with at(case):
            check(kernel, case)
