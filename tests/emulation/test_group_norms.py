# SPDX-License-Identifier: MIT
"""The group norms' kernels give right answers when they are run as a GPU would run them."""

from __future__ import annotations

import numpy as np
import pytest

from cunorm.results import GroupNormForward, GroupNormGrads
from tests.support.covers import label
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.operands import DTYPES, assert_same_bits

from .emulator import unavailable
from .group_arrays import EPS, FAMILIES, Grid, Operands, saved
from .group_covered import BACKWARD, FORWARD, check_backward_case, check_forward_case, telling
from .group_kernels import GroupPlan, emulate_group_backward, emulate_group_forward
from .mixed import mixed

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@pytest.mark.parametrize("case", mixed(FORWARD, telling), ids=label)
def test_forward_is_right_for_every_pair_of_choices(case):
    check_forward_case(case)


@pytest.mark.parametrize("case", mixed(BACKWARD, telling), ids=label)
def test_backward_is_right_for_every_pair_of_choices(case):
    check_backward_case(case)


def run_both(grid, groups, dtype="float32", *, far=False, activation="silu", **plan):
    """Run forward and backward with every operand, and hold them to the oracle."""
    make = Operands(grid, far=far)
    x, dy = make.x(dtype), make.dy(dtype)
    parameters = (groups, make.param(dtype), make.param(dtype))
    told = {"activation": activation, "channel_axis": grid.channel_axis}
    forward = emulate_group_forward(x, *parameters, **told, eps=EPS, plan=GroupPlan(**plan))
    check_group_forward(forward.result, x, *parameters, **told, eps=EPS)
    statistics = saved(x, groups, grid.channel_axis)
    backward = emulate_group_backward(
        dy, x, *parameters, **told, **statistics, plan=GroupPlan(**plan)
    )
    check_group_backward(backward.result, dy, x, *parameters, **told, eps=EPS)
    return forward, backward


@pytest.mark.parametrize("name", FAMILIES)
def test_the_families_are_what_their_names_say(name):
    family = FAMILIES[name]
    forward, backward = run_both(family.of(2), family.groups, **family.plan)
    last, grid = "last" in name, family.grid
    assert len(forward.launches) == len(backward.launches) - 1 == (3 if "three" in name else 1)
    for ran in (forward, backward):
        tiling, macros = ran.tiling, dict(ran.launches[0].build.macros)
        assert macros["CHANNELS_LAST"] == ("true" if last else "false")
        positions, channels = tiling.tile(last)
        threads = tiling.position_threads
        if last:
            assert ("together" in name) == (ran.schedule.block_groups > 1)
        else:
            assert (threads > 32) == ("warps" in name)
        if "three" in name:
            assert grid.channels > channels
            assert grid.channels % channels or not last
            assert positions < grid.positions or "a warp" in name


@pytest.mark.parametrize(
    ("spatial", "channels", "groups"), [((64, 64), 320, 32), ((97, 31), 96, 3)]
)
@pytest.mark.parametrize("channels_last", [True, False])
def test_samples_that_no_block_takes_are_right_by_the_usual_plan(
    spatial, channels, groups, channels_last
):
    make = Operands(Grid(1, spatial, channels, channels_last))
    x, weight = make.x("bfloat16"), make.param("float32")
    ran = emulate_group_forward(x, groups, weight, activation="silu")
    assert len(ran.launches) == 3
    check_group_forward(ran.result, x, groups, weight, None, activation="silu", eps=EPS)


@every_family
@pytest.mark.parametrize(("dtype", "activation"), [("float32", "silu"), ("bfloat16", None)])
def test_groups_of_mean_10000_and_deviation_1_are_right(dtype, activation, family):
    run_both(family.of(3), family.groups, dtype, far=True, activation=activation, **family.plan)


