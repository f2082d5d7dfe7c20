# SPDX-License-Identifier: MIT
"""Builds without optimisation, as in most tests, give the bits of shipped builds."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import levels
from tests.support.cases import call_of
from tests.support.gpu_arrays import OnNumpy
from tests.support.internals import compiler
from tests.support.operands import assert_same_fields, at
from tests.support.placed import Samples

pytestmark = [
    pytest.mark.compiled("O3"),  # these tests make most of the O3 builds in the budget
    pytest.mark.skipif(compiler() is None, reason="without a compiler nothing is compiled"),
]

SHORT = [{"shape": (1, 1, *shape)} for shape in ((1, 1), (21, 33), (9, 192), (5, 1003))]
LONG = [{"shape": (1, 1, 2, 70_000)}]  # rows that threads share
FIRST = [{"samples": Samples(n, (31,), 10, 5, False, 1)} for n in (2, 3)]
SHARED = [{"samples": Samples(2, (700,), 128, 64)}]


def typed(dtype, *names, **options):
    """Return a case whose operands are of a dtype."""
    return {"bias": None} | dict.fromkeys(("x", "dy", "weight", *names), dtype) | options


PRE_GELU = {"gate_activation": "gelu", "gate_position": "pre", "round_before_weight": True}
STREAM = {"stream": "+ bfloat16", "center": True, "groups": 3}
exhaustive = pytest.mark.exhaustive  # float64 and float16 take longest to build
CASES = [
    pytest.param(typed("float32"), SHORT + LONG, id="rms, float32"),
    pytest.param(
        typed("float64", "bias", center=True, c=3.0), SHORT, id="layer, float64", marks=exhaustive
    ),
    pytest.param(
        typed("float16", "gate", **PRE_GELU), SHORT, id="pre-gelu, float16", marks=exhaustive
    ),
    pytest.param(
        typed("bfloat16", "gate", "bias", "d_residual", **STREAM), SHORT, id="post-silu, stream"
    ),
    pytest.param(typed("bfloat16", "bias"), SHARED, id="group norm, last, shared samples"),
    pytest.param(typed("float32", "bias", activation="gelu_tanh"), FIRST, id="group norm, first"),
]


@pytest.mark.parametrize(("case", "sizes"), CASES)
def test_bits_do_not_depend_on_optimisation(case, sizes):
    def results():
        for size in sizes:
            for direction in ("forward", "backward"):
                kernel = f"{'group' if 'samples' in size else 'row'}_norm_{direction}"
                yield call_of(kernel, case | size, OnNumpy()).run()

    shipped = list(results())
    before = levels.builds.copy()
    levels.use("O0")
    try:
        plain = list(results())
    finally:
        levels.use("O3")
    assert {level for level, _ in levels.builds - before} <= {"O0"}
    for number, (got, expected) in enumerate(zip(plain, shipped, strict=True)):
        with at(f"call {number}"):
            assert_same_fields(got, expected)
            finite = (np.isfinite(a.astype(np.float64)).all() for a in expected if a is not None)
            assert all(finite)
