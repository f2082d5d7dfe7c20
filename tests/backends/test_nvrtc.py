# SPDX-License-Identifier: MIT
"""NVRTC compiles the kernels for every architecture, without a GPU, and nothing spills.

Plans are made for a GPU of the architecture, and fit its resources.

`pytest -m exhaustive tests/backends/test_nvrtc.py` compiles the builds that CI leaves out.
"""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from tests.support.gpus import limits_of
from tests.support.internals import (
    FLOAT64,
    Formula,
    ForwardTypes,
    KernelBuild,
    Launch,
    RowShape,
    cuda_forward,
)

pytest.importorskip("cupy", reason="CuPy is not installed")
from tests.emulation.plans import group_plan_name
from tests.support.jvp_covers import jvp_cover
from tests.support.nvrtc import compile_build, resource_usage  # it needs CuPy
from tests.support.nvrtc_covers import (
    BACKWARD,
    ROWS,
    backward_launch,
    cases,
    group_cover,
    group_launches,
    modulated_cover,
    row_cover,
)
from tests.support.split_covers import split_cover

ARCHITECTURES = ("75", "80", "86", "89", "100", "120", "90")
SHARES = 128  # parts of a cover, one for each test
# Bytes of shared memory: the most that a row norm with dynamic shared memory may declare, the most
# that any other kernel may declare, and what the driver takes for each block.
OF_ROW_NORMS, STATIC_SHARED_MEMORY, OF_DRIVER = 1 << 10, 48 << 10, 1 << 10
SENT = 48  # further bytes that a row norm may declare for each warp of its cluster
REGISTERS, PARTITIONS, WARP = 64 << 10, 4, 32  # of a multiprocessor; threads of a warp


def check_none_spills(build: KernelBuild, architecture: str):
    """Compile a build, check that it has no spills and no stack, and return its usage."""
    compiled = compile_build(build, architecture)
    usage = resource_usage(compiled.log)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert not (usage.spill_stores or usage.spill_loads or usage.stack), f"{build}: {usage}"
    return usage


