# SPDX-License-Identifier: MIT
"""Which rows are shared by clusters of blocks, and on which GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from tests.support.internals import (
    DTYPES,
    FLOAT32,
    FLOAT64,
    GRID_LIMIT,
    NONE,
    BackwardTypes,
    Features,
    Formula,
    ForwardTypes,
    Launch,
    Walk,
    cuda_backward,
    cuda_forward,
    workspace_size,
)

WITH_CLUSTERS = Features(clusters=True)
WIDTHS = (64, 1000, 8192, 8193, 16384, 20001, 32768, 65536, 100003, 131072, 262144, 2**20)
SM_COUNT = 132


def launches(features: Features) -> Iterator[tuple[Walk, Launch]]:
    """Yield the plans of forwards and backwards of every dtype, gated and not."""
    shapes = product((1, 5000, 2**31), WIDTHS, (1, 3))
    for dtype, gated, shape in product(DTYPES.values(), (False, True), shapes):
        walk = Walk(*shape)
        compute = FLOAT64 if dtype is FLOAT64 else FLOAT32
        gate, formula = (dtype, Formula(activation="silu")) if gated else (None, Formula())
        forward = ForwardTypes(compute, x=dtype, y=dtype, gate=gate, formula=formula)
        yield walk, cuda_forward(forward, walk, 16, features)
        backward = BackwardTypes(
            compute, dy=dtype, x=dtype, dx=dtype, gate=gate, dweight=True, formula=formula
        )
        yield walk, cuda_backward(backward, walk, 16, SM_COUNT, features)


@pytest.mark.parametrize("features", [NONE, Features(async_copies=True)])
def test_no_clusters_are_planned_where_they_are_off(features):
    assert {launch.build.cluster for _, launch in launches(features)} == {1}


def test_a_grid_is_whole_clusters_of_every_group_whose_sums_fit_the_workspace():
    sizes = set()
    for walk, launch in launches(WITH_CLUSTERS):
        cluster = launch.build.cluster
        sizes.add(cluster)
        clusters, left = divmod(launch.grid, cluster * walk.groups)
        assert left == 0
        assert 1 <= clusters <= walk.rows
        assert launch.grid <= GRID_LIMIT
        if launch.build.kernel == "row_norm_backward":
            assert launch.parts == clusters
            if cluster > 1:
                size = workspace_size(FLOAT32, walk, SM_COUNT)
                assert launch.sums_size * FLOAT32.itemsize <= size
    assert sizes == {1, 2, 4, 8, 16}


def test_half_as_many_blocks_of_twice_the_threads_stand_in_for_16():
    """They are as many warps of as many packs, in which order sums are added, or no cluster."""
    small, found = Features(clusters=True, largest_cluster=8), 0
    for (_, large), (_, launch) in zip(launches(WITH_CLUSTERS), launches(small), strict=True):
        team = [dict(one.build.macros) for one in (large, launch)]
        if large.build.cluster < 16:
            assert launch == large
        elif launch.build.cluster > 1:
            assert (launch.build.cluster, launch.block) == (8, 512)
            assert team[0] | {"THREADS": "512", "CLUSTER": "8"} == team[1]
            found += 1
    assert found
