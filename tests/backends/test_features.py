# SPDX-License-Identifier: MIT
"""A GPU's capability, or CUNORM_FEATURES, says which features plans use; plans fit the GPU."""

from __future__ import annotations

import struct
from collections import Counter
from functools import partial
from random import Random

import numpy as np
import pytest

import cunorm
from tests import softgpu
from tests.support import nvrtc_covers
from tests.support.gpus import ARCHITECTURES, limits_of
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
    KernelBuild,
    Launch,
    OnceMap,
    RowShape,
    _cuda,
    _memo,
    cuda_backward,
    cuda_forward,
    features_of,
    main,
    source_text,
    start,
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


# --- plans of row norms ---------------------------------------------------------------------------

DRIVER, DECLARED = 1 << 10, 1 << 10  # bytes that the driver takes, and that the kernel declares
WIDTHS = (1, 8, 33, 64, 100, 400, 512, 1000, 4096, 5003, 8192, 8193, 12288, 16384, 20001, 32768)
WIDTHS += (65536, 100003, 131072, 262144, 1 << 20)
SHAPES = {"rows": (1, 7, 5000, 1 << 20, 2**31), "width": WIDTHS, "groups": (1, 3)}

PLAIN = {"gate": (None,), "weight": (None,), "dresidual_out": (None,), "center": (False,)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["FORWARD", "BACKWARD"])
def test_no_plan_exceeds_a_gpu_or_the_documented_workspace_and_all_have_whole_clusters(
    kind, architecture
):
    plan_of = nvrtc_covers.forward_launch if kind == "FORWARD" else nvrtc_covers.backward_launch
    found, random = set(), Random(architecture)
    for number in range(600):
        factors = getattr(nvrtc_covers, kind) | SHAPES | (PLAIN if number % 2 else {})
        case = {name: random.choice(choices) for name, choices in factors.items()}
        launch, gpu = plan_of(case, architecture), nvrtc_covers.gpu_of(case, architecture)
        macros, cluster = dict(launch.build.macros), launch.build.cluster
        found.add(cluster)
        assert cluster == 1 or gpu.features.clusters
        clusters, left = divmod(launch.grid, cluster * case["groups"])
        assert left == 0
        assert 1 <= clusters <= case["rows"]
        assert launch.grid <= GRID_LIMIT
        assert launch.shared + DECLARED <= gpu.shared_memory_per_block_optin
        blocks = int(macros["BLOCKS_PER_SM"])
        if launch.shared:
            used = blocks * (launch.shared + DECLARED + DRIVER)
            assert used <= gpu.shared_memory_per_sm, launch
        assert blocks * launch.block * 32 <= 1 << 16, "a thread has at least 32 registers"
        if kind == "FORWARD":
            continue
        several = int(macros["THREADS_PER_ROW"]) < launch.block
        why = "if a block has several teams, they must add up their sums in shared memory"
        assert not several or macros["SUMS_IN_SHARED"] == "true", why
        assert macros["STAGES"] == "0" or gpu.features.async_copies
        assert launch.parts == clusters
        compute = FLOAT64 if case["x"] == "float64" else FLOAT32
        walk = RowShape(case["rows"], case["width"], case["groups"])
        if case["sums"]:
            size = workspace_size(compute, walk, gpu.sm_count)
            assert launch.sums_size * compute.itemsize <= size, launch
    sizes = {1, 2, 4, 8, 16} if kind == "FORWARD" else {1, 4, 8, 16}
    assert found >= (sizes if architecture == "90" else {1})


# Creates objects in shared memory as the kernel does; writes the size of the dynamic ones to out.
TAKEN = """
extern "C" __global__ void __launch_bounds__(Build::threads) CLUSTER_LAUNCH
    probe(unsigned long long* out) {
  __shared__ Team<Build>::Scratch scratch;
  Team<Build> team(scratch);
  const Arguments<Build> arguments{};
  const Walk<Build> walk(team, BlockShare(1, Team<Build>::blocks), 1, Build::width);
  SharedMemory memory;
  const unsigned char* const first = memory.next;
  StagedRows<Build> staged(memory);
  ParamSums<Build> sums(arguments, walk, memory);
  if (threadIdx.x == 0 && blockIdx.x == 0) out[0] = memory.next - first;
}
"""


@pytest.mark.gpu
def test_a_plan_reserves_the_shared_memory_that_the_kernel_uses(monkeypatch):
    import cupy

    monkeypatch.setattr(_cuda, "loaded", OnceMap())
    text = source_text("row_norm_backward") + TAKEN
    monkeypatch.setattr(_cuda, "source_text", lambda kernel: text)
    gpu, out, seen = _cuda.gpu_caps(Device("cuda", 0)), cupy.zeros(1, np.uint64), Counter()
    for case in nvrtc_covers.cases("BACKWARD"):
        plan = nvrtc_covers.backward_launch(case, "", gpu)
        macros = dict(plan.build.macros)
        kind = macros["STAGES"] > "0", macros["SUMS_IN_SHARED"]
        seen[kind] += 1
        if seen[kind] > 4:
            continue
        build = KernelBuild("probe", plan.build.macros)
        probe = Launch(build, plan.build.cluster, plan.block, shared=plan.shared)
        start(probe, struct.pack("<q", out.data.ptr), Device("cuda", 0), 0)
        assert int(out.get()[0]) == plan.shared, plan
    assert len(seen) == 3
