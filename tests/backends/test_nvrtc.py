# SPDX-License-Identifier: MIT
"""NVRTC compiles the row norms for every architecture, without a GPU, and nothing spills.

`pytest -m exhaustive tests/backends/test_nvrtc.py` compiles every build of `all_builds` for sm_90,
and the rest of the cover for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest

from tests.support.covers import Case, everything, pairwise
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
    ParamGradTypes,
    Walk,
    cuda_backward,
    cuda_forward,
    cuda_param_grad,
)

pytest.importorskip("cupy", reason="CuPy is not installed")
from tests.support.nvrtc import SHARES, each_share, spilling  # it needs CuPy

ROWS, SM_COUNT = 1 << 20, 132  # so many rows that each block has some
# One width or more of each kind of plan: teams within a warp, of a block, streamed; odd ones too.
WIDTHS = (1, 100, 1000, 5003, 8192, 20001, 65536, 100003, 131072)
MORE_WIDTHS = (256, 3072, 4096, 16384, 32768, 262144)
# Without clusters and copies, with both, and where no cluster of 16 blocks has room.
FEATURES = (NONE, Features(True, True), Features(True, True, 8))

# What both kernels have. An operand has x's dtype ("x"), float32, another of them, or is absent
# (None).
COMMON = {
    "x": tuple(DTYPES),
    "gate": (None, "x", "float32"),
    "activation": tuple(dict.fromkeys(ACTIVATIONS.values())),
    "position": ("post", "pre"),
    "weight": (None, "x", "float32"),
    "offset": (False, True),
    "rounded": (False, True),
    "center": (False, True),
    "width": WIDTHS,
    "features": FEATURES,
    "groups": (1, 3, 8),
    "access": (1, 2, 16),
}
FORWARD = {
    **COMMON,
    "residual": (None, "x", "float32"),
    "bias": (None, "x", "float32"),
    "y": ("x", "float32"),
}
BACKWARD = {
    **COMMON,
    "dy": ("x", "float16"),
    "d_residual": (None, "x"),
    "outputs": ("dx", "bfloat16 dx and dresidual", "neither"),
    "dgate": (False, True),
    "sums": ((), ("dbias",), ("dweight",), ("dweight", "dbias")),
}
PARAM_GRAD = {
    "compute": ("float32", "float64"),
    "dweight": (None, *DTYPES),
    "dbias": (None, *DTYPES),
    "accumulate": (False, True),
}


def _dtype(case: Case, name: str):
    return {"x": DTYPES[case["x"]], None: None, **DTYPES}[case[name]]


def _formula(case: Case, compute) -> Formula:
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
    operands = {name: _dtype(case, name) for name in ("x", "residual", "gate", "weight", "bias")}
    compute = FLOAT64 if FLOAT64 in (operands["x"], operands["residual"]) else FLOAT32
    types = ForwardTypes(
        compute=compute,
        **operands,
        new_residual=operands["residual"],
        y=_dtype(case, "y"),
        formula=_formula(case, compute),
    )
    walk = Walk(ROWS, case["width"], case["groups"])
    return cuda_forward(types, walk, case["access"], case["features"]).build


def backward_build(case: Case) -> Build:
    """Return the build of a case of BACKWARD."""
    x = DTYPES[case["x"]]
    dx, dresidual = {
        "dx": (x, None),
        "bfloat16 dx and dresidual": (DTYPES["bfloat16"], x),
        "neither": (None, None),
    }[case["outputs"]]
    compute = FLOAT64 if x is FLOAT64 else FLOAT32
    formula = _formula(case, compute)
    gate = _dtype(case, "gate")
    dgate = gate if case["dgate"] else None
    types = BackwardTypes(
        compute=compute,
        **{name: _dtype(case, name) for name in ("dy", "x", "d_residual", "weight")},
        gate=gate,
        dx=dx,
        dresidual=dresidual,
        dgate=dgate,
        bias=x if dgate is not None and not formula.pre_gate else None,
        dweight="dweight" in case["sums"],
        dbias="dbias" in case["sums"],
        formula=formula,
    )
    walk = Walk(ROWS, case["width"], case["groups"])
    return cuda_backward(types, walk, case["access"], SM_COUNT, case["features"]).build


def param_grad_build(case: Case) -> Build:
    """Return the build of a case of PARAM_GRAD."""
    dtype = {None: None, **DTYPES}
    types = (dtype[case[name]] for name in ("compute", "dweight", "dbias"))
    return cuda_param_grad(ParamGradTypes(*types, case["accumulate"]), 4096).build


@cache
def cover() -> list[Build]:
    """Return builds among which every two choices of a kernel's operands meet."""
    builds = [forward_build(case) for case in pairwise(FORWARD)]
    builds += [backward_build(case) for case in pairwise(BACKWARD)]
    builds += [param_grad_build(case) for case in pairwise(PARAM_GRAD)]
    return list(dict.fromkeys(builds))


