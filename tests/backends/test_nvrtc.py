# SPDX-License-Identifier: MIT
"""NVRTC compiles the kernels for every architecture, without a GPU, and nothing spills.

Plans are made for a GPU of the architecture, of which they take no more than it has.

`pytest -m exhaustive tests/backends/test_nvrtc.py` compiles the rest of the covers.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from math import prod

import pytest

from tests.support.covers import Case, pairwise
from tests.support.gpus import limits_of
from tests.support.internals import (
    ACTIVATIONS,
    DTYPES,
    FLOAT32,
    FLOAT64,
    BackwardTypes,
    Build,
    Features,
    Formula,
    ForwardTypes,
    GroupBackwardTypes,
    GroupForwardTypes,
    Launch,
    ParamGradTypes,
    Samples,
    Walk,
    cuda_backward,
    cuda_forward,
    cuda_param_grad,
    cuda_schedule,
)

pytest.importorskip("cupy", reason="CuPy is not installed")
from tests.support.nvrtc import compile_build, resource_usage  # it needs CuPy

ARCHITECTURES = ("75", "80", "86", "89", "100", "120", "90")
SHARES = 32  # of a cover, a test each
ROWS = 1 << 20  # so many that each block has some
# Bytes of shared memory that the kernels declare at most, beside what a launch gives: of row norms,
# and of others, which are given none; and what the driver takes of a multiprocessor's for a block.
OF_ROW_NORMS, STATIC_SHARED_MEMORY, OF_DRIVER = 1 << 10, 48 << 10, 1 << 10
SENT = 48  # more of them, for each warp of a cluster
REGISTERS, PARTITIONS, WARP = 64 << 10, 4, 32  # of a multiprocessor

# What kernels have. An operand has x's dtype ("x"), float32, another of them, or is absent (None).
COMMON = {
    "x": tuple(DTYPES),
    "activation": tuple(dict.fromkeys(ACTIVATIONS.values())),
    "weight": (None, "x", "float32"),
    "access": (1, 2, 16),
}
SUMS = {"sums": ((), ("dbias",), ("dweight",), ("dweight", "dbias"))}
BIAS, DY = {"bias": (None, "x", "float32")}, {"dy": ("x", "float16")}
OF_ROWS = COMMON | {
    "gate": (None, "x", "float32"),
    "position": ("post", "pre"),
    "offset": (False, True),
    "rounded": (False, True),
    "center": (False, True),
    # One width or more of each kind of plan: teams within a warp, of a block, of clusters, streamed
    # by a block, and by a cluster with sums in shared memory and without; odd ones.
    "width": (1, 100, 1000, 5003, 8192, 20001, 65536, 100003, 262144, 1 << 20),
    # Without clusters and copies, with what the GPU has, and without room for clusters of 16.
    "features": ("none", "all", "clusters of 8"),
    "groups": (1, 3, 8),
}
FORWARD = OF_ROWS | BIAS | {"residual": (None, "x", "float32"), "y": ("x", "float32")}
BACKWARD = {
    **(OF_ROWS | DY | SUMS),
    "d_residual": (None, "x"),
    "outputs": ("dx", "bfloat16 dx and dresidual", "neither"),
    "dgate": (False, True),
}
PARAM_GRAD = {
    "compute": ("float32", "float64"),
    "dweight": (None, *DTYPES),
    "dbias": (None, *DTYPES),
    "accumulate": (False, True),
}
# Positions, channels and groups. Of one launch: few positions, odd sizes, what fills a block of
# either layout; of three: tiles of some channels.
SHAPES = ((49, 96, 1), (256, 24, 3), (500, 320, 32), (1024, 64, 4), (4096, 3000, 2))
OF_GROUPS = COMMON | BIAS | {"shape": SHAPES, "channels_last": (True, False)}
GROUP_FORWARD = OF_GROUPS | {"y": ("x", "float16")}
GROUP_BACKWARD = OF_GROUPS | DY | SUMS | {"dx": (True, False)}
PLAIN_WIDTHS = (16384, 32768, 65536, 131072)  # for which there are clusters of every size
OF_LARGE_ARRAYS = {"X_T", "Y_T", "DY_T", "BIAS_T", "ACTIVATION", "ACCESS"}


def dtypes(case: Case, *names: str) -> dict:
    """Return the dtypes of operands."""
    dtype = {"x": DTYPES[case["x"]], None: None, **DTYPES}
    return {name: dtype[case[name]] for name in names}


def formula(case: Case, compute) -> Formula:
    gated, x = case["gate"] is not None, DTYPES[case["x"]]
    return Formula(
        center=case["center"],
        activation=case["activation"] if gated else "identity",
        pre_gate=gated and case["position"] == "pre",
        weight_offset=case["offset"] and case["weight"] is not None,
        rounded=x if case["rounded"] and x is not compute else None,
    )


def features(case: Case, architecture: str) -> Features:
    """Return those of a case that a GPU of the architecture can have."""
    if case["features"] == "none":
        return Features()
    number, largest = int(architecture), 8 if case["features"] == "clusters of 8" else 16
    return Features(number >= 90, number >= 80, largest)


def planned(plan, types, case: Case, architecture: str) -> Launch:
    """Return the launch of a case of FORWARD or BACKWARD."""
    walk = Walk(ROWS, case["width"], case["groups"])
    return plan(types, walk, case["access"], limits_of(architecture, features(case, architecture)))


def forward_launch(case: Case, architecture: str) -> Launch:
    """Return the launch of a case of FORWARD."""
    told = dtypes(case, "residual", "gate", "weight", "bias", "y") | {"x": DTYPES[case["x"]]}
    compute = FLOAT64 if FLOAT64 in (told["x"], told["residual"]) else FLOAT32
    told |= {"new_residual": told["residual"], "formula": formula(case, compute)}
    return planned(cuda_forward, ForwardTypes(compute, **told), case, architecture)


def backward_launch(case: Case, architecture: str) -> Launch:
    """Return the launch of a case of BACKWARD."""
    x = DTYPES[case["x"]]
    compute = FLOAT64 if x is FLOAT64 else FLOAT32
    told = dtypes(case, "dy", "d_residual", "weight", "gate") | {"formula": formula(case, compute)}
    told["dgate"] = told["gate"] if case["dgate"] else None
    needs_bias = told["dgate"] is not None and not told["formula"].pre_gate
    told |= {"x": x, "bias": x if needs_bias else None}
    told["dx"], told["dresidual"] = {
        "dx": (x, None),
        "bfloat16 dx and dresidual": (DTYPES["bfloat16"], x),
        "neither": (None, None),
    }[case["outputs"]]
    told |= {name: name in case["sums"] for name in ("dweight", "dbias")}
    return planned(cuda_backward, BackwardTypes(compute, **told), case, architecture)


def param_grad_launch(case: Case) -> Launch:
    """Return the launch of a case of PARAM_GRAD."""
    types = dtypes(case | {"x": "float32"}, "compute", "dweight", "dbias").values()
    return cuda_param_grad(ParamGradTypes(*types, case["accumulate"]), 4096)


def plain_launches(architecture: str) -> list[Launch]:
    """Return launches of what is common: a weight, nothing that is optional."""
    plain = {name: choices[0] for name, choices in (FORWARD | BACKWARD).items()}
    plain |= {"x": "bfloat16", "features": "all", "access": 16}
    forward = [plain | {"width": width, "weight": "x"} for width in PLAIN_WIDTHS]
    backward = [case | {"sums": ("dweight",)} for case in forward] + [plain | {"width": 16384}]
    return [forward_launch(case, architecture) for case in forward] + [
        backward_launch(case, architecture) for case in backward
    ]


def group_builds(case: Case) -> list[Build]:
    """Return the builds of a case of GROUP_FORWARD or GROUP_BACKWARD."""
    x = DTYPES[case["x"]]
    told = dtypes(case, "weight", "bias") | {"x": x, "activation": case["activation"]}
    told["compute"] = FLOAT64 if x is FLOAT64 else FLOAT32
    if "y" in case:
        types = GroupForwardTypes(**told, **dtypes(case, "y"))
    else:
        told |= {name: name in case["sums"] for name in ("dweight", "dbias")}
        dx = x if case["dx"] or not case["sums"] else None
        types = GroupBackwardTypes(**told, **dtypes(case, "dy"), dx=dx)
    where = Samples(4, *case["shape"], case["channels_last"])
    return [one.build for one in cuda_schedule(types, where, case["access"]).passes]


def read_macros(build: Build) -> Build:
    """Return what a build reads of its macros: one that only combines sees no large array."""
    macros = dict(build.macros)
    if macros["FIND"] == macros["WRITE"] == "false":
        macros = {name: macros[name] for name in macros if name not in OF_LARGE_ARRAYS}
    return Build(build.kernel, tuple(macros.items()))


@cache
def cases(kind: str) -> list[Case]:
    """Return cases of a kernel among which every two choices of its operands meet."""
    return pairwise(globals()[kind])


@cache
def row_cover(architecture: str) -> list[Launch]:
    """Return launches of the row norms that have all of their cases."""
    found = [forward_launch(case, architecture) for case in cases("FORWARD")]
    found += [backward_launch(case, architecture) for case in cases("BACKWARD")]
    found += map(param_grad_launch, cases("PARAM_GRAD"))
    found += plain_launches(architecture)
    return list({launch.build: launch for launch in found}.values())


@cache
def group_cover() -> list[Build]:
    """Return builds of the group norms that have all of their cases."""
    builds = [
        b
        for kind in ("FORWARD", "BACKWARD")
        for c in cases(f"GROUP_{kind}")
        for b in group_builds(c)
    ]
    return list({read_macros(build): build for build in builds}.values())


def check_none_spills(build: Build, architecture: str):
    """Compile a build and return what a kernel takes, which is no stack."""
    compiled = compile_build(build, architecture)
    usage = resource_usage(compiled.log)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert not (usage.spill_stores or usage.spill_loads or usage.stack), f"{build}: {usage}"
    return usage


def check_has_room(launch: Launch, architecture: str) -> None:
    """Check that nothing spills, and that there is room for as many blocks as the plan says."""
    usage = check_none_spills(launch.build, architecture)
    declared = OF_ROW_NORMS + launch.build.cluster * launch.block // WARP * SENT
    assert usage.shared <= (declared if launch.shared else STATIC_SHARED_MEMORY), launch
    limits, shared = limits_of(architecture), usage.shared + launch.shared
    blocks = int(dict(launch.build.macros).get("BLOCKS_PER_SM", "1"))
    blocks = min(blocks, limits.max_threads_per_sm // launch.block)  # more never meet there
    of_warp = -(-usage.registers // 8) * 8 * WARP
    warps = PARTITIONS * (REGISTERS // PARTITIONS // of_warp)
    assert launch.block * blocks <= warps * WARP, f"{launch}: {usage}"
    assert shared <= limits.shared_memory_per_block_optin, launch
    if launch.shared:
        assert (shared + OF_DRIVER) * blocks <= limits.shared_memory_per_sm, launch


def shares():
    """Return parameters: in CI an eighth of a cover for 90, and a share of it for each other."""
    for (number, architecture), share in product(enumerate(ARCHITECTURES), range(SHARES)):
        is_kept = share % 8 == 0 if architecture == "90" else share == 4 * number + 1
        marks = () if is_kept else pytest.mark.exhaustive
        yield pytest.param(architecture, share, marks=marks)


@pytest.mark.parametrize(("architecture", "share"), [*shares()])
def test_a_cover_of_the_row_norms_compiles_for_every_architecture_and_has_room(architecture, share):
    for launch in row_cover(architecture)[share::SHARES]:
        check_has_room(launch, architecture)


@pytest.mark.parametrize(("architecture", "share"), [*shares()])
def test_a_cover_of_the_group_norms_compiles_for_every_architecture_and_none_spills(
    architecture, share
):
    for build in group_cover()[share::SHARES]:
        usage = check_none_spills(build, architecture)
        assert usage.shared <= STATIC_SHARED_MEMORY, build


def test_rows_that_fill_a_threads_registers_do_not_spill():
    case = {name: choices[0] for name, choices in BACKWARD.items()}
    case |= {"x": "bfloat16", "weight": "float32", "d_residual": "x", "center": True}
    case |= {"outputs": "bfloat16 dx and dresidual", "sums": ("dweight",)}
    check_has_room(backward_launch(case | {"width": 16384, "access": 16}, "90"), "90")


@pytest.mark.parametrize("kind", ["streamed", "teams in a warp", "one element a pack"])
def test_plans_that_spilled_once_do_not(kind):
    case = {name: choices[0] for name, choices in BACKWARD.items()} | {"x": "float32"}
    case |= {"weight": "x", "features": "all", "access": 16} | {
        "streamed": {"width": 1 << 18, "sums": ("dweight",)},
        "teams in a warp": {"width": 512, "sums": ("dweight", "dbias")},
        "one element a pack": {"width": 100003, "sums": ("dweight", "dbias")},
    }[kind]
    for architecture in ("75", "90", "120"):
        check_has_room(backward_launch(case, architecture), architecture)


def test_the_covers_have_every_kind_of_plan():
    found = set()  # streamed; with rows on their way; with sums in shared memory
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
            if architecture == "90":  # in place of a cluster of 16
                assert ("8", "512") in {(plan.get("CLUSTER"), plan["THREADS"]) for plan in plans}
        found |= {(is_streamed(p), p["STAGES"] > "0", p["SUMS_IN_SHARED"]) for p in backward}
    assert len(found) == 5
    for kind in ("GROUP_FORWARD", "GROUP_BACKWARD"):
        kinds = {(len(group_builds(case)) > 1, case["channels_last"]) for case in cases(kind)}
        assert len(kinds) == 4


def is_streamed(macros: dict[str, str]) -> bool:
    width, *held = (int(macros[name]) for name in ("WIDTH", "THREADS_PER_ROW", "PACK", "PACKS"))
    return width > prod(held)


def test_the_check_sees_a_spill():
    operands = dict.fromkeys(("x", "weight", "bias", "y"), FLOAT64)
    types = ForwardTypes(FLOAT64, **operands, formula=Formula(center=True))
    build = cuda_forward(types, Walk(ROWS, 16384), 16, limits_of("90")).build
    crowded = {"WIDTH": "98304", "PACK": "2", "PACKS": "48"}
    crowded |= dict.fromkeys(("THREADS", "THREADS_PER_ROW"), "1024")
    macros = tuple((name, crowded.get(name, value)) for name, value in build.macros)
    with pytest.raises(AssertionError, match=r"spill_stores=[1-9]"):
        check_none_spills(Build(build.kernel, macros), "90")
