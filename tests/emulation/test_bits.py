# SPDX-License-Identifier: MIT
"""What the results of a row, or of a sample, do not depend on, to the bit."""

from __future__ import annotations

import math

import pytest

from tests.emulation.arrays import GROUP_LAYOUTS, ROW_LAYOUTS
from tests.emulation.calls import CALLS
from tests.emulation.machine import needs_softgpu
from tests.emulation.plans import every_plan
from tests.support.operands import assert_same_bits

pytestmark = needs_softgpu

IN_CI = {
    *("16 threads a row", "a block a row, copied ahead", "streamed"),
    *("last, one launch", "first, three launches, in a warp"),
}
CASES = {
    "row_norm_forward": {"center": True, "stream": "+ float32", "far": True},
    "row_norm_backward": {"center": True, "d_residual": "float32", "far": True},
    "group_norm_forward": {"far": True},
    "group_norm_backward": {"far": True},
}
OF_A_ROW = {"y", "residual", "mean", "rstd", "dx", "dresidual"}


def run(planned, told=None, **case):
    given = planned.case | CASES[planned.kernel]
    if "samples" in given:
        given["samples"] = given["samples"]._replace(samples=4)
    with planned.machine(**(told or {})):
        return CALLS[planned.kernel](given | case).run()


def assert_same(result, usual, picked=None, names=None):
    """Compare fields by their bits; `picked` says which rows of the usual result these are."""
    compared = 0
    for name, field, other in zip(result._fields, result, usual, strict=True):
        if field is None or not names or name in names:
            assert (field is None) == (other is None)
        if field is None or (names and name not in names):
            continue
        if picked is not None:
            rows = math.prod(other.shape) * len(picked) // field.size
            other = other.reshape(rows, -1)[picked]
        assert_same_bits(field.reshape(other.shape), other, name)
        compared += 1
    assert compared >= 1


@pytest.mark.parametrize("planned", every_plan(of=IN_CI))
def test_results_do_not_depend_on_strides_nor_on_alignment_nor_on_being_in_place(planned):
    usual, of_rows = run(planned), "row" in planned.kernel
    for layout in ROW_LAYOUTS if of_rows else GROUP_LAYOUTS:
        if layout != "expanded":
            assert_same(run(planned, layouts=layout), usual)
    for offset in (1, 2):
        assert_same(run(planned, offset=offset), usual)
    places = ("dy", "x") if "backward" in planned.kernel else ("x", "all")
    for place in places:
        assert_same(run(planned, in_place=place), usual)


@pytest.mark.parametrize("planned", every_plan(of=IN_CI))
def test_a_row_does_not_depend_on_other_rows_nor_its_place_nor_the_grid(planned):
    usual = run(planned)
    case = planned.case
    count = math.prod(case["shape"][:3]) if "shape" in case else 4
    some = ([0], [count - 1], list(range(count))[::-1], [1, 1, count - 1, 0])
    for picked in some:
        assert_same(run(planned, picked=picked), usual, picked, OF_A_ROW)
    for told in ({"few": True}, {"multiprocessors": 132}):
        assert_same(run(planned, told), usual, names=OF_A_ROW)
