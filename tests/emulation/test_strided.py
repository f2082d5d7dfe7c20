# SPDX-License-Identifier: MIT
"""Every kind of plan of rows that lie side by side: bounds, orders of threads, and races."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import cunorm
from tests.emulation.machine import SCHEDULES, gpu, machine, needs_softgpu
from tests.support.internals import (
    DTYPES,
    BackwardTypes,
    ForwardTypes,
    compute_type,
    strided_team,
)
from tests.support.jvp import JvpCall
from tests.support.operands import assert_same_bits, at, draw
from tests.support.strided import channels_first, first_of_jvp

pytestmark = needs_softgpu

BRANCH = {"gate": "float32", "gate_position": "branch", "d_residual": "float32"}
HALF = dict.fromkeys(("x", "weight", "bias", "dy"), "bfloat16")
# Samples, positions and channels; a block has some pairs of positions or, if their number is odd,
# some positions. Few blocks walk over several; the last has threads without a row.
CASES: dict[str, dict[str, Any]] = {
    "pairs": {"shape": (3, 46, 24)},
    "single rows": {"shape": (3, 45, 40)},
    "pairs of half precision": {"shape": (2, 70, 50)} | HALF,
    "large blocks": {"shape": (2, 22, 700)},
    "large blocks of half precision": {"shape": (2, 18, 900)} | HALF,
    "a gate and parameters of samples": {"shape": (3, 21, 30), "weight_own": "10"} | BRANCH,
    "three warps": {"shape": (2, 21, 250)},
    "float64": {"shape": (2, 20, 60)} | dict.fromkeys(("x", "dy", "weight", "bias"), "float64"),
}
IN_CI = ("pairs", "single rows", "a gate and parameters of samples")
cases = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_CI else pytest.mark.exhaustive) for n in CASES]
)
FEATURES = ("", "async_copies")


@cases
@pytest.mark.parametrize("kernel", ["row_norm_forward", "row_norm_backward"])
def test_every_kind_of_plan_is_right_without_races_and_the_same_in_every_order(kernel, name):
    call = channels_first(kernel, {"center": True} | CASES[name], gpu())
    few = {"grid": 2, "multiprocessors": 1}
    for features in FEATURES if "backward" in kernel else FEATURES[:1]:
        with machine(features, **few, races=True, schedule="random") as launches:
            expected = call.check()
        build = dict(launches[0].build.macros)
        assert build["STRIDED_ROWS"] == "true"
        assert build["PACK"] == ("2" if name.startswith(("pairs", "large")) else "1")
        is_copied_ahead = build.get("STAGES", "0") != "0"
        assert is_copied_ahead == ("async_copies" in features)
        for order, settings in SCHEDULES.items():
            with at(features, order), machine(features, **few, **settings):
                for result, same in zip(call.run(), expected, strict=True):
                    if same is not None:
                        assert_same_bits(result, same)


@pytest.mark.parametrize("shape", [(3, 46, 24), (2, 21, 90)])
def test_tangents_are_right_without_races_and_the_same_in_every_order(shape):
    call = first_of_jvp(JvpCall({"shape": shape, "mean": 100.0}, gpu()))
    few = {"grid": 2, "multiprocessors": 1}
    with machine(**few, races=True, schedule="random") as launches:
        expected = call.jvp(), call.second()
    assert {one.build.kernel for one in launches} == {"row_norm_jvp"}
    assert all(dict(one.build.macros)["STRIDED_ROWS"] == "true" for one in launches)
    call.check_jvp(expected[0])
    call.check_second(expected[1])
    for order, settings in SCHEDULES.items():
        with at(order), machine(**few, **settings):
            assert_same_bits(call.jvp(), expected[0])
            assert_same_bits(call.second(), expected[1])


def test_a_row_has_the_same_bits_alone_as_in_pairs():
    """How many rows a thread has, and where they begin, change no sum."""
    on, x, weight = gpu(), draw("x", (1, 60, 44), "float32"), draw("weight", (60,), "float32")
    with machine() as launches:
        y = on.get(cunorm.layer_norm(on.put(x), on.put(weight), axis=(1,)))
        for part in (slice(0, 2), slice(0, 7), slice(3, 44), slice(2, 44)):
            own = on.put(np.ascontiguousarray(x[..., part]))
            found = on.get(cunorm.layer_norm(own, on.put(weight), axis=(1,)))
            assert_same_bits(found, np.ascontiguousarray(y[..., part]))
    builds = [dict(one.build.macros) for one in launches]
    assert {one["PACK"] for one in builds if "STRIDED_ROWS" in one} == {"1", "2"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_blocks_have_whole_warps_that_hold_all_columns(dtype):
    x = DTYPES[dtype]
    compute = compute_type(x)
    many = {"gate": x, "dresidual_out": x, "branch": x}
    kinds = [
        ForwardTypes(compute, x=x, y=x),
        ForwardTypes(compute, x=x, y=x, residual=compute, gate=x),
        BackwardTypes(compute, dy=x, x=x),
        BackwardTypes(compute, dy=x, x=x, **many),
    ]
    for types, width in product(kinds, (*range(1, 1500), 4093, 16384)):
        team = strided_team(types, width, 1)
        teams = team.threads // team.threads_per_row
        with at(types.kernel, width):
            assert team.threads % 32 == 0
            assert team.threads <= 1024
            assert 32 % teams == 0
            assert team.threads_per_row * team.packs >= width
