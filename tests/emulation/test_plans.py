# SPDX-License-Identifier: MIT
"""Every kind of plan gives right answers, the same ones in whatever order threads run, no races."""

from __future__ import annotations

import pytest

from tests.emulation.calls import CALLS
from tests.emulation.machine import SCHEDULES, needs_softgpu
from tests.emulation.plans import GROUP_PLANS, PLANNED, ROW_PLANS, every_plan, of_rows
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
