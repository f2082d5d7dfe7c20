# SPDX-License-Identifier: MIT
"""Every kind of plan gives right results, the same in any order of threads, without races."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.emulation.machine import SCHEDULES, needs_softgpu
from tests.emulation.plans import (
    BACKWARD_PLANS,
    GROUP_PLANS,
    PLANNED,
    Planned,
    every_plan,
    group_plan_name,
    row_plan_name,
)
from tests.support.cases import call_of, groups_of
from tests.support.internals import source_text
from tests.support.operands import assert_same_bits, assert_same_fields

pytestmark = needs_softgpu

# Operands and options besides x, weight and bias; a gate would change the plan.
CASES = {
    "row_norm_forward": {"center": True, "stream": "+ float32"},
    "row_norm_backward": {"center": True, "d_residual": "float32"},
    "group_norm_forward": {"activation": None},
    "group_norm_backward": {},
}
each_plan = pytest.mark.parametrize("planned", PLANNED, ids="-".join)


def call(planned):
    return call_of(planned.kernel, CASES[planned.kernel] | planned.case)


@cache
def usual(planned):
    """Return a call's launches in the usual order of threads, and its checked results."""
    with planned.machine() as launches:
        return launches, call(planned).check()


def norm_launches(planned, launches):
    """Return the launches except those of param_grad."""
    return [launch for launch in launches if launch.build.kernel == planned.kernel]


@each_plan
def test_every_kind_of_plan_is_what_its_name_says_and_is_right(planned):
    kernel, plan = planned
    launches, _ = usual(planned)
    made = norm_launches(planned, launches)
    if plan in GROUP_PLANS:
        assert plan.startswith(group_plan_name(made))
    else:
        assert row_plan_name(made[0]) == planned.rows.launch
    wanted = planned.case.get("needs", ("weight",))
    assert len(launches) - len(made) == ("backward" in kernel and "weight" in wanted)  # param_grad


@each_plan
def test_no_thread_races_another_and_no_row_or_group_affects_another(planned):
    """The middle row or group is not finite; in a forward, the first one is constant."""
    made, is_forward = call(planned), "forward" in planned.kernel
    usually, right = usual(planned)
    poisoned, field = ("x", "y") if is_forward else ("dy", "dx")
    is_wanted = getattr(right, field) is not None
    if is_wanted:
        operand = groups_of(planned.case, made.inputs[poisoned].host)
        middle = tuple(size // 2 for size in operand.shape)
        operand[middle] = np.nan if is_forward else np.inf
        changed = np.zeros(operand.shape, bool)
        changed[middle[0], :, middle[2]] = True
    for name, value in {"x": 1e4 + 0.3, "residual": 1e4 + 0.3, "gate": 1}.items():
        if is_forward and made.inputs.get(name):
            groups_of(planned.case, made.inputs[name].host)[0, :, 0] = value
    with planned.machine(few=1, races=True, copies="late", schedule="random") as launches:
        got = made.run()
    grids = [max(one.grid for one in norm_launches(planned, many)) for many in (launches, usually)]
    are_few = planned.kernel == "row_norm_backward" or "streamed" in planned.plan
    assert grids[0] < grids[1] or are_few
    if not is_wanted:
        return assert_same_fields(got, right)
    got, expected = (groups_of(planned.case, getattr(one, field)) for one in (got, right))
    assert not np.isfinite(got[changed]).any()
    if is_forward:
        bias = made.inputs["bias"].host if made.inputs["bias"] else np.zeros(got[0].size, got.dtype)
        bias = bias.reshape(-1, *got.shape[2:])[0, 0]
        assert (got[0, :, 0] == bias).all()
        changed[0, :, 0] = True
    assert_same_bits(got[~changed], expected[~changed], field)


@pytest.mark.parametrize("planned", every_plan())
def test_results_are_the_same_in_every_order_and_whenever_copies_arrive(planned):
    """There are few blocks: each walks several rows, or a launch has only some of the samples."""
    made = call(planned)
    with planned.machine(few=1):
        expected = made.check()
    for schedule, settings in SCHEDULES.items():
        if schedule != "lockstep":
            copies = {"copies": "early"} if schedule == "reverse" else {}
            with planned.machine(few=1, **settings, **copies):
                assert_same_fields(made.run(), expected)


def runs_of(planned, rows):
    """Return a kernel's text, by its name, with `rows` as max_recent_rows of param_sums.cuh."""
    text = source_text(planned.kernel)
    assert text.count("max_recent_rows = 32;") == 1
    return {planned.kernel: text.replace("max_recent_rows = 32;", f"max_recent_rows = {rows};")}


@pytest.mark.parametrize(
    ("plan", "rows"), [(plan, 1 + number % 2) for number, plan in enumerate(BACKWARD_PLANS)]
)
def test_parameter_gradients_are_right_where_runs_of_rows_are_short(plan, rows):
    """The first recent sums, of one or two rows, become totals; later ones are added to these."""
    planned = Planned("row_norm_backward", plan)
    with planned.machine(few=1, races=True, sources=runs_of(planned, rows)):
        call(planned).check()


# The rows of a group that a backward takes at a time, with one multiprocessor.
AT_A_TIME = {"16 threads a row": 16, "a block of 96 a row, 1 row ahead": 4, "streamed": 1}
AT_A_TIME |= {"a cluster of 4, 2 rows ahead": 1}


@pytest.mark.parametrize("plan", AT_A_TIME)
def test_parameter_gradients_are_right_where_a_block_has_more_rows_than_it_adds_up_at_once(plan):
    planned = Planned("row_norm_backward", plan)
    groups = 3 if plan == "16 threads a row" else 1
    shape = (1, 1, 32 * AT_A_TIME[plan] + 1, planned.case["shape"][-1])
    made = call_of(planned.kernel, {"shape": shape, "groups": groups, "center": True})
    with planned.machine() as launches:
        made.check()
    macros = dict(launches[0].build.macros)
    teams = max(1, int(macros["THREADS"]) // int(macros["THREADS_PER_ROW"]))
    assert launches[0].parts * teams == AT_A_TIME[plan]
