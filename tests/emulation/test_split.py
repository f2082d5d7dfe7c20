# SPDX-License-Identifier: MIT
"""Every kind of plan of norms of split rows: bounds, orders of threads, races and bytes."""

from __future__ import annotations

from itertools import chain, product
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cunorm
from cunorm import Moments, Statistics
from tests.emulation.machine import SCHEDULES, gpu, machine, needs_softgpu
from tests.emulation.plans import ROW_PLANS, Planned, row_plan_name
from tests.emulation.test_modulated_rows import regimes
from tests.softgpu.counters import counting
from tests.support.internals import _cuda
from tests.support.operands import assert_same_bits, assert_same_fields, at
from tests.support.split import DEFAULTS, SplitCall

pytestmark = needs_softgpu

FLAGS = {
    "row_norm_forward": ("FINDS_MOMENTS", "GIVEN_STATISTICS"),
    "row_norm_backward": ("FINDS_SUMS", "GIVEN_SUMS"),
}

PLANNED = [Planned(kernel, plan) for kernel, plans in ROW_PLANS.items() for plan in plans]
# Calls of split rows hold fewer operands, so only wider rows than those of plans.py are streamed,
# or need a cluster.
WIDTHS = {
    Planned("row_norm_forward", "streamed"): 24580,
    Planned("row_norm_forward", "streamed in a cluster"): 262_148,
    Planned("row_norm_backward", "streamed"): 12292,
    Planned("row_norm_backward", "streamed, sums in global memory"): 12292,
    Planned("row_norm_backward", "a cluster of 4"): 10244,
    Planned("row_norm_backward", "a cluster of 4, 2 rows ahead"): 10244,
    Planned("row_norm_backward", "a cluster of 4, sums in global memory"): 10244,
    Planned("row_norm_backward", "streamed in a cluster"): 32772,
    Planned("row_norm_backward", "streamed in a cluster, sums in global memory"): 32772,
}
IN_CI = {
    Planned("row_norm_forward", "8 threads a row"),
    Planned("row_norm_forward", "a block of 64 a row"),
    Planned("row_norm_forward", "streamed"),
    Planned("row_norm_forward", "a cluster of 2"),
    Planned("row_norm_backward", "16 threads a row, 1 row ahead"),
    Planned("row_norm_backward", "a block of 96 a row"),
    Planned("row_norm_backward", "streamed, sums in global memory"),
    Planned("row_norm_backward", "a cluster of 4, 2 rows ahead"),
}


def plans(in_ci: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "planned",
        [
            pytest.param(
                *(one,), marks=() if one in in_ci else pytest.mark.exhaustive, id="-".join(one)
            )
            for one in PLANNED
        ],
    )


def call_of(planned: Planned, **more: Any) -> SplitCall:
    """Return a call whose rows have two parts of the plan's width."""
    *rows, width = planned.case["shape"]
    width = WIDTHS.get(planned, width)
    kept = DEFAULTS.keys() - {"stream", "d_residual"}
    case = {name: one for name, one in planned.case.items() if name in kept}
    case |= {"rows": tuple(rows), "sizes": (width, width), "mean": 30.0}
    return SplitCall(case | more, gpu())


def run(call: SplitCall, kernel: str, *, check: bool = False) -> list[Any]:
    """Return the results of a direction, in the order in which they are made."""
    if kernel == "row_norm_forward":
        moments = call.moments()
        f, found = call.check_forward() if check else call.forward()
        return [*moments, found, f]
    found = call.exact()
    sums = call.sums(found)
    return [*sums, call.check_backward(found) if check else call.backward(found)]


@plans(IN_CI)
def test_every_kind_of_plan_is_right_without_races_and_the_same_in_every_order(planned):
    """There are few blocks: each walks several rows."""
    call = call_of(planned)
    with planned.machine(few=1, races=True, copies="late", schedule="random"):
        expected = run(call, planned.kernel, check=True)
    for order, settings in SCHEDULES.items():
        copies = {"copies": "early"} if order == "reverse" else {}
        with at(order), planned.machine(few=1, **settings, **copies):
            for got, right in zip(run(call, planned.kernel), expected, strict=True):
                for one, other in zip(got, right, strict=True):
                    if isinstance(other, np.ndarray):
                        assert_same_bits(one, other)


