# SPDX-License-Identifier: MIT
"""A row or sample has the same bits in any layout, among any other rows, and in any grid."""

from __future__ import annotations

import math

import pytest

from tests.emulation.machine import needs_softgpu
from tests.emulation.plans import PLANS, every_plan
from tests.support import calls
from tests.support.cases import call_of
from tests.support.operands import assert_same_bits

pytestmark = needs_softgpu

TYPICAL = {
    *("16 threads a row", "a block of 96 a row, 1 row ahead", "a cluster of 4"),
    *("last, a block", "last, a cluster of several groups", "first, two launches"),
}
assert set().union(*PLANS.values()) >= TYPICAL
some_plans = pytest.mark.parametrize("planned", every_plan(typical=TYPICAL))
CASES = {
    "row_norm_forward": {"center": True, "stream": "+ float32"},
    "row_norm_backward": {"center": True, "d_residual": "float32"},
}
OF_A_ROW = {"y", "residual", "mean", "rstd", "dx", "dresidual"}


def run(planned, settings=None, **case):
    given = planned.case | CASES.get(planned.kernel, {}) | {"far": True}
    if "samples" in given:
        given["samples"] = given["samples"]._replace(samples=4)
    with planned.machine(**(settings or {})):
        results = call_of(planned.kernel, given | case).run()._asdict()
    return {name: field for name, field in results.items() if field is not None}


@some_plans
def test_strides_alignment_and_writing_in_place_change_no_result(planned):
    expected, aliases = run(planned), ("dy", "x") if "backward" in planned.kernel else ("x", "all")
    arrangements = [{"layouts": 1}, {"layouts": 3}, {"offset": 1}]
    arrangements += [{"in_place": aliased} for aliased in aliases]
    for more in arrangements:
        for name, field in run(planned, **more).items():
            assert_same_bits(field, expected[name], f"{name}, {more}")


@pytest.mark.parametrize("name", [*calls.NORMS, *calls.GROUP_NORMS])
def test_results_do_not_depend_on_the_alignment_of_one_array(name):
    call = calls.call_of(name, (3, 8, 64), "cupy")
    for key, array in calls.arrays_of(call.arrays).items():
        given = calls.elsewhere(array, 1)
        assert given.data.ptr % 16 == 4
        calls.assert_same(call.make(**{key: given}), call.make(**{key: given.copy()}))


@some_plans
def test_a_row_is_the_same_among_other_rows_in_another_place_and_in_another_grid(planned):
    expected, case = run(planned), planned.case
    count = math.prod(case["shape"][:3]) if "shape" in case else 4
    order = list(range(count))
    for settings, picked in (({}, order[::-1]), ({}, [1, 1, 0]), ({"multiprocessors": 132}, None)):
        for name, field in run(planned, settings, picked=picked).items():
            if name in OF_A_ROW:
                rows = expected[name].reshape(count, -1)[order if picked is None else picked]
                assert_same_bits(field.reshape(rows.shape), rows, name)
