# SPDX-License-Identifier: MIT
"""NVRTC compiles the group norms for every architecture, without a GPU, and nothing spills.

`pytest -m exhaustive tests/backends/test_nvrtc_group.py` compiles the rest of the cover.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache

import pytest

from tests.support.covers import Case, pairwise
from tests.support.internals import (
    ACTIVATIONS,
    DTYPES,
    FLOAT32,
    FLOAT64,
    Build,
    GroupBackwardTypes,
    GroupForwardTypes,
    Samples,
    cuda_schedule,
)

pytest.importorskip("cupy", reason="CuPy is not installed")
from tests.support.nvrtc import SHARES, each_share, spilling  # it needs CuPy

# Positions, channels and groups. Of one launch: few positions, odd sizes, what fills a block of
# either layout; of three: tiles of some channels.
SHAPES = ((49, 96, 1), (256, 24, 3), (500, 320, 32), (1024, 64, 4), (4096, 3000, 2))
# What both kernels have. An operand has x's dtype ("x"), float32, another of them, or is absent
# (None).
COMMON = {
    "shape": SHAPES,
    "channels_last": (True, False),
    "x": tuple(DTYPES),
    "weight": (None, "x", "float32"),
    "bias": (None, "x", "float32"),
    "activation": tuple(dict.fromkeys(ACTIVATIONS.values())),
    "access": (1, 2, 16),
}
_OF_LARGE_ARRAYS = {"X_T", "Y_T", "DY_T", "BIAS_T", "ACTIVATION", "ACCESS"}
FORWARD = {**COMMON, "y": ("x", "float16")}
BACKWARD = {
    **COMMON,
    "dy": ("x", "float16"),
    "dx": (True, False),
    "sums": ((), ("dbias",), ("dweight",), ("dweight", "dbias")),
}


def _dtype(case: Case, name: str):
    return {"x": DTYPES[case["x"]], None: None, **DTYPES}[case[name]]


def types_of(case: Case):
    """Return the types of a case of FORWARD or BACKWARD."""
    x = DTYPES[case["x"]]
    compute = FLOAT64 if x is FLOAT64 else FLOAT32
    parameters = {name: _dtype(case, name) for name in ("weight", "bias")}
    activation = case["activation"]
    if "y" in case:
        return GroupForwardTypes(compute, x, _dtype(case, "y"), **parameters, activation=activation)
    sums = {name: name in case["sums"] for name in ("dweight", "dbias")}
    dx = x if case["dx"] or not case["sums"] else None
    return GroupBackwardTypes(
        *(compute, _dtype(case, "dy"), x, dx), **parameters, **sums, activation=activation
    )


def schedule(case: Case):
    """Return the launches of a case."""
    where = Samples(4, *case["shape"], case["channels_last"])
    return cuda_schedule(types_of(case), where, case["access"])


def builds(cases: Iterable[Case]) -> list[Build]:
    """Return what the launches of the cases need."""
    return list(dict.fromkeys(one.build for case in cases for one in schedule(case).passes))


@cache
def cover() -> list[Build]:
    """Return builds among which every two choices of a kernel's operands meet.

    Of launches that only combine, one of those that differ in nothing that this reads.
    """
    found = builds([*pairwise(FORWARD), *pairwise(BACKWARD)])
    return list({_read_macros(build): build for build in found}.values())


def _read_macros(build: Build) -> Build:
    macros = dict(build.macros)
    if macros["FIND"] == macros["WRITE"] == "false":
        macros = {name: macros[name] for name in macros if name not in _OF_LARGE_ARRAYS}
    return Build(build.kernel, tuple(macros.items()))


def test_the_shapes_are_of_both_kinds_of_plans():
    for factors in (FORWARD, BACKWARD):
        kinds = Counter(
            (len(schedule(case).passes) > 1, case["channels_last"]) for case in pairwise(factors)
        )
        assert len(kinds) == 4
        assert min(kinds.values()) >= 3


@each_share()
def test_a_cover_of_the_builds_compiles_for_every_architecture_and_none_spills(architecture, share):
    assert not spilling(cover()[share::SHARES], architecture)
