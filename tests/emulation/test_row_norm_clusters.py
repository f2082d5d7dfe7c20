# SPDX-License-Identifier: MIT
"""The row norms where clusters of blocks share a row: by an H200's own plans, of every size."""

from __future__ import annotations

import numpy as np
import pytest

from cunorm._features import Features
from cunorm._teams import Team
from tests.support.bounds import check_backward, check_forward
from tests.support.operands import assert_same_bits

from .arrays import EPS, Operands, saved
from .emulator import EmulationError, unavailable
from .kernels import emulate_backward, emulate_forward
from .plans import Plan, emulated_source, team_of

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

WITH_CLUSTERS = Features(clusters=True)
# Widths of float32, and the blocks that share a row in a forward and in a backward; 0: streamed.
WIDTHS = {
    16384: (2, 2),
    20001: (4, 4),
    65536: (8, 8),
    100003: (16, 16),
    262144: (16, 0),
}


def run_forward(make, *, dtype="float32", groups=1, **plan):
    """Run a centred forward with every operand but a gate, and hold it to the oracle."""
    x, residual = make.rows(dtype), make.rows(dtype)
    operands = (x, make.param(dtype), make.param(dtype))
    norm = {"residual": residual, "center": True, "groups": groups, "eps": EPS}
    plan = Plan(**{"features": WITH_CLUSTERS, "order": "random", **plan})
    ran = emulate_forward(*operands, **norm, plan=plan)
    check_forward(ran.result, *operands, **norm)
    return ran


def run_backward(make, *, dtype="float32", groups=1, **plan):
    """Run a centred backward with every operand but a gate, and hold it to the oracle."""
    dy, x, d_residual = (make.rows(dtype) for _ in range(3))
    operands = (dy, x, make.param(dtype), make.param(dtype))
    norm = {"center": True, "groups": groups}
    plan = Plan(**{"features": WITH_CLUSTERS, "order": "random", **plan})
    ran = emulate_backward(*operands, d_residual=d_residual, **norm, **saved(x, **norm), plan=plan)
    check_backward(ran.result, *operands, d_residual, eps=EPS, **norm)
    return ran


def blocks_of_a_row(ran):
    team = team_of(ran.launch)
    return 0 if team.packs == 0 else team.cluster


@pytest.mark.parametrize(("width", "blocks"), WIDTHS.items())
def test_rows_are_right_in_clusters_of_every_size(width, blocks):
    """In a grid of two clusters, that walk two rows and one."""
    make = Operands((1, 1, 3, width))
    assert blocks_of_a_row(run_forward(make, grid=2)) == blocks[0]
    assert blocks_of_a_row(run_backward(make, grid=2)) == blocks[1]


@pytest.mark.parametrize(("dtype", "width"), [("float32", 20001), ("bfloat16", 16386)])
def test_groups_of_columns_are_right_in_clusters(dtype, width):
    """Groups begin at odd addresses, or at even ones that are no multiple of 16 bytes."""
    make = Operands((1, 1, 5, 3 * width))
    for run, least in ((run_forward, 2), (run_backward, 4)):
        ran = run(make, dtype=dtype, groups=3, grid=2)
        assert blocks_of_a_row(ran) >= least
        assert ran.launch.grid == 6 * blocks_of_a_row(ran)


def test_a_row_that_a_cluster_shares_does_not_depend_on_the_others():
    make = Operands((1, 1, 5, 16384))
    x = make.rows("float32")
    told = {"center": True, "plan": Plan(features=WITH_CLUSTERS)}
    whole = emulate_forward(x, **told).result
    for rows in (slice(0, 1), slice(3, 4), slice(None, None, -1)):
        alone = emulate_forward(np.ascontiguousarray(x[:, :, rows]), **told).result
        for name in ("y", "mean", "rstd"):
            part = np.ascontiguousarray(getattr(whole, name)[:, :, rows])
            assert_same_bits(getattr(alone, name), part, name)


def test_one_block_of_a_cluster_saves_the_statistics():
    ran = run_forward(Operands((1, 1, 3, 16384)))
    stored = ran.moved["row_norm_forward"].stored
    assert {stored[name] for name in ("mean", "rstd")} == {3 * 4}


# More warps than lanes share a row.
MANY_WARPS = Team(threads=128, threads_per_row=2048, pack=2, packs=1)
# What stands in a kernel, and what in its place.
WRONG = {
    "columns of the first block": ("return cluster_rank() * B::threads", "return B::threads"),
    "sums of the first block": ("[warp % warps][i], warp / warps)", "[warp % warps][i], 0)"),
    "sums of the first warp": ("cluster_load(&sums[warp % warps]", "cluster_load(&sums[0]"),
    "half of the sums": ("first < shared_sums; first", "first < shared_sums / 2; first"),
    "the group of a block": ("group(blockIdx.x / cluster % groups)", "group(blockIdx.x % groups)"),
    "the rows of a block": ("block(blockIdx.x / cluster / groups)", "block(blockIdx.x / groups)"),
}


@pytest.mark.parametrize("run", [run_forward, run_backward])
def test_rows_are_right_where_more_warps_than_lanes_share_them(run):
    assert blocks_of_a_row(run(Operands((1, 1, 5, 9300)), groups=3, grid=2, team=MANY_WARPS)) == 16


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize(
    ("kernel", "run"), [("row_norm_forward", run_forward), ("row_norm_backward", run_backward)]
)
def test_clusters_that_are_wrong_fail(kernel, run, what):
    text, (before, after) = emulated_source(kernel), WRONG[what]
    assert text.count(before) == 1
    sources = {kernel: text.replace(before, after)}
    with pytest.raises((AssertionError, EmulationError)):
        run(Operands((1, 1, 5, 9300)), groups=3, grid=2, team=MANY_WARPS, sources=sources)
