# SPDX-License-Identifier: MIT
"""What the results of a row, or of a sample, do not depend on, to the bit."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.emulation.arrays import GROUP_LAYOUTS, ROW_LAYOUTS
from tests.emulation.calls import CALLS
from tests.emulation.machine import gpu, needs_softgpu
from tests.emulation.plans import GROUP_PLANS, ROW_PLANS, every_plan
from tests.support.gpu_arrays import get_all
from tests.support.operands import assert_same_bits, draw

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


# --- constant, and not finite ---------------------------------------------------------------------

FUNCTIONS = {"row": "normalize_{}", "group": "group_norm_{}"}
EVERY = every_plan(of={*ROW_PLANS, *GROUP_PLANS})


def operands(planned):
    """Return what a call takes: of rows under center, or of groups."""
    of = planned.case.get("samples")
    shape = of.shape if of else planned.case["shape"]
    told = {"num_groups": of.groups, "channel_axis": of.channel_axis} if of else {"center": True}
    columns = shape[told.get("channel_axis", -1)]
    arrays = {"x": draw("x", shape, "float32"), "weight": draw("weight", columns, "float32")}
    return arrays | {"bias": draw("bias", columns, "float32")}, told


def computed(planned, arrays, told):
    """Return a call's results by name; of a few blocks, each walks some rows of a row norm."""
    norm, _, direction = planned.kernel.split("_")
    function = getattr(cunorm, FUNCTIONS[norm].format(direction))
    with planned.machine(few=norm == "row"):
        result = function(**{n: gpu().put(a) for n, a in arrays.items()}, **told)
        return {n: a for n, a in get_all(gpu(), result)._asdict().items() if a is not None}


def grouped(array, told):
    """Return a view of samples or rows, positions, groups and their channels."""
    array = np.moveaxis(array, told.get("channel_axis", -1), -1)
    if "center" in told:
        return array.reshape(-1, 1, 1, array.shape[-1])
    return array.reshape(len(array), -1, told["num_groups"], array.shape[-1] // told["num_groups"])


@pytest.mark.parametrize("planned", [p for p in EVERY if "forward" in p.id])
def test_a_constant_row_or_group_gives_exactly_bias(planned):
    arrays, told = operands(planned)
    every = np.moveaxis(arrays["x"], told.get("channel_axis", -1), -1)  # views of x
    parts = grouped(arrays["x"], told)
    constants = np.float32(1e4) * parts[:, :1, :, :1] + np.float32(0.3)
    every[...] = np.broadcast_to(constants, parts.shape).reshape(every.shape)
    results = computed(planned, arrays, told)
    y = np.moveaxis(results["y"], told.get("channel_axis", -1), -1)
    assert_same_bits(np.ascontiguousarray(y), np.broadcast_to(arrays["bias"], y.shape))


@pytest.mark.parametrize("planned", EVERY)
def test_what_is_not_finite_stays_in_its_row_or_group(planned):
    arrays, told = operands(planned)
    poisoned, result = "x", "y"
    if "backward" in planned.kernel:
        forward = FUNCTIONS[planned.kernel.split("_")[0]].format("forward")
        exact = getattr(reference, forward)(arrays["x"], **told)
        arrays |= {name: getattr(exact, name).astype(np.float32) for name in ("mean", "rstd")}
        arrays["dy"] = draw("dy", arrays["x"].shape, "float32")
        poisoned, result = "dy", "dx"
    clean = grouped(computed(planned, arrays, told)[result], told)
    for value in (np.nan, np.inf):
        given = arrays[poisoned].copy()
        at = np.zeros(given.shape, bool)
        at[tuple(size // 2 for size in at.shape)] = True
        given[at] = value
        got = grouped(computed(planned, arrays | {poisoned: given}, told)[result], told)
        own = np.broadcast_to(grouped(at, told).any((1, 3), keepdims=True), got.shape)
        assert not np.isfinite(got[own]).any()
        assert_same_bits(got[~own], clean[~own], result)
