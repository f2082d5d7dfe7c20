# SPDX-License-Identifier: MIT
"""The bytes that row norms move, and that the second launch of a group norm reads."""

from __future__ import annotations

import pytest

from tests.emulation.machine import machine, needs_softgpu
from tests.emulation.plans import ROW_PLANS, Planned, every_plan, row_plan_name
from tests.softgpu.counters import counting
from tests.support.cases import call_of
from tests.support.gradients import INPUTS_OF, NEEDS

pytestmark = needs_softgpu

LARGE = {"dy", "x", "d_residual", "gate"}
# The width of a plan that holds rows, and of a plan that streams them.
WIDTHS = {"held": 100, "streamed": 16400}
CASES = [
    pytest.param(*case, plan, marks=() if len(case[1]) == 1 else pytest.mark.exhaustive)
    for case in NEEDS
    for plan in WIDTHS
]


@pytest.mark.parametrize(("position", "needs", "plan"), CASES)
def test_a_backward_reads_what_it_needs_and_inputs_of_streamed_sums_twice(position, needs, plan):
    case = {"center": True, "round_before_weight": True, "weight_offset": 1.0, "needs": needs}
    case |= {"shape": (1, 1, 5, WIDTHS[plan]), "d_residual": "float32"}
    case |= {"gate": "float32", "gate_position": position} if position else {}
    call = call_of("row_norm_backward", case)
    with machine(), counting() as launches:
        call.check()
    loaded = {
        name: launches[0].range_at(placed.array.data.ptr).loaded
        for name, placed in call.inputs.items()
        if placed is not None
    }
    assert {name for name, count in loaded.items() if count} == set().union(
        *(INPUTS_OF[position][name] for name in needs)
    )
    read_twice: set[str] = set()
    if plan == "streamed" and set(needs) != {"bias"}:
        read_twice = {"x"} | ({"gate"} if position == "pre" else set())  # for the mean
        if "x" in needs or (position == "pre" and "gate" in needs):  # for the sums of dx and dgate
            read_twice |= {"dy", "gate"}
    size = 5 * WIDTHS[plan] * 4
    for name in LARGE & loaded.keys():
        assert loaded[name] in (0, size * (2 if name in read_twice else 1)), name


OPERANDS = {
    "plain": {},
    "residual": {"stream": "+ float32", "d_residual": "float32"},
    "pre-gate": {"gate": "float32", "gate_position": "pre"},
    "residual, post-gate": {"stream": "+ float32", "d_residual": "float32", "gate": "float32"},
}
# The number of arrays as large as x that a forward and a backward must move.
ARRAYS = {"plain": (2, 3), "residual": (4, 4), "pre-gate": (3, 5), "residual, post-gate": (5, 6)}
# The number of arrays that a forward and a backward read twice if rows are streamed.
READ_TWICE = {
    "plain": (1, 2),  # x; dy and x
    "residual": (1, 2),
    "pre-gate": (2, 3),  # also the gate
    "residual, post-gate": (1, 3),
}
ALL = ("x", "weight", "bias", "gate")
EVERY_PLAN = [one for one in every_plan() if one.values[0].kernel in ROW_PLANS]


@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("planned", EVERY_PLAN)
def test_a_plan_moves_each_array_once_and_reads_inputs_of_streamed_sums_twice(planned, operands):
    dtype, is_backward = planned.case.get("x", "float32"), "backward" in planned.kernel
    case = planned.case | {"gate": None, "d_residual": None, "stream": None}
    case |= {"center": True, "needs": ALL}
    case |= {name: text.replace("float32", dtype) for name, text in OPERANDS[operands].items()}
    call = call_of(planned.kernel, case)
    with planned.machine() as planned_launches, counting() as launches:
        call.check()
    size = call.inputs["x"].array.nbytes
    rows = [placed.array for placed in call.arrays if placed.array.nbytes == size]
    moved = [launches[0].range_at(array.data.ptr) for array in rows]
    arrays = ARRAYS[operands][is_backward]
    if "streamed" in row_plan_name(planned_launches[0]):
        arrays += READ_TWICE[operands][is_backward]
    assert sum(one.loaded + one.stored for one in moved) == arrays * size


