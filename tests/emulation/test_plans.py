# SPDX-License-Identifier: MIT
"""Every kind of plan gives right answers, the same ones in whatever order threads run, no races."""

from __future__ import annotations

import pytest

from tests.emulation.calls import CALLS, row_backward
from tests.emulation.machine import SCHEDULES, needs_softgpu
from tests.emulation.plans import (
    GROUP_PLANS,
    PLANNED,
    ROW_PLANS,
    Planned,
    every_plan,
    of_rows,
)
from tests.support.operands import assert_same_fields

pytestmark = needs_softgpu

# Operands beside x, weight and bias; a gate has other plans.
CASES = {
    "row_norm_forward": {"center": True, "stream": "+ float32"},
    "row_norm_backward": {"center": True, "d_residual": "float32"},
    "group_norm_forward": {},
    "group_norm_backward": {},
}


def call_of(planned):
    return CALLS[planned.kernel](planned.case | CASES[planned.kernel])


@pytest.mark.parametrize("planned", PLANNED, ids="-".join)
def test_every_kind_of_plan_is_what_its_name_says_and_is_right(planned):
    kernel, plan = planned
    with planned.machine() as launches:
        call_of(planned).check()
    made = [launch for launch in launches if launch.build.kernel == kernel]
    if plan in GROUP_PLANS:
        assert len(made) == GROUP_PLANS[plan][1]
        last = {dict(launch.build.macros)["CHANNELS_LAST"] for launch in made}
        assert last == {"true" if plan.startswith("last") else "false"}
    else:
        assert of_rows(made[0]) == getattr(ROW_PLANS[plan], kernel.rpartition("_")[2])
    assert len(launches) - len(made) == ("backward" in kernel)  # param_grad


@pytest.mark.parametrize(("planned", "few"), every_plan([True, False]))
def test_results_are_the_same_in_every_order_and_whenever_copies_arrive(planned, few):
    """Of a few blocks, each walks some rows, or a launch has some of the samples."""
    call = call_of(planned)
    with planned.machine(few=few):
        usual = call.check()
    for schedule, told in SCHEDULES.items():
        copies = {"copies": "early"} if schedule in ("lockstep", "reverse") else {}
        with planned.machine(few=few, **told, **copies):
            assert_same_fields(call.run(), usual)


@pytest.mark.parametrize(
    ("planned", "copies"), every_plan(["late", "early"], of={*ROW_PLANS, *GROUP_PLANS})
)
def test_no_thread_races_another(planned, copies):
    with planned.machine(few=True, races=True, copies=copies, schedule="random"):
        call_of(planned).run()


# How many rows of a group a backward takes at a time, with one multiprocessor.
AT_A_TIME = {"16 threads a row": 40, "a block a row": 2, "streamed": 1, "a cluster of 2": 1}


@pytest.mark.parametrize("plan", AT_A_TIME)
@pytest.mark.parametrize("more", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_parameter_gradients_are_right_where_a_block_has_more_rows_than_it_adds_up_at_once(
    plan, more
):
    width, rows = Planned("row_norm_backward", plan).case["shape"][-1], 16 * AT_A_TIME[plan] + more
    groups = 3 if plan == "16 threads a row" else 1
    call = row_backward({"shape": (1, 1, rows, width), "groups": groups, "center": True})
    with Planned("row_norm_backward", plan).machine() as launches:
        call.check()
    macros = dict(launches[0].build.macros)
    teams = max(1, int(macros["THREADS"]) // int(macros["THREADS_PER_ROW"]))
    assert launches[0].parts * teams == AT_A_TIME[plan]
