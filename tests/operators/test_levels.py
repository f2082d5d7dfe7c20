# SPDX-License-Identifier: MIT
"""Builds give the same bits without optimisation, as most tests compile them, and as shipped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from tests.support import levels
from tests.support.internals import compiler
from tests.support.operands import assert_same_bits, at, draw, optional

pytestmark = [
    pytest.mark.compiled("O3"),  # of whose budget these are the greater part
    pytest.mark.skipif(compiler() is None, reason="without a compiler nothing is compiled"),
]

SHORT = ((1, 1), (21, 33), (9, 192), (5, 1003))
LONG = ((2, 4096), (2, 70_000))  # of the last, threads share each row
ROWS = {
    "rms, float32": ("float32", {}, (), SHORT + LONG),
    "layer, float64": ("float64", {"center": True, "c": 3.0}, ("bias",)),
    "pre-gelu, float16, rounded": (
        "float16",
        {"gate_activation": "gelu", "gate_position": "pre", "round_before_weight": True},
        (),
    ),
    "post-silu, bfloat16, stream, groups": (
        "bfloat16",
        {"center": True, "groups": 3, "gate_activation": "silu"},
        ("bias", "residual"),
    ),
}
ONE_LAUNCH, THREE = ((2, 31, 10), (3, 31, 10)), ((2, 700, 128),)
GROUPS = {
    "last, bfloat16, three launches": ("bfloat16", -1, "silu", THREE),
    "first, float32": ("float32", 1, "gelu_tanh", ONE_LAUNCH),
}


def row_norms(
    dtype: str, norm: dict[str, Any], operands: tuple[str, ...], shapes: Any = SHORT
) -> Any:
    """Yield the results of both directions for rows of several widths."""
    for rows, width in shapes:
        width *= norm.get("groups", 1)
        x, dy, residual = (draw(name, (rows, width), dtype) for name in ("x", "dy", "residual"))
        names = ("weight", *({"bias"} & set(operands)))
        told = norm | {name: optional(name, width, dtype) for name in names}
        if "gate_activation" in norm:
            told["gate"] = draw("gate", (rows, width), dtype)
        residual = residual if "residual" in operands else None
        f = cunorm.normalize_forward(x, residual=residual, **told)
        saved = {"rstd": f.rstd, "mean": f.mean, "d_residual": residual}
        stream = x if residual is None else f.residual
        yield f
        yield cunorm.normalize_backward(dy, stream, **told, **saved)


def group_norms(dtype: str, axis: int, activation: str, sizes: Any) -> Any:
    """Yield the results of both directions for samples."""
    for samples, positions, channels in sizes:
        shape = (samples, positions, channels) if axis == -1 else (samples, channels, positions)
        x, dy = (draw(name, shape, dtype) for name in ("x", "dy"))
        given = [channels // 2, *(optional(name, channels, dtype) for name in ("weight", "bias"))]
        told = {"channel_axis": axis, "activation": activation}
        f = cunorm.group_norm_forward(x, *given, **told)
        yield f
        yield cunorm.group_norm_backward(dy, x, *given, mean=f.mean, rstd=f.rstd, **told)


CASES = {name: (row_norms, *told) for name, told in ROWS.items()}
CASES |= {f"group norm, {name}": (group_norms, *told) for name, told in GROUPS.items()}


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_optimisation(name):
    results, *told = CASES[name]
    shipped = list(results(*told))
    before = levels.builds.copy()
    levels.use("O0")
    try:
        plain = list(results(*told))
    finally:
        levels.use("O3")
    assert {level for level, _ in levels.builds - before} <= {"O0"}
    for number, (got, expected) in enumerate(zip(plain, shipped, strict=True)):
        for field, right in expected._asdict().items():
            if right is not None:
                with at(f"call {number}"):
                    assert_same_bits(getattr(got, field), right, field)
                    assert np.isfinite(right.astype(np.float64)).all()