def launched(planned: Planned) -> set[tuple[str, str]]:
    """Return the kinds of builds and of plans of a call; its launches are not made."""
    with (
        planned.machine(),
        mock.patch.object(_cuda, "prepare", lambda *_: (None, False)),
        mock.patch.object(_cuda, "fits_cluster", lambda *_: True),
        mock.patch.object(_cuda, "launch") as launch,
    ):
        run(call_of(planned), planned.kernel)
    found = set()
    for one in (call.args[0] for call in launch.call_args_list):
        macros = dict(one.build.macros)
        flags = [flag for flag in FLAGS[planned.kernel] if macros.get(flag) == "true"]
        if one.build.kernel == planned.kernel:
            found |= {(flag, regime) for flag in flags for regime in regimes(row_plan_name(one))}
    return found


@pytest.mark.parametrize("cases", [IN_CI, PLANNED], ids=["in CI", "all"])
def test_the_cases_have_every_kind_of_plan_of_each_build(cases):
    found = set().union(*map(launched, cases))
    kinds = ("a warp", "a block", "a cluster", "streamed")
    assert found >= {*product(chain(*FLAGS.values()), kinds)}
    assert found >= {("FINDS_SUMS", "ahead"), ("GIVEN_SUMS", "ahead"), ("GIVEN_SUMS", "global")}


# --- combined moments -----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 127, 129, 300])
@pytest.mark.parametrize("center", [True, False])
def test_moments_are_combined_as_on_a_cpu_without_races(center, rows):
    rng = np.random.default_rng(rows)
    mean, m2, correction = rng.standard_normal((3, 5, rows)).astype(np.float32)
    count = np.float32([1, 7, 30, 2, 100])
    moments = Moments(*((1e4 + mean,) if center else (None,)), np.abs(m2), count)
    moments = moments._replace(correction=correction * 1e-4) if center else moments
    expected = cunorm.combine_moments(moments, eps=1e-5)
    on = gpu()
    there = Moments(*(None if one is None else on.put(one) for one in moments))
    for order, settings in SCHEDULES.items():
        with at(order), machine(races=True, **settings) as launches:
            got = cunorm.combine_moments(there, eps=1e-5)
        got = Statistics(*(None if one is None else on.get(one) for one in got))
        assert_same_fields(got, expected)
    assert launches[0].grid == -(-rows // 128)


# --- bytes ----------------------------------------------------------------------------------------

# The arrays of each step as large as x: how often a held row is read, and how often it is written.
OF_BYTES = {
    Planned("row_norm_forward", "streamed"),
    Planned("row_norm_forward", "a block of 64 a row"),
    Planned("row_norm_backward", "streamed"),
    Planned("row_norm_backward", "16 threads a row, 1 row ahead"),
}
FORWARD = {"FINDS_MOMENTS": (1, 0), "GIVEN_STATISTICS": (1, 1)}  # x; x and y
BACKWARD = {"FINDS_SUMS": (2, 0), "GIVEN_SUMS": (2, 1)}  # dy and x; dy, x and dx


def bytes_of(planned: Planned, **case: Any) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the bytes that each build reads and writes, without a row's numbers, and x's bytes.

    Parameters are left out: they stay in a cache.
    """
    plain = {"weight": None, "bias": None, "gate": None, "needs": ("x",)}
    call = call_of(planned, **plain, **case)
    with planned.machine() as planned_launches, counting() as launches:
        run(call, planned.kernel)
    size = call.arrays["x"].nbytes // 2  # of a part
    found = {}
    for one, counted in zip(planned_launches, launches, strict=True):
        macros = dict(one.build.macros)
        large = [each for each in counted.ranges if each.end - each.begin >= size]
        for flag in FORWARD.keys() | BACKWARD.keys():
            if macros.get(flag) == "true":
                both = (sum(r.loaded for r in large), sum(r.stored for r in large))
                assert found.setdefault(flag, both) == both, "parts differ"
    return found, size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("center", [True, False])
@plans(OF_BYTES)
def test_split_rows_move_three_arrays_forward_and_five_backward(planned, center, dtype):
    """A forward reads x twice and writes y; a backward reads dy and x twice and writes dx.

    This is so for streamed rows, too: no step reads a row twice.
    """
    steps = FORWARD if "forward" in planned.kernel else BACKWARD
    found, size = bytes_of(planned, center=center, x=dtype, dy=dtype)
    arrays = {name: (read // size, wrote // size) for name, (read, wrote) in found.items()}
    assert found == {n: (read * size, wrote * size) for n, (read, wrote) in arrays.items()}
    assert arrays == steps
    assert (
        sum(map(sum, arrays.values()))
        == {"row_norm_forward": 3, "row_norm_backward": 5}[planned.kernel]
    )
