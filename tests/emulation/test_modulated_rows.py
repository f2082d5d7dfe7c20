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
from tests.emulation.test_plans import runs_of
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
# CI runs each pattern with one plan. Every kind of plan is there with parameters and with gates.
IN_CI = {
    (Planned("row_norm_forward", "4 threads a row"), "of samples"),
    (Planned("row_norm_forward", "16 threads a row"), "gate"),
    (Planned("row_norm_forward", "a warp a row"), "shared gate"),
    (Planned("row_norm_forward", "a block of 96 a row"), "of rows"),
    (Planned("row_norm_forward", "a block of 320 a row"), "gate of samples"),
    (Planned("row_norm_forward", "streamed"), "of positions"),
    (Planned("row_norm_forward", "a cluster of 8"), "added, of samples"),
    (Planned("row_norm_forward", "a cluster of 16"), "number of samples, weight of rows"),
    (Planned("row_norm_backward", "8 threads a row, 2 rows ahead"), "added, of rows"),
    (Planned("row_norm_backward", "a warp a row, 1 row ahead"), "gate of samples, weight too"),
    (Planned("row_norm_backward", "a block of 96 a row"), "number of samples"),
    (Planned("row_norm_backward", "a block of 96 a row, 1 row ahead"), "residual after the norm"),
    (
        Planned("row_norm_backward", "a block of 160 a row, 1 row ahead"),
        "weight of samples, bias of rows",
    ),
    (
        Planned("row_norm_backward", "a block of 512 a row, sums in global memory"),
        "weight of positions, bias of samples",
    ),
    (Planned("row_norm_backward", "streamed, sums in global memory"), "gate, weight of samples"),
    (Planned("row_norm_backward", "a cluster of 4, 2 rows ahead"), "number of rows"),
    (Planned("row_norm_backward", "a cluster of 4, sums in global memory"), "along axes apart"),
}


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
    assert {pattern for _, pattern in IN_CI} == {*PATTERNS}
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
    ("4 threads a row, 4 rows ahead", "number of samples, weight of rows"),
    ("a block of 64 a row", "along axes apart"),
    ("a cluster of 4, sums in global memory", "of samples"),
}


def segments_of(pattern: str, shape: tuple[int, ...]) -> int:
    """Return the number of segments: along each axis along which some rows share an operand."""
    own = [text[:3] for name, text in PATTERNS[pattern].items() if name.endswith("_own")]
    apart = [size for i, size in enumerate(shape) if any(o[i] == "1" for o in own if o != "111")]
    return prod(apart)


