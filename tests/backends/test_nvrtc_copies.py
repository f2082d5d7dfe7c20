# SPDX-License-Identifier: MIT
"""Backwards that copy their next row to shared memory compile, fit, and do not spill."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from cunorm._builds import BackwardTypes, Formula
from cunorm._dtypes import DTYPES, FLOAT32
from cunorm._features import Features
from cunorm._plan import Walk, cuda_backward

pytest.importorskip("cupy", reason="CuPy is not installed")
from tests.support.nvrtc import compile_cubin, resource_usage  # it needs CuPy

ROWS, SM_COUNT, SHARED_LIMIT = 1 << 20, 132, 48 << 10
# One of them or more has each kind of plan with copies; of the widest, two rows of bfloat16 alone
# fit.
WIDTHS = (64, 100, 256, 512, 1002, 2048, 4096)
COPIES = ("ASYNC_COPIES", "true")

# The operands that a backward has beside dy, x, dx and weight, which is given a gradient.
FORMULAS: dict[str, dict[str, Any]] = {
    "rms_norm": {},
    "layer_norm": {"dbias": True, "formula": Formula(center=True)},
    "rms_norm + d_residual": {"others": ("d_residual",)},
    "rms_norm * gate": {"others": ("gate", "dgate"), "formula": Formula(activation="silu")},
    "layer_norm(x * gate)": {
        "others": ("gate", "dgate"),
        "dbias": True,
        "formula": Formula(activation="silu", pre_gate=True, center=True),
    },
}


def usage(architecture: str, dtype: str, formula: str, width: int):
    """Return what the build takes that a plan with copies has; None where it has no copies."""
    options = dict(FORMULAS[formula])
    names = ("dy", "x", "dx", "weight", *options.pop("others", ()))
    rows = dict.fromkeys(names, DTYPES[dtype])
    types = BackwardTypes(compute=FLOAT32, dweight=True, **rows, **options)
    build = cuda_backward(types, Walk(ROWS, width), 16, SM_COUNT, Features(async_copies=True)).build
    if COPIES not in build.macros:
        return None
    return resource_usage(compile_cubin(build, architecture)[1])


def builds():
    """Yield cases; all but four are exhaustive."""
    for case in product(("80", "90", "100"), ("float32", "bfloat16"), FORMULAS, WIDTHS):
        architecture, dtype, formula, width = case
        is_kept = architecture == "90" and (dtype, width) in {("float32", 100), ("bfloat16", 2048)}
        is_kept &= formula in ("rms_norm", "layer_norm(x * gate)")
        yield pytest.param(*case, marks=() if is_kept else pytest.mark.exhaustive)


@pytest.mark.parametrize(("architecture", "dtype", "formula", "width"), list(builds()))
def test_copies_fit_shared_memory_and_nothing_spills(architecture, dtype, formula, width):
    found = usage(architecture, dtype, formula, width)
    if found is None:
        assert width >= 2048
        return
    assert 2 * 2 * DTYPES[dtype].itemsize * width < found.shared <= SHARED_LIMIT
    assert found.spill_stores == found.spill_loads == found.stack == 0
