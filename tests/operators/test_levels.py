# SPDX-License-Identifier: MIT
"""Builds without optimisation, as in most tests, give the bits of shipped builds."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import levels
from tests.support.cases import call_of
from tests.support.gpu_arrays import OnNumpy
from tests.support.internals import compiler
from tests.support.operands import assert_same_bits, at
from tests.support.placed import Samples

pytestmark = [
    pytest.mark.compiled("O3"),  # these tests make most of the O3 builds in the budget
    pytest.mark.skipif(compiler() is None, reason="without a compiler nothing is compiled"),
]

SHORT = [{"shape": (1, 1, *shape)} for shape in ((1, 1), (21, 33), (9, 192), (5, 1003))]
LONG = [{"shape": (1, 1, 2, 70_000)}]  # rows that threads share
ONE_LAUNCH, THREE = ((2, (31,), 10, 5), (3, (31,), 10, 5)), ((2, (700,), 128, 64),)


def typed(dtype, *names):
    """Return a case whose operands are of a dtype."""
    return {"bias": None} | dict.fromkeys(("x", "dy", "weight", *names), dtype)


def samples(sizes, *layout):
    return [{"samples": Samples(*size, *layout)} for size in sizes]


CASES = {
    "rms, float32": ("row", typed("float32"), SHORT + LONG),
    "layer, float64": (
        "row",
        typed("float64", "bias") | {"center": True, "c": 3.0},
        SHORT,
    ),
    "pre-gelu, float16, rounded": (
        "row",
        typed("float16", "gate")
        | {"gate_activation": "gelu", "gate_position": "pre", "round_before_weight": True},
        SHORT,
    ),
    "post-silu, bfloat16, stream, groups": (
        "row",
        typed("bfloat16", "gate", "bias", "d_residual")
        | {"stream": "+ bfloat16", "center": True, "groups": 3},
        SHORT,
    ),
    "group norm, last, bfloat16, shared samples": (
        "group",
        typed("bfloat16", "bias"),
        samples(THREE),
    ),
    "group norm, first, float32": (
        "group",
        typed("float32", "bias") | {"activation": "gelu_tanh"},
        samples(ONE_LAUNCH, False, 1),
    ),
}


def results(name):
    """Yield the results of both directions for every size."""
    norm, case, sizes = CASES[name]
    for size in sizes:
        for direction in ("forward", "backward"):
            yield call_of(f"{norm}_norm_{direction}", case | size, OnNumpy()).run()


@pytest.mark.parametrize(
    "name",
    [  # float64 and float16 are exhaustive: they take longest to build
        pytest.param(name, marks=pytest.mark.exhaustive if "64" in name or "16, r" in name else ())
        for name in CASES
    ],
)
def test_bits_do_not_depend_on_optimisation(name):
    shipped = list(results(name))
    before = levels.builds.copy()
    levels.use("O0")
    try:
        plain = list(results(name))
    finally:
        levels.use("O3")
    assert {level for level, _ in levels.builds - before} <= {"O0"}
    for number, (got, expected) in enumerate(zip(plain, shipped, strict=True)):
        for field, right in expected._asdict().items():
            if right is not None:
                with at(f"call {number}"):
                    assert_same_bits(getattr(got, field), right, field)
                    assert np.isfinite(right.astype(np.float64)).all()
