# SPDX-License-Identifier: MIT
"""Every kind of plan of the kernels of forward mode: bounds, orders of threads, and races."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.emulation.machine import SCHEDULES, gpu, machine, needs_softgpu
from tests.emulation.plans import FEATURES, GROUP_PLANS, Planned, row_plan_name
from tests.emulation.test_modulated_rows import regimes
from tests.support.jvp import JvpCall
from tests.support.operands import assert_same_bits, at, draw
from tests.support.ulps import unit

pytestmark = needs_softgpu

GATED = {"gate": "float32", "gate_position": "post", "weight_offset": 1.0}
PRE = {"gate": "float32", "gate_position": "pre", "center": False, "gate_activation": "identity"}
NARROW = dict.fromkeys(("x", "weight", "dy"), "bfloat16") | {"bias": None, "tangents": ("x",)}
# A name begins with its regime. Few blocks walk several rows.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "a warp": ("", {"shape": (2, 3, 31, 33)} | GATED),
    "a warp, before the norm": ("", {"shape": (40, 100), "groups": 2} | PRE),
    "a warp, float64": ("", {"shape": (20, 72)} | dict.fromkeys(("x", "dy", "weight"), "float64")),
    "a block": ("", {"shape": (5, 2052), "mean": 100.0}),
    "a block, narrow": ("", {"shape": (5, 4096), "center": False} | NARROW),
    "a block, own parameters": ("", {"shape": (2, 3, 2052), "own": (2, 1), "mean": 100.0}),
    "a cluster": (FEATURES, {"shape": (3, 16388), "mean": 100.0}),
    "a cluster, before the norm": (FEATURES, {"shape": (3, 12292)} | PRE),
    "streamed": ("", {"shape": (3, 16388)} | GATED),
    "streamed, of the backward": ("", {"shape": (2, 40_004), "tangents": ("x",)}),
    "streamed in a cluster": (FEATURES, {"shape": (1, 200_004), "mean": 100.0} | GATED),
}
IN_CI = ("a warp", "a block, own parameters", "a cluster", "streamed")


def some(names: Any, in_ci: Any) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in in_ci else pytest.mark.exhaustive) for name in names
    ]


@pytest.mark.parametrize("name", some(ROWS, IN_CI))
def test_every_kind_of_plan_is_right_without_races_and_the_same_in_every_order(name):
    features, case = ROWS[name]
    call = JvpCall(case, gpu())
    few = {"grid": 16, "multiprocessors": 1}
    with machine(features, **few, races=True, schedule="random") as launches:
        expected = call.jvp(), call.second()
        found = set().union(*(regimes(row_plan_name(one)) for one in launches))
    assert {one.build.kernel for one in launches} == {"row_norm_jvp"}
    assert [one for one in found if name.startswith(one)]
    call.check_jvp(expected[0])
    call.check_second(expected[1])
    for order, settings in SCHEDULES.items():
        with at(order), machine(features, **few, **settings):
            assert_same_bits(call.jvp(), expected[0])
            assert_same_bits(call.second(), expected[1])


GROUPS = (
    *("last, a block of several groups, odd", "last, a cluster of several groups"),
    *("last, two launches of several groups", "first, a cluster", "first, two launches"),
    "last, a block, alone",
)
GROUPS_IN_CI = ("last, a cluster of several groups", "first, two launches")


@pytest.mark.parametrize("name", some(GROUPS, GROUPS_IN_CI))
def test_group_norms_are_right_without_races_and_the_same_in_every_order(name):
    on, planned = gpu(), Planned("group_norm_backward", name)
    samples = GROUP_PLANS[name].samples
    shape, axis = samples.shape, samples.channel_axis
    row = (shape[0], shape[axis])
    arrays = {
        **{"x": draw("x", shape, "float32", mean=1e4), "x_tangent": draw("v", shape, "float32")},
        **{one: draw(one, row, "float32") for one in ("weight", "weight_tangent")},
        **{one: draw(one, row[1:], "float32") for one in ("bias", "bias_tangent")},
    }
    groups, options = samples.groups, {"activation": "silu", "channel_axis": axis}
    f = reference.group_norm_forward(arrays["x"], groups, **options)
    arrays |= {"mean": f.mean.astype(np.float32), "rstd": f.rstd.astype(np.float32)}
    exact = reference.group_norm_jvp(**arrays, num_groups=groups, **options)

    def call() -> Any:
        given = {name: on.put(array) for name, array in arrays.items()}
        return on.get(cunorm.group_norm_jvp(**given, num_groups=groups, **options))

    with planned.machine(few=2, races=True, copies="late", schedule="random") as launches:
        expected = call()
    assert {one.build.kernel for one in launches} == {"group_norm_jvp"}
    assert np.abs(expected - exact).max() <= 32 * unit("float32") * np.abs(exact).max()
    for order, settings in SCHEDULES.items():
        with at(order), planned.machine(few=2, **settings, copies="early"):
            assert_same_bits(call(), expected)
