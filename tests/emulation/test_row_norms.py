# SPDX-License-Identifier: MIT
"""The row norms' kernels give right answers when they are run as a GPU would run them."""

from __future__ import annotations

import numpy as np
import pytest

from cunorm._builds import BackwardTypes
from cunorm._dtypes import FLOAT32
from cunorm._plan import Walk, cuda_backward
from cunorm.results import NormForward, NormGrads
from tests.support.bounds import check_backward, check_forward
from tests.support.covers import label
from tests.support.operands import WIDTHS
from tests.support.scales import (
    check_backward_rounds_what_the_forward_rounded,
    check_scales_are_rounded_once,
    check_scales_beyond_float32,
)

from .arrays import EPS, FAMILIES, Operands, saved
from .covered import BACKWARD, FORWARD, check_backward_case, check_forward_case, telling
from .emulator import unavailable
from .kernels import emulate_backward, emulate_forward
from .mixed import mixed
from .plans import H200_SM_COUNT, SM_75_SM_COUNT, Plan, family, team_of

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


@pytest.mark.parametrize("case", mixed(FORWARD, telling), ids=label)
def test_forward_is_right_for_every_pair_of_choices(case):
    check_forward_case(case)


@pytest.mark.parametrize("case", mixed(BACKWARD, telling), ids=label)
def test_backward_is_right_for_every_pair_of_choices(case):
    check_backward_case(case)


def run_backward(make, dtype, *, norm=None, **plan):
    """Run a centred backward with every operand of one dtype, and hold it to the oracle."""
    dy, x, d_residual = make.rows(dtype, near=True), make.rows(dtype), make.rows(dtype, near=True)
    operands = (dy, x, make.param(dtype), make.param(dtype))
    norm = {"center": True, **(norm or {})}
    options = {"d_residual": d_residual, **norm}
    ran = emulate_backward(*operands, **options, **saved(x, **norm), plan=Plan(**plan))
    check_backward(ran.result, *operands, **options, eps=EPS)
    return ran


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_families_are_what_their_names_say(dtype, kind):
    width, team = FAMILIES[kind]
    make = Operands((1, 1, 1, width))
    assert family(emulate_forward(make.rows(dtype), plan=Plan(team=team)).launch) == kind
    assert family(run_backward(make, dtype, team=team).launch) == kind


def test_rstd_and_what_multiplies_a_row_are_rounded_once():
    check_scales_are_rounded_once(lambda x, c: emulate_forward(x, c=c, eps=0.0).result, rows=300)


def test_a_length_beyond_float32_is_infinite_or_zero():
    check_scales_beyond_float32(lambda x, c: emulate_forward(x, c=c, eps=0.0).result)