def check_has_room(launch: Launch, architecture: str) -> None:
    """Check that nothing spills, and that the plan's number of blocks fits a multiprocessor."""
    usage = check_none_spills(launch.build, architecture)
    declared = STATIC_SHARED_MEMORY
    if launch.shared and launch.build.kernel.startswith("row_norm"):
        declared = OF_ROW_NORMS + launch.build.cluster * launch.block // WARP * SENT
    assert usage.shared <= declared, launch
    limits, shared = limits_of(architecture), usage.shared + launch.shared
    blocks = int(dict(launch.build.macros).get("BLOCKS_PER_SM", "1"))
    assert launch.block * blocks <= limits.max_threads_per_sm, launch
    of_warp = -(-usage.registers // 8) * 8 * WARP
    warps = PARTITIONS * (REGISTERS // PARTITIONS // of_warp)
    assert launch.block * blocks <= warps * WARP, f"{launch}: {usage}"
    assert shared <= limits.shared_memory_per_block_optin, launch
    assert (shared + OF_DRIVER) * blocks <= limits.shared_memory_per_sm, f"{launch}: {usage}"


def shares():
    """Yield test parameters; CI runs one share for each architecture."""
    for (number, architecture), share in product(enumerate(ARCHITECTURES), range(SHARES)):
        is_kept = share == 8 * number + 1
        marks = () if is_kept else pytest.mark.exhaustive
        yield pytest.param(architecture, share, marks=marks)


@pytest.mark.parametrize(("architecture", "share"), [*shares()])
@pytest.mark.parametrize(
    "cover",
    [row_cover, modulated_cover, group_cover, split_cover, jvp_cover],
    ids=["row_norms", "modulated", "group_norms", "split", "jvp"],
)
def test_a_cover_compiles_for_every_architecture_and_has_room(cover, architecture, share):
    for launch in cover(architecture)[share::SHARES]:
        check_has_room(launch, architecture)


@pytest.mark.parametrize(
    "case",
    [
        {"width": 1 << 18, "sums": ("dweight",)},  # streamed
        {"width": 512, "sums": ("dweight", "dbias")},  # teams in a warp
        {"width": 100003, "sums": ("dweight", "dbias")},  # one element a pack
        {"width": 16384, "sums": ("dweight",), "x": "bfloat16", "weight": "float32"}
        | {"dresidual_out": "x", "center": True, "outputs": "bfloat16 dx and dresidual"}
        | {"features": "none"},  # rows that fill a thread's registers
    ],
    ids=["streamed", "teams in a warp", "one element a pack", "full registers"],
)
def test_plans_that_once_spilled_do_not_spill(case):
    plain = {name: choices[0] for name, choices in BACKWARD.items()}
    plain |= {"x": "float32", "weight": "x", "features": "all", "access": 16}
    for architecture in ("75", "90", "120"):
        check_has_room(backward_launch(plain | case, architecture), architecture)


def test_the_covers_have_every_kind_of_plan():
    found = set()  # (is streamed, copies later rows to shared memory, has sums there)
    for architecture, clusters in (("90", {1, 2, 4, 8, 16}), ("75", {1})):
        kernels = {name: [] for name in ("row_norm_forward", "row_norm_backward", "param_grad")}
        for launch in row_cover(architecture):
            kernels[launch.build.kernel].append(dict(launch.build.macros))
        forward, backward, _ = kernels.values()
        for plans in (forward, backward):
            assert {(int(plan.get("CLUSTER", 1)), is_streamed(plan)) for plan in plans} >= {
                *((cluster, False) for cluster in clusters),
                *((cluster, True) for cluster in clusters & {1, 16}),
            }
            assert {plan["THREADS_PER_ROW"] for plan in plans} > {"4", "32", "256", "512"}
            if architecture == "90":  # a cluster of 8 can replace one of 16
                assert ("8", "512") in {(plan.get("CLUSTER"), plan["THREADS"]) for plan in plans}
        found |= {(is_streamed(p), p["STAGES"] > "0", p["SUMS_IN_SHARED"]) for p in backward}
    assert len(found) == 5
    clusters = set()
    for kind in ("GROUP_FORWARD", "GROUP_BACKWARD"):
        plans = [group_launches(case, a) for case in cases(kind) for a in ("75", "90")]
        names = {group_plan_name(launches).replace(", alone", "") for launches in plans}
        assert names == {
            f"{layout}, {blocks}{unit}"
            for layout in ("last", "first")
            for blocks in ("a block", "a cluster", "two launches")
            for unit in ("", " of several groups", ", parts of channels")
            if (blocks, unit) != ("a block", ", parts of channels")  # a block has all channels
        }
        clusters |= {launches[0].build.cluster for launches in plans}
    assert clusters == {1, 2, 4, 8, 16}


def test_the_cover_of_modulated_norms_has_every_kind_of_build():
    """Of each macro, every value occurs; of the plans, those that the macros change most."""
    macros = [dict(launch.build.macros) for launch in modulated_cover("90")]
    backward = [one for one in macros if "OWN_PARAMETERS" in one]
    flags = ("OWN_PARAMETERS", "ACCUMULATE", "DGATE_SUMS", "BRANCH_GATE", "SCALAR_GATE")
    for name in flags:
        assert {one.get(name, "false") for one in backward} == {"false", "true"}, name
    assert {(one["OWN_PARAMETERS"], is_streamed(one)) for one in backward} == {
        *product(("false", "true"), (False, True))
    }
    assert {one["PARAMETER_AXES"] for one in macros if "PARAMETER_AXES" in one} == {*"123"}
    assert {one["SEGMENT_AXES"] for one in backward} == {*"12"}
    assert {(one["BRANCH_T"] != "absent", one["STAGES"] > "0") for one in backward} == {
        *product((False, True), repeat=2)
    }


def test_the_cover_of_split_rows_has_every_kind_of_plan_of_each_build():
    found = set()
    for architecture, clusters in (("90", {1, 4, 8, 16}), ("75", {1})):
        macros = [dict(launch.build.macros) for launch in split_cover(architecture)]
        for flag in ("FINDS_MOMENTS", "GIVEN_STATISTICS", "FINDS_SUMS", "GIVEN_SUMS"):
            plans = [one for one in macros if one.get(flag) == "true"]
            kinds = {(int(one.get("CLUSTER", 1)), is_streamed(one)) for one in plans}
            assert kinds >= {*product(clusters, (False,)), *product(clusters & {1, 16}, (True,))}
            assert {one["CENTER"] for one in plans} == {"false", "true"}
            assert {one["THREADS_PER_ROW"] for one in plans} > {"4", "32", "256", "512"}, flag
            found |= kinds
    assert (2, False) in found


def is_streamed(macros: dict[str, str]) -> bool:
    width, *held = (int(macros[name]) for name in ("WIDTH", "THREADS_PER_ROW", "PACK", "PACKS"))
    return width > prod(held)


def test_a_build_that_spills_is_found():
    operands = dict.fromkeys(("x", "weight", "bias", "y"), FLOAT64)
    types = ForwardTypes(FLOAT64, **operands, formula=Formula(center=True))
    build = cuda_forward(types, RowShape(ROWS, 16384), 16, limits_of("90")).build
    crowded = {"WIDTH": "98304", "PACK": "2", "PACKS": "48"}
    crowded |= dict.fromkeys(("THREADS", "THREADS_PER_ROW"), "1024")
    macros = tuple((name, crowded.get(name, value)) for name, value in build.macros)
    with pytest.raises(AssertionError, match=r"spill_stores=[1-9]"):
        check_none_spills(KernelBuild(build.kernel, macros), "90")
