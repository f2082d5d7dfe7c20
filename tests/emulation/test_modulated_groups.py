# SPDX-License-Identifier: MIT
"""In every kind of plan, a sample with its rows of weight and bias has the bits it has alone."""

from __future__ import annotations

import pytest

from tests.emulation.machine import gpu, needs_softgpu
from tests.emulation.plans import GROUP_PLANS, Planned
from tests.support.modulated_groups import Modulated, check_against_samples_alone
from tests.support.operands import assert_same_bits

pytestmark = needs_softgpu

TYPICAL = {
    *("last, a block of several groups", "last, a cluster of several groups"),
    *("last, two launches of several groups", "last, two launches, parts of channels"),
    *("first, a cluster", "first, two launches"),
}
assert GROUP_PLANS.keys() >= TYPICAL


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, marks=() if plan in TYPICAL else pytest.mark.exhaustive)
        for plan in GROUP_PLANS
    ],
)
def test_results_of_a_sample_are_those_of_the_sample_alone(plan):
    """With padding, rows are not aligned. With `few`, each launch has one sample."""
    call, planned = Modulated(GROUP_PLANS[plan].samples), Planned("group_norm_backward", plan)
    with planned.machine(races=True) as launches:
        results = call.run(gpu())
        alone = call.alone(gpu())
    assert {"group_norm_forward", "group_norm_backward", "param_grad"} == {
        launch.build.kernel for launch in launches
    }
    check_against_samples_alone(results, alone)
    with planned.machine(few=1):
        for name, array in call._replace(padding=0).run(gpu()).items():
            assert_same_bits(array, results[name], name)