@parametrize(
    [(planned, name) for planned in BACKWARD for name in SUMMED],
    {(Planned("row_norm_backward", plan), name) for plan, name in IN_EVERY_ORDER},
)
def test_several_blocks_a_segment_give_the_same_bits_in_every_order(planned, pattern):
    """A segment has two blocks or more, and recent sums have two rows, the last perhaps one."""
    of_row, threads = map(int, planned.rows.launch.partition(",")[0].split(" of "))
    width, rows = planned.case["shape"][-1], 4 * max(1, threads // of_row) + 1
    axes = (2, rows, 2)
    if width > 500:
        axes = (2, rows, 1) if "samples" in pattern else (1, rows, 2)
    made = call(planned, pattern, shape=(*axes, width))
    half = mock.patch.object(_cuda_plan, "_PART_ROWS", -(-rows // 2))
    settings = {"multiprocessors": 64, "sources": runs_of(planned, 2)}
    with half, planned.machine(**settings, races=True) as launches:
        expected = made.check()
    assert launches[0].parts >= 2 * segments_of(pattern, axes)
    for order, scheduled in SCHEDULES.items():
        copies = {"copies": "early"} if order == "reverse" else {}
        with at(order), half, planned.machine(**settings, **scheduled, **copies):
            assert_same_fields(made.run(), expected)


OF_ONE_SAMPLE = ("of samples", "along axes apart", "weight of samples, bias of rows")
OF_ONE_SAMPLE += ("gate of samples, weight too", "number of samples, weight of rows")
OF_ONE_SAMPLE += ("gate, weight of samples", "of rows", "number of rows")
ALONE = {
    (Planned("row_norm_forward", "16 threads a row"), "gate of samples, weight too"),
    (Planned("row_norm_forward", "a block of 96 a row"), "number of samples, weight of rows"),
    (Planned("row_norm_forward", "a cluster of 4"), "along axes apart"),
    (Planned("row_norm_backward", "8 threads a row"), "gate, weight of samples"),
    (Planned("row_norm_backward", "16 threads a row, 1 row ahead"), "of samples"),
    (Planned("row_norm_backward", "a cluster of 4"), "gate of samples, weight too"),
    (Planned("row_norm_backward", "streamed"), "weight of samples, bias of rows"),
}


def made(planned: Planned, pattern: str, sample: slice) -> dict[str, Any]:
    """Return the results of some samples of a call; what all samples share is left out."""
    whole, shared = call(planned, pattern), {*()}
    given: dict[str, Any] = {"eps": 1e-5} if "forward" in planned.kernel else {}
    for name, placed in whole.inputs.items():
        if placed is None:
            continue
        is_shared = placed.host.ndim < 3 or len(placed.host) == 1
        shared |= {f"d{name}"} if is_shared else set()
        given[name] = whole.on.put(placed.host if is_shared else placed.host[sample].copy())
    results = whole.function(**whole.options | given)._asdict()
    kept = {name: array for name, array in results.items() if name not in shared}
    return {name: whole.on.get(array) for name, array in kept.items() if array is not None}


@parametrize([(planned, name) for planned in PLANNED for name in OF_ONE_SAMPLE], ALONE)
def test_results_of_a_sample_are_those_of_the_sample_alone(planned, pattern):
    with planned.machine(multiprocessors=4):
        together = made(planned, pattern, slice(None))
        for i in range(2):
            for name, array in made(planned, pattern, slice(i, i + 1)).items():
                assert_same_bits(array, together[name][i : i + 1], name)


def of_samples(longer: str | None) -> list[Any]:
    """Return the results of both directions; rows of one operand are part of longer rows."""
    on, width, arrays = gpu(), 36, {}
    for seed, name in enumerate(("x", "residual", "weight", "bias", "gate")):
        shape = (3, 5 if seed < 2 else 1, width)
        values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        more = np.zeros((*shape[:2], int(name == longer)), np.float32)
        arrays[name] = on.put(np.concatenate([values, more], -1))[..., :width]
    x, residual, weight, bias, gate = arrays.values()
    options = {"gate": gate, "gate_position": "branch", "gate_activation": "tanh"}
    f = cunorm.layer_norm_forward(x, weight, bias, residual=residual, **options)
    options |= {"mean": f.mean, "rstd": f.rstd, "branch": x, "d_residual": residual}
    grads = cunorm.layer_norm_backward(residual, f.residual, weight, bias, **options)
    return [on.get(array) for array in (*f, *grads)]


@pytest.mark.parametrize("name", ["x", "weight", "bias", "gate"])
def test_an_operand_whose_rows_are_not_aligned_is_read_where_it_lies(name):
    """The x of the forward is the branch of the backward."""
    for one, other in zip(of_samples(name), of_samples(None), strict=True):
        assert_same_bits(one, other)


def test_a_branch_may_have_more_leading_axes_than_the_other_operands():
    on = gpu()
    draw = np.random.default_rng(0).standard_normal
    x, dy = (on.put(draw((3, 2, 40)).astype(np.float32)) for _ in range(2))
    branch = on.put(draw((3, 4, 40)).astype(np.float32))[:, :2]
    gate = on.put(np.ones((40,), np.float32))
    options = {"gate": gate, "gate_position": "branch", "gate_activation": "identity"}
    rstd = cunorm.rms_norm_forward(x).rstd
    one, other = (
        cunorm.rms_norm_backward(dy, x, rstd=rstd, branch=array, **options).dgate
        for array in (branch, branch.copy())
    )
    assert_same_bits(on.get(one), on.get(other))