OF_SAMPLES = {"weight_own": "100", "bias_own": "100"}
BRANCH = {"stream": "+ float32", "gate": "float32", "gate_position": "branch"}
BRANCH |= {"d_residual": "float32"}
# The case; as above, arrays that a forward and a backward must move, and that they read twice.
MODULATED: dict[str, tuple[dict[str, str], tuple[int, int], tuple[int, int]]] = {
    "of samples": (OF_SAMPLES, (2, 3), (1, 2)),  # x; dy and x
    "of rows": ({"weight_own": "111", "bias_own": "111"}, (4, 6), (1, 3)),  # also the weight
    "gate": (BRANCH, (5, 8), (1, 2)),  # the stream; dy and x
    "gate of samples": (BRANCH | OF_SAMPLES | {"gate_own": "100"}, (4, 6), (1, 2)),
}
MODULATED_IN_CI = {
    ("row_norm_forward", "a cluster of 4", "of samples"),
    ("row_norm_forward", "8 threads a row", "of rows"),
    ("row_norm_forward", "streamed", "gate"),
    ("row_norm_forward", "a block of 64 a row", "gate of samples"),
    ("row_norm_backward", "streamed", "of samples"),
    ("row_norm_backward", "16 threads a row, 1 row ahead", "of rows"),
    ("row_norm_backward", "a block of 64 a row", "gate"),
    ("row_norm_backward", "a cluster of 4, 2 rows ahead", "gate of samples"),
}


@pytest.mark.parametrize(
    ("planned", "operands"),
    [
        pytest.param(
            *(Planned(kernel, plan), operands),
            marks=() if (kernel, plan, operands) in MODULATED_IN_CI else pytest.mark.exhaustive,
            id=f"{kernel}-{plan}-{operands}",
        )
        for kernel, plans in ROW_PLANS.items()
        for plan in plans
        for operands in MODULATED
    ],
)
def test_parameters_with_rows_are_read_for_each_row_of_x_at_most(planned, operands):
    """Arrays as large as x move as often as they must; other parameters are read from L2 again."""
    case, arrays, read_twice = MODULATED[operands]
    dtype, is_backward = planned.case.get("x", "float32"), "backward" in planned.kernel
    shape, given = planned.case["shape"], ("dx", "dweight", "dbias", "dgate")
    given += ("dresidual",) if "gate" in case else ()
    made = planned.case | {"gate": None, "d_residual": None, "stream": None, "center": True}
    made |= dict.fromkeys(("weight", "bias"), dtype) | {"needs": ALL}
    made |= {name: text.replace("float32", dtype) for name, text in case.items()}
    made |= {"shape": shape if shape[0] > 1 else (2, 1, 2, shape[-1])}
    call = call_of(planned.kernel, made | ({"given": given} if is_backward else {}))
    with planned.machine() as planned_launches, counting() as launches:
        call.check()
    x = call.inputs["x"].array
    large = [one.array for one in call.arrays if one.array.nbytes == x.nbytes]
    moved = [launches[0].range_at(array.data.ptr) for array in large]
    is_streamed = "streamed" in row_plan_name(planned_launches[0])
    count = arrays[is_backward] + (read_twice[is_backward] if is_streamed else 0)
    assert sum(one.loaded + one.stored for one in moved) == count * x.nbytes
    for name in ("weight", "bias", "gate"):
        array = call.inputs[name] and call.inputs[name].array
        if array is not None and array.nbytes < x.nbytes:
            of_array = launches[0].range_at(array.data.ptr)
            assert of_array.loaded <= x.nbytes * (2 if is_backward and is_streamed else 1)
            is_read = not (is_backward and name == "bias")
            assert of_array.distinct_loaded == (array.nbytes if is_read else 0)


@pytest.mark.parametrize("needs", [("weight",), ("x", "weight")], ids="-".join)
@pytest.mark.parametrize("plan", ["last, two launches of several groups", "first, two launches"])
def test_the_second_of_two_launches_reads_a_sample_only_for_dx(plan, needs):
    planned = Planned("group_norm_backward", plan)
    call = call_of(planned.kernel, planned.case | {"needs": needs, "activation": "silu"})
    with planned.machine(), counting() as launches:
        call.check()
    for name in ("dy", "x"):
        array = call.inputs[name].array
        loaded = [launch.range_at(array.data.ptr).loaded for launch in launches[:2]]
        assert loaded == [array.nbytes, array.nbytes * ("x" in needs)]