def all_builds() -> Iterator[Build]:
    """Yield every combination of operands at every width, aligned as arrays usually are.

    With a gate, every combination of what takes registers: two activations of many, as one of the
    others is like them, and everything else that there is.
    """
    aligned = {"access": (16,), "width": (*WIDTHS, *MORE_WIDTHS), "groups": (1,)}
    aligned |= {"features": FEATURES[1:]}
    plain = {"gate": (None,), "activation": ("identity",), "position": ("post",)}
    plain |= {"offset": (False,), "rounded": (False,), "dgate": (False,)}
    used = {"dy": ("x",), "sums": ((), ("dweight",), ("dweight", "dbias"))}
    yield from map(forward_build, everything(FORWARD | aligned | plain))
    yield from map(backward_build, everything(BACKWARD | aligned | plain | used))
    gated = {"gate": ("x",), "activation": ("silu", "gelu_tanh"), "weight": ("x",)}
    gated |= {"offset": (True,), "rounded": (True,)}
    forward = {"residual": (None, "x"), "bias": ("x",), "y": ("x",)}
    yield from map(forward_build, everything(FORWARD | aligned | gated | forward))
    backward = {"dy": ("x",), "outputs": ("dx", "bfloat16 dx and dresidual"), "dgate": (True,)}
    backward |= {"sums": ((), ("dweight", "dbias"))}
    yield from map(backward_build, everything(BACKWARD | aligned | gated | backward))
    yield from map(param_grad_build, everything(PARAM_GRAD))


@each_share()
def test_a_cover_of_the_builds_compiles_for_every_architecture_and_none_spills(architecture, share):
    builds = [build for build in cover()[share::SHARES] if runs_on(build, architecture)]
    assert builds
    assert not spilling(builds, architecture)


def runs_on(build, architecture):
    """Whether a GPU of an architecture has the features that a build uses."""
    copies = ("ASYNC_COPIES", "true") in build.macros
    least = 90 if build.cluster > 1 else 80 if copies else 0
    return int(architecture) >= least


def test_the_cover_has_every_kind_of_plan():
    found = {(build.kernel, build.cluster) for build in cover()}
    assert found >= set(product(("row_norm_forward", "row_norm_backward"), (1, 2, 4, 8, 16)))
    assert any(build.cluster == 8 and "512" in dict(build.macros)["THREADS"] for build in cover())
    assert any(("ASYNC_COPIES", "true") in build.macros for build in cover())


@pytest.mark.exhaustive
@pytest.mark.parametrize("share", range(200))
def test_every_build_compiles_for_sm_90_and_none_spills(share):
    builds = list(dict.fromkeys(all_builds()))[share::200]
    assert not spilling(builds, "90")


def test_rows_that_fill_a_threads_registers_do_not_spill():
    case = {name: choices[0] for name, choices in BACKWARD.items()}
    case |= {"x": "bfloat16", "weight": "float32", "d_residual": "x", "center": True}
    case |= {"outputs": "bfloat16 dx and dresidual", "sums": ("dweight",)}
    case |= {"width": 16384, "access": 16}
    assert not spilling([backward_build(case)], "90")


def test_the_check_sees_a_spill():
    operands = dict.fromkeys(("x", "weight", "bias", "y"), FLOAT64)
    types = ForwardTypes(FLOAT64, **operands, formula=Formula(center=True))
    build = cuda_forward(types, Walk(ROWS, 16384), 16).build
    crowded = {"WIDTH": "98304", "PACK": "2", "PACKS": "48"}
    crowded |= dict.fromkeys(("THREADS", "THREADS_PER_ROW"), "1024")
    macros = tuple((name, crowded.get(name, value)) for name, value in build.macros)
    assert spilling([Build(build.kernel, macros)], "90")
