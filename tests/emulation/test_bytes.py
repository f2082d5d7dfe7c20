# SPDX-License-Identifier: MIT
"""A backward reads what the wanted gradients need, and again only what its sums are over."""

from __future__ import annotations

import pytest

from tests.emulation.machine import machine, needs_softgpu
from tests.softgpu.counters import counting
from tests.support.cases import call_of
from tests.support.gradients import MADE_OF, NEEDS

pytestmark = needs_softgpu

LARGE = {"dy", "x", "d_residual", "gate"}
# Plans that keep a row, and that read it again, by widths.
WIDTHS = {"kept": 100, "streamed": 16400}
CASES = [
    pytest.param(*case, plan, marks=() if len(case[1]) == 1 else pytest.mark.exhaustive)
    for case in NEEDS
    for plan in WIDTHS
]


@pytest.mark.parametrize(("position", "needs", "plan"), CASES)
def test_a_backward_reads_what_the_wanted_gradients_need_and_again_for_sums(position, needs, plan):
    case = {"center": True, "round_before_weight": True, "weight_offset": 1.0, "needs": needs}
    case |= {"shape": (1, 1, 5, WIDTHS[plan]), "d_residual": "float32"}
    case |= {"gate": "float32", "gate_position": position} if position else {}
    call = call_of("row_norm_backward", case)
    with machine(), counting() as launches:
        call.check()
    loaded = {
        name: launches[0].of(placed.array.data.ptr).loaded
        for name, placed in call.inputs.items()
        if placed is not None
    }
    assert {name for name, count in loaded.items() if count} == set().union(
        *(MADE_OF[position][name] for name in needs)
    )
    again: set[str] = set()
    if plan == "streamed" and set(needs) != {"bias"}:  # the mean of p, and what dp takes
        again = {"x"} | ({"gate"} if position == "pre" else set())
        if "x" in needs or (position == "pre" and "gate" in needs):
            again |= {"dy", "gate"}
    size = 5 * WIDTHS[plan] * 4
    for name in LARGE & loaded.keys():
        assert loaded[name] in (0, size * (2 if name in again else 1)), name
