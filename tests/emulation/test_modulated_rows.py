# SPDX-License-Identifier: MIT
"""Every kind of plan of row norms with weights and biases of several rows, and branch gates."""

from __future__ import annotations

from math import prod
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cunorm
from tests.emulation.machine import SCHEDULES, gpu, needs_softgpu
from tests.emulation.plans import ROW_PLANS, Planned, row_plan_name
from tests.support.cases import Call, call_of
from tests.support.internals import _cuda, _cuda_plan
from tests.support.operands import assert_same_bits, assert_same_fields, at

pytestmark = needs_softgpu

GATE = {"gate": "float32", "gate_position": "branch", "gate_activation": "tanh"}
OF_SAMPLES = {"weight_own": "100", "bias_own": "100"}
PATTERNS: dict[str, dict[str, Any]] = {
    "of samples": OF_SAMPLES,
    "of positions": {"weight_own": "001", "bias_own": "001"},
    "of rows": {"weight_own": "111", "bias_own": "111"},
    "along axes apart": {"weight_own": "101", "bias_own": "101"},
    "weight of samples, bias of rows": {"weight_own": "100", "bias_own": "111"},
    "weight of positions, bias of samples": {"weight_own": "001", "bias_own": "100"},
    "residual after the norm": {"weight": None, "bias_own": "111"},
    "added, of samples": OF_SAMPLES | {"accumulate": "float64"},
    "added, of rows": {"weight_own": "111", "bias_own": "111", "accumulate": "float32"},
    "gate": GATE,
    "shared gate": GATE | {"gate_own": "000"},
    "gate of samples": GATE | {"gate_own": "100"},
    "number of samples": GATE | {"gate_own": "100 scalar"},
    "number of rows": GATE | {"gate_own": "111 scalar"},
    "gate of samples, weight too": GATE | OF_SAMPLES | {"gate_own": "100"},
    "gate, weight of samples": GATE | OF_SAMPLES,
    "number of samples, weight of rows": GATE | {"gate_own": "100 scalar", "weight_own": "111"},
}
PLANNED = [Planned(kernel, plan) for kernel, plans in ROW_PLANS.items() for plan in plans]
STEP = 5  # CI runs one pattern with each plan
IN_CI = {(p, [*PATTERNS][STEP * i % len(PATTERNS)]) for i, p in enumerate(PLANNED)}


def call(planned: Planned, pattern: str, **more: Any) -> Call:
    """Return a call with a stream; wide rows are few, two in each of two samples."""
    kinds = ("weight", "bias", "gate", "d_residual")
    given = dict.fromkeys(("weight", "bias", "d_residual"), "float32") | PATTERNS[pattern] | more
    dtype, width = planned.case.get("x", "float32"), planned.case["shape"][-1]
    given |= {name: dtype for name in kinds if given.get(name) == "float32"}
    shape = (2, 2 if pattern == "along axes apart" else 1, 2, width)
    case = {"x": dtype, "dy": dtype, "center": True, "stream": f"+ {dtype}"}
    case["shape"] = shape if width > 6000 else planned.case["shape"]
    return call_of(planned.kernel, case | given)


def parametrize(pairs: Any, in_ci: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("planned", "pattern"),
        [
            pytest.param(
                *pair,
                marks=() if pair in in_ci else pytest.mark.exhaustive,
                id=f"{'-'.join(pair[0])}-{pair[1]}",
            )
            for pair in pairs
        ],
    )


@parametrize([(planned, name) for planned in PLANNED for name in PATTERNS], IN_CI)
def test_every_kind_of_plan_is_right_with_every_pattern_and_has_no_races(planned, pattern):
    order = [*SCHEDULES][len(pattern) % len(SCHEDULES)]
    with planned.machine(races=True, **SCHEDULES[order]):
        call(planned, pattern).check()


def regimes(name: str) -> set[str]:
    """Return which kind of plan a launch's name says, as in RowPlan.launch."""
    of_row, threads = map(int, name.partition(",")[0].split(" of "))
    found = {"a cluster" if of_row > threads else "a block" if of_row == threads else "a warp"}
    return found | {word for word in ("streamed", "ahead", "global") if word in name}


def test_the_cases_in_ci_have_every_kind_of_plan_with_parameters_and_with_gates():
    """Calls are planned, but run nothing. More operands need more registers, so plans differ."""
    found = set()
    for planned, pattern in IN_CI:
        kind = "gate" if "gate" in PATTERNS[pattern] else "parameters"
        with (
            planned.machine(),
            mock.patch.object(_cuda, "prepare", lambda *_: (None, False)),
            mock.patch.object(_cuda, "fits_cluster", lambda *_: True),
            mock.patch.object(_cuda, "launch") as launch,
        ):
            call(planned, pattern).run()
        name = row_plan_name(launch.call_args_list[0].args[0])
        found |= {(planned.kernel, kind, regime) for regime in regimes(name)}
    of_forward = ("a warp", "a block", "a cluster", "streamed")
    regimes_of = {"row_norm_forward": of_forward}
    regimes_of["row_norm_backward"] = (*of_forward, "ahead", "global")
    for kernel, names in regimes_of.items():
        for kind in ("gate", "parameters"):
            assert {name for k, of, name in found if (k, of) == (kernel, kind)} == {*names}


# A backward's plans with segments and sums of their own.
SUMMED = ("of samples", "along axes apart", "weight of positions, bias of samples")
SUMMED += ("gate of samples, weight too", "number of samples, weight of rows")
BACKWARD = [planned for planned in PLANNED if planned.kernel == "row_norm_backward"]
IN_EVERY_ORDER = {
    ("16 threads a row, 1 row ahead", "gate of samples, weight too"),
    ("8 threads a row", "weight of positions, bias of samples"),
    ("a block of 64 a row", "along axes apart"),
    ("a cluster of 4, sums in global memory", "of samples"),
}


@parametrize(
    [(planned, name) for planned in BACKWARD for name in SUMMED],
    {(Planned("row_norm_backward", plan), name) for plan, name in IN_EVERY_ORDER},
)
def test_several_blocks_a_segment_give_the_same_bits_in_every_order(planned, pattern):
    """A segment has five rows or more, and a block two or more; sums of two rows are flushed."""
    width = planned.case["shape"][-1]
    made = call(planned, pattern, shape=(3, 2, 5, width) if width < 6000 else (2, 1, 5, width))
    few_rows = mock.patch.object(_cuda_plan, "_PART_ROWS", 3)
    with few_rows, planned.machine(multiprocessors=64, races=True) as launches:
        expected = made.check()
    segments = int(dict(launches[0].build.macros)["SEGMENT_AXES"]) > 0
    assert segments and launches[0].grid > launches[0].build.cluster
    for order, settings in SCHEDULES.items():
        copies = {"copies": "early"} if order == "reverse" else {}
        with at(order), few_rows, planned.machine(multiprocessors=64, **settings, **copies):
            assert_same_fields(made.run(), expected)
