# SPDX-License-Identifier: MIT
"""NVRTC compiles the kernels for every architecture, without a GPU, and nothing spills.

`pytest -m exhaustive tests/backends/test_nvrtc.py` compiles the rest of the covers.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from tests.support.covers import Case, pairwise
from tests.support.internals import (
    ACTIVATIONS,
    DTYPES,
    FLOAT32,
    FLOAT64,
    NONE,
    BackwardTypes,
    Build,
    Features,
    Formula,
    ForwardTypes,
    GroupBackwardTypes,
    GroupForwardTypes,
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
STATIC_SHARED_MEMORY = 48 << 10
ROWS, SM_COUNT = 1 << 20, 132  # so many rows that each block has some

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
    # One width or more of each kind of plan: teams within a warp, of a block, streamed; odd ones.
    "width": (1, 100, 1000, 5003, 8192, 20001, 65536, 100003, 131072),
    # Without clusters and copies, with both, and where no cluster of 16 blocks has room.
    "features": (NONE, Features(True, True), Features(True, True, 8)),
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


def forward_build(case: Case) -> Build:
    """Return the build of a case of FORWARD."""
    told = dtypes(case, "residual", "gate", "weight", "bias", "y") | {"x": DTYPES[case["x"]]}
    compute = FLOAT64 if FLOAT64 in (told["x"], told["residual"]) else FLOAT32
    told |= {"new_residual": told["residual"], "formula": formula(case, compute)}
    walk = Walk(ROWS, case["width"], case["groups"])
    return cuda_forward(ForwardTypes(compute, **told), walk, case["access"], case["features"]).build


def backward_build(case: Case) -> Build:
    """Return the build of a case of BACKWARD."""
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
    types, walk = BackwardTypes(compute, **told), Walk(ROWS, case["width"], case["groups"])
    return cuda_backward(types, walk, case["access"], SM_COUNT, case["features"]).build


def param_grad_build(case: Case) -> Build:
    """Return the build of a case of PARAM_GRAD."""
    types = dtypes(case | {"x": "float32"}, "compute", "dweight", "dbias").values()
    return cuda_param_grad(ParamGradTypes(*types, case["accumulate"]), 4096).build


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
def cover(kind: str) -> list[Build]:
    """Return builds among which every two choices of a kernel's operands meet."""
    if kind == "rows":
        found = [forward_build(case) for case in pairwise(FORWARD)]
        found += [backward_build(case) for case in pairwise(BACKWARD)]
        return list(dict.fromkeys([*found, *map(param_grad_build, pairwise(PARAM_GRAD))]))
    cases = [*pairwise(GROUP_FORWARD), *pairwise(GROUP_BACKWARD)]
    return list(
        {read_macros(build): build for case in cases for build in group_builds(case)}.values()
    )


def runs_on(build: Build, architecture: str) -> bool:
    """Whether a GPU of an architecture has the features that a build uses."""
    copies = ("ASYNC_COPIES", "true") in build.macros
    least = 90 if build.cluster > 1 else 80 if copies else 0
    return int(architecture) >= least


def check_none_spills(builds: list[Build], architecture: str) -> None:
    for build in builds:
        compiled = compile_build(build, architecture)
        usage = resource_usage(compiled.log)
        assert compiled.cubin.startswith(b"\x7fELF")
        assert usage.shared <= STATIC_SHARED_MEMORY, build
        if architecture == "90":
            assert not (usage.spill_stores or usage.spill_loads or usage.stack), f"{build}: {usage}"


def shares():
    """Return parameters: in CI an eighth of a cover for 90, and a share of it for each other."""
    for (number, architecture), share in product(enumerate(ARCHITECTURES), range(SHARES)):
        is_kept = share % 8 == 0 if architecture == "90" else share == 4 * number + 1
        marks = () if is_kept else pytest.mark.exhaustive
        yield pytest.param(architecture, share, marks=marks)


@pytest.mark.parametrize(("architecture", "share"), [*shares()])
@pytest.mark.parametrize("kind", ["rows", "groups"])
def test_a_cover_of_the_builds_compiles_for_every_architecture_and_none_spills(
    kind, architecture, share
):
    builds = [build for build in cover(kind)[share::SHARES] if runs_on(build, architecture)]
    assert builds
    check_none_spills(builds, architecture)


def test_rows_that_fill_a_threads_registers_do_not_spill():
    case = {name: choices[0] for name, choices in BACKWARD.items()}
    case |= {"x": "bfloat16", "weight": "float32", "d_residual": "x", "center": True}
    case |= {"outputs": "bfloat16 dx and dresidual", "sums": ("dweight",)}
    check_none_spills([backward_build(case | {"width": 16384, "access": 16})], "90")


def test_the_covers_have_every_kind_of_plan():
    rows = cover("rows")
    found = {(build.kernel, build.cluster) for build in rows}
    assert found >= set(product(("row_norm_forward", "row_norm_backward"), (1, 2, 4, 8, 16)))
    assert any(build.cluster == 8 and "512" in dict(build.macros)["THREADS"] for build in rows)
    assert any(("ASYNC_COPIES", "true") in build.macros for build in rows)
    for factors in (GROUP_FORWARD, GROUP_BACKWARD):
        cases = pairwise(factors)
        kinds = {(len(group_builds(case)) > 1, case["channels_last"]) for case in cases}
        assert len(kinds) == 4


def test_the_check_sees_a_spill():
    operands = dict.fromkeys(("x", "weight", "bias", "y"), FLOAT64)
    types = ForwardTypes(FLOAT64, **operands, formula=Formula(center=True))
    build = cuda_forward(types, Walk(ROWS, 16384), 16).build
    crowded = {"WIDTH": "98304", "PACK": "2", "PACKS": "48"}
    crowded |= dict.fromkeys(("THREADS", "THREADS_PER_ROW"), "1024")
    macros = tuple((name, crowded.get(name, value)) for name, value in build.macros)
    with pytest.raises(AssertionError, match=r"spill_stores=[1-9]"):
        check_none_spills([Build(build.kernel, macros)], "90")