@every_family
def test_a_group_that_begins_unlike_the_rest_is_right(family):
    make = Operands(family.of(3))
    x, *parameters = (make.x("float32"), make.param("float32"), make.param("float32"))
    flat = x.reshape(3, -1)
    flat[0, 20:] += 1e4
    flat[1, :20] += 1e4
    flat[2] = 1e3
    flat[2, 20:] += 1e-3
    told = {"activation": "silu", "channel_axis": family.grid.channel_axis, "eps": EPS}
    operands = (x, family.groups, *parameters)
    ran = emulate_group_forward(*operands, **told, plan=GroupPlan(**family.plan))
    check_group_forward(ran.result, *operands, **told)


@every_family
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_constant_groups_give_exactly_the_activation_of_bias(dtype, family):
    constants = (0.0, 1.0, -0.1, 1e4 / 3, 3.3e-5, 6e4, -7e-3)
    grid = family.of(len(constants))
    make = Operands(grid)
    x, weight, bias = make.x(dtype), make.param(dtype), make.param(dtype)
    x[...] = np.reshape(constants, (-1, *[1] * (x.ndim - 1)))
    along = (-1, *[1] * (x.ndim - 2)) if grid.channel_axis == 1 else -1
    exact = {None: bias, "relu": np.maximum(bias, DTYPES[dtype].type(0)), "silu": None}
    for activation in exact if dtype == "float32" else ("relu",):
        told = {"activation": activation, "channel_axis": grid.channel_axis, "eps": EPS}
        plan = GroupPlan(**family.plan)
        ran = emulate_group_forward(x, family.groups, weight, bias, **told, plan=plan)
        check_group_forward(ran.result, x, family.groups, weight, bias, **told)
        y = ran.result.y
        assert_same_bits(y, np.broadcast_to(y[:1], y.shape), "y")
        if exact[activation] is not None:
            np.testing.assert_array_equal(
                y, np.broadcast_to(exact[activation].reshape(along), y.shape)
            )


@every_family
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_group(family, value):
    grid, groups = family.of(3), family.groups
    make = Operands(grid)
    x, dy = make.x("float32"), make.dy("float32")
    parameters = (groups, make.param("float32"), make.param("float32"))
    told = {"activation": "silu", "channel_axis": grid.channel_axis}
    x.reshape(3, -1)[1, 0] = value  # of the first channel
    plan = GroupPlan(**family.plan)
    f = emulate_group_forward(x, *parameters, **told, eps=EPS, plan=plan).result
    statistics = {"mean": f.mean, "rstd": f.rstd}
    grads = emulate_group_backward(dy, x, *parameters, **told, **statistics, plan=plan).result
    poisoned = np.zeros((3, groups), bool)
    poisoned[1, 0] = True
    for name, result in (("y", f.y), ("dx", grads.dx)):
        of_groups = np.moveaxis(result, grid.channel_axis, 1).reshape(3, groups, -1)
        assert np.isfinite(of_groups[~poisoned]).all(), name
        assert not np.isfinite(of_groups[poisoned]).all(), name
    first = slice(grid.channels // groups)
    for name, result in (("dweight", grads.dweight), ("dbias", grads.dbias)):
        assert np.isfinite(np.delete(result, first)).all(), name
    clean = [0, 2]  # the samples that are finite throughout
    forward = GroupNormForward(*(field[clean] for field in f))
    check_group_forward(forward, x[clean], *parameters, **told, eps=EPS)
    grads = GroupNormGrads(dx=grads.dx[clean])
    check_group_backward(grads, dy[clean], x[clean], *parameters, **told, eps=EPS)


@every_family
@pytest.mark.parametrize("samples", [1, 17, 50])
def test_parameter_gradients_are_right_for_any_number_of_samples(family, samples):
    run_both(family.of(samples), family.groups, **family.plan)


@pytest.mark.parametrize("passes", [None, 3])
@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (64, 8)])
def test_one_position_of_one_sample_is_right(channels, groups, passes):
    run_both(Grid(1, (), channels), groups, activation="gelu", passes=passes)