def test_the_backward_rounds_before_weight_what_the_forward_rounded():
    check_backward_rounds_what_the_forward_rounded(
        lambda *args, **norm: emulate_forward(*args, **norm).result,
        lambda *args, **norm: emulate_backward(*args, **norm).result,
        rows=500,
    )


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_rows_of_zeros_and_of_squares_beyond_float32(eps):
    """rstd is that of the sum of squares, 0 or infinite, as it is."""
    x = np.array([[0, 0], [3e38, 3e38]], np.float32)
    rstd = emulate_forward(x, eps=eps).result.rstd.reshape(-1)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(rstd, [1 / np.sqrt(np.float32(eps)), 0.0], rtol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_mean_10000_and_deviation_1_are_right(dtype, width):
    make = Operands((1, 1, 5, width), far=True)
    x, weight, bias = make.rows(dtype), make.param(dtype), make.param(dtype)
    result = emulate_forward(x, weight, bias, center=True, eps=EPS).result
    check_forward(result, x, weight, bias, center=True, eps=EPS)
    run_backward(make, dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_constant_row_under_center_gives_exactly_bias(dtype, width):
    make = Operands((1, 1, 7, width))
    x, weight, bias = make.rows(dtype), make.param(dtype), make.param(dtype)
    x[...] = np.array([0.0, 1.0, -0.1, 1e4 / 3, 3.3e-5, 6e4, -7e-3])[:, None]
    y = emulate_forward(x, weight, bias, center=True, eps=EPS).result.y
    np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wide_row_that_begins_unlike_the_rest_is_right(dtype):
    make = Operands((1, 1, 4, 262144))
    weight, bias = make.param(dtype), make.param(dtype)
    x = make.rows("float32")
    beginning, rest = slice(0, 2000), slice(2000, None)  # 2000: about what is looked at first
    x[..., 0, rest] += 1e4
    x[..., 1, beginning] += 1e4
    x[..., 2, beginning] = 1e3
    x[..., 3, rest] = 1e3
    x = x.astype(weight.dtype)
    ran = emulate_forward(x, weight, bias, center=True, eps=EPS)
    assert family(ran.launch) == "streamed"
    check_forward(ran.result, x, weight, bias, center=True, eps=EPS)


@pytest.mark.parametrize(
    ("center", "position"), [(False, None), (True, None), (True, "pre"), (False, "post")]
)
@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_not_finite_stays_in_its_row(kind, center, position):
    width, team = FAMILIES[kind]
    make = Operands((1, 1, 24, width))
    dy, x, gate = (make.rows("float32") for _ in range(3))
    poisoned = (3, 8, 23)
    for row, value in zip(poisoned, (np.nan, np.inf, -np.inf), strict=True):
        x[0, 0, row, 5 * row % width] = value
    norm = {"center": center}
    if position is not None:
        norm |= {"gate": gate, "gate_position": position}
    plan = Plan(grid=2, team=team)
    forward = emulate_forward(x, eps=EPS, plan=plan, **norm).result
    statistics = {"mean": forward.mean, "rstd": forward.rstd}
    dx, *_, dgate, _ = emulate_backward(dy, x, **statistics, plan=plan, **norm).result

    clean = np.delete(np.arange(24), poisoned)
    if position is not None:
        norm["gate"] = gate[:, :, clean]
    results = forward.y[:, :, clean], dx[:, :, clean], None if dgate is None else dgate[:, :, clean]
    dy, x = dy[:, :, clean], x[:, :, clean]
    check_forward(NormForward(results[0]), x, None, None, eps=EPS, **norm)
    check_backward(NormGrads(dx=results[1], dgate=results[2]), dy, x, None, None, eps=EPS, **norm)
    assert not np.isfinite(forward.y[0, 0, poisoned]).all(axis=-1).any()
    assert not np.isfinite(dx[0, 0, poisoned]).any()
    if dgate is not None:
        assert not np.isfinite(dgate[0, 0, poisoned]).all(axis=-1).any()


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 32, 33, 50])
@pytest.mark.parametrize("kind", FAMILIES)
def test_parameter_gradients_are_right_for_any_number_of_rows_of_a_block(kind, rows):
    width, team = FAMILIES[kind]
    team = team or team_of(run_backward(Operands((1, 1, 1, width)), "bfloat16").launch)
    teams = team.rows_per_block
    make = Operands((1, 1, rows * teams - teams // 2, width))
    run_backward(make, "bfloat16", team=team, grid=1)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("kind", FAMILIES)
def test_parameter_gradients_of_groups_do_not_mix(kind, more):
    width, team = FAMILIES[kind]
    width += more  # then no group but the first begins at an even address
    if team is not None:
        pack = width & -width
        team = team._replace(pack=pack, packs=team.packs * team.pack // pack)
    make = Operands((1, 1, 36, 3 * width))
    launch = run_backward(make, "float32", norm={"groups": 3}, team=team, grid=2).launch
    assert family(launch) == kind
    assert launch.grid == 6 * launch.build.cluster


@pytest.mark.parametrize("sm_count", [H200_SM_COUNT, SM_75_SM_COUNT])
@pytest.mark.parametrize(("width", "groups"), [(33, 1), (1000, 1), (5003, 1), (33, 7)])
def test_backward_is_right_where_there_are_more_rows_than_teams(width, groups, sm_count):
    names = ("compute", "dy", "x", "d_residual", "dx", "weight")
    types = BackwardTypes(**dict.fromkeys(names, FLOAT32), dweight=True, dbias=True)
    largest = cuda_backward(types, Walk(2**40, width, groups), 1, sm_count)
    teams = largest.parts * team_of(largest).rows_per_block
    make = Operands((1, 1, teams + teams // 5, width * groups))
    launch = run_backward(make, "float32", norm={"groups": groups}, sm_count=sm_count).launch
    assert launch.grid == largest.grid
