# SPDX-License-Identifier: MIT
"""A GPU's compute capability, or CUNORM_FEATURES, says which features launch plans use."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
import pytest

import cunorm
from tests import softgpu
from tests.support.gpus import SM_COUNT, limits_of
from tests.support.internals import (
    DTYPES,
    FLOAT32,
    FLOAT64,
    GRID_LIMIT,
    BackwardTypes,
    Device,
    Features,
    Formula,
    ForwardTypes,
    Launch,
    RowShape,
    _cuda,
    _memo,
    cuda_backward,
    cuda_forward,
    features_of,
    main,
    workspace_size,
)
from tests.support.operands import draw

VARIABLE = "CUNORM_FEATURES"
OFF, COPIES = Features(), Features(async_copies=True)
ALL = Features(clusters=True, async_copies=True, programmatic_launches=True)


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


OF_GPUS = [("75", OFF, OFF), ("80", COPIES, COPIES), ("89", COPIES, COPIES)]
OF_GPUS += [("90", ALL, ALL), ("103", ALL, ALL), ("120", ALL._replace(clusters=False), ALL)]


@pytest.mark.parametrize(("capability", "by_default", "named"), OF_GPUS)
def test_a_gpu_has_its_features_by_default_and_by_name(capability, by_default, named, monkeypatch):
    assert features_of(capability) == by_default
    for value, right in (
        ("clusters, async_copies, programmatic_launches", named),
        ("clusters, async_copies", named._replace(programmatic_launches=False)),
        ("async_copies", Features(async_copies=named.async_copies)),
        ("clusters", Features(clusters=named.clusters)),
        ("none", OFF),
    ):
        monkeypatch.setenv(VARIABLE, value)
        assert features_of(capability) == right


def test_a_wrong_name_is_an_error_that_lists_the_right_names(monkeypatch, capsys):
    for value, text in (
        (
            "cluster",
            "names 'cluster', expected 'none' or some of clusters, async_copies, "
            "programmatic_launches",
        ),
        ("none, clusters", "names 'none' beside 'clusters', expected one of them"),
    ):
        monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(ValueError, match=f"^{VARIABLE} {text}$"):
            features_of("90")
        main(["info"])
        assert f"{VARIABLE} {text}" in capsys.readouterr().out


def test_info_names_the_features_in_use_and_how_they_are_tested(monkeypatch, capsys):
    main(["info"])
    printed = capsys.readouterr().out
    assert "on for compute capability 9.0 to below 11.0; tested by interpreting" in printed
    assert "on for compute capability 8.0 and later; tested by interpreting" in printed
    assert "on for compute capability 9.0 and later; tested by interpreting" in printed
    monkeypatch.setenv(VARIABLE, "clusters")
    main(["info"])
    assert f"on from compute capability 9.0: {VARIABLE}=clusters" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not softgpu.is_loaded(), reason="needs the software GPU's settings")
def test_a_gpu_without_room_for_clusters_has_smaller_ones_or_none(monkeypatch):
    """8 blocks with twice the threads replace 16 blocks; gpu/test_clusters.py compares the bits."""
    import cupy

    launches, launch, x = [], _cuda.launch, draw("x", (3, 200_003), "float32")

    def record(what, *rest):
        launches.append((what.build.cluster, what.block))
        launch(what, *rest)

    monkeypatch.setattr(_cuda, "launch", record)
    found = []
    for room in (16, 8, 4, 2, 1, None):  # None only clears the caches for later tests
        _memo.clear_all()
        if room:
            with softgpu.settings(largest_cluster=room):
                found.append(cunorm.rms_norm(cupy.asarray(x)))
    assert launches[:2] == [(16, 256), (8, 512)]
    assert all(cluster <= room for (cluster, _), room in zip(launches[2:], (4, 2, 1), strict=True))
    for y in found:
        np.testing.assert_allclose(y.get(), cunorm.reference.rms_norm(x), rtol=0, atol=1e-5)


def test_how_threads_share_rows_does_not_depend_on_alignment(monkeypatch):
    """Here a cluster fits if it has at most 8 blocks, of which no two fit a multiprocessor."""
    limits = limits_of("90")

    def fits(launch, device):
        return launch.build.cluster <= 8 and 2 * launch.shared >= limits.shared_memory_per_sm

    monkeypatch.setattr(_cuda, "gpu_caps", lambda device: limits)
    monkeypatch.setattr(_cuda, "fits_cluster", fits)
    x, walk, device = DTYPES["bfloat16"], RowShape(100, 98304), Device("cuda", 0)
    backward = BackwardTypes(FLOAT32, x, x, dx=x, weight=x, dweight=True)
    forward = ForwardTypes(FLOAT32, x, x, weight=x, bias=x, formula=Formula(center=True))
    for plan, types in ((cuda_backward, backward), (cuda_forward, forward)):
        caps = _cuda.caps_that_fit(device, partial(plan, types, walk, 16))
        aligned, misaligned = (dict(plan(types, walk, n, caps).build.macros) for n in (16, 1))
        assert aligned["CLUSTER"] == "8"
        for name in ("THREADS_PER_ROW", "PACK", "PACKS"):
            assert aligned[name] == misaligned[name]


# --- rows shared by clusters of blocks ------------------------------------------------------------

WITH_CLUSTERS = Features(clusters=True)
WIDTHS = (64, 1000, 8192, 8193, 16384, 20001, 32768, 65536, 100003, 131072, 262144, 2**20)


def launches(features: Features) -> Iterator[tuple[RowShape, Launch]]:
    """Yield shapes with launches: forwards and backwards of every dtype, gated and not."""
    shapes = product((1, 5000, 2**31), WIDTHS, (1, 3))
    for dtype, gated, shape in product(DTYPES.values(), (False, True), shapes):
        walk = RowShape(*shape)
        compute = FLOAT64 if dtype is FLOAT64 else FLOAT32
        gate, formula = (dtype, Formula(activation="silu")) if gated else (None, Formula())
        forward = ForwardTypes(compute, x=dtype, y=dtype, gate=gate, formula=formula)
        yield walk, cuda_forward(forward, walk, 16, limits_of("90", features))
        backward = BackwardTypes(
            compute, dy=dtype, x=dtype, dx=dtype, gate=gate, dweight=True, formula=formula
        )
        yield walk, cuda_backward(backward, walk, 16, limits_of("90", features))


def test_a_grid_has_whole_clusters_for_every_group_and_its_sums_fit_the_workspace():
    sizes = set()
    assert {launch.build.cluster for _, launch in launches(COPIES)} == {1}
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
