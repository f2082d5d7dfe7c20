# SPDX-License-Identifier: MIT
"""Norms of rows that are cut into parts: moments, given statistics, sums and given sums."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.support.operands import DTYPES
from tests.support.split import SplitCall

RMS = {"center": False, "bias": None} | dict.fromkeys(("x", "weight", "dy"), "bfloat16")
# Rows near zero and far from it, parts whose means differ, more and fewer parts, and one column.
DATA: dict[str, dict[str, Any]] = {
    "near zero": {},
    "far from zero": {"mean": 1e4},
    "parts far from each other": {"mean": -30.0, "apart": 1e4},
    "one part": {"sizes": (34,)},
    "parts of one column": {"sizes": (1, 1, 1), "mean": 1e4},
    "seven parts": {"sizes": (5, 64, 1, 2, 300, 17, 33), "rows": (2, 11), "apart": 1.0},
    "small deviation": {"mean": 300.0, "deviation": 1e-3, "eps": 1e-12},
    "large deviation": {"mean": -1e4, "deviation": 1e3, "eps": 1e-2},
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("options", [{}, RMS], ids=["layer_norm", "rms_norm"])
def test_norms_of_parts_are_those_of_whole_rows(options, data):
    SplitCall(options | DATA[data]).check()


def drawn(seed: int) -> dict[str, Any]:
    """Draw a case."""
    rng = random.Random(seed)
    dtypes = [None, *DTYPES]
    x = rng.choice(dtypes[1:])
    case: dict[str, Any] = {"x": x, "dy": rng.choice([x, "float32"]), "seed": seed}
    case |= {name: rng.choice([None, x, "float32"]) for name in ("weight", "bias")}
    case |= {"center": rng.random() < 0.6, "c": rng.choice([None, 1.0, 3.0])}
    case |= {"weight_offset": rng.choice([0.0, 1.0]), "eps": rng.choice([1e-5, 1e-2])}
    sizes = (1, 2, 7, 16, 33, 128, 501)
    case["sizes"] = tuple(rng.choice(sizes) for _ in range(rng.randint(1, 7)))
    case["rows"] = rng.choice([(1,), (6,), (2, 3), (2, 1, 3)])
    far = {"float16": 30.0, "bfloat16": 300.0}.get(x, 1e4)
    case |= {"mean": rng.choice([0.0, far, -far]), "apart": rng.choice([0.0, 1.0, far / 10])}
    if rng.random() < 0.2:
        case["groups"] = rng.choice([2, 3])
    elif rng.random() < 0.2 and len(case["rows"]) > 1:
        case["axis"] = -2
    elif rng.random() < 0.2 and len(case["rows"]) == 2:
        case["own"] = (2, 1)
    if rng.random() < 0.5:
        case |= {"gate": rng.choice([x, "float32"]), "gate_position": rng.choice(["pre", "post"])}
        case["gate_activation"] = rng.choice(["silu", "identity", "tanh"])
    if rng.random() < 0.4:
        case |= {"residual": rng.choice([x, "float32"]), "d_residual": rng.choice([None, x])}
        case["stream"] = rng.choice([None, case["residual"]])
        if case.get("gate"):
            case["gate_position"] = rng.choice(["pre", "post", "branch"])
    elif rng.random() < 0.5:  # with a stream of another dtype than x's, rows are rounded to it
        case["round_before_weight"] = True
    return case


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(150))
def test_drawn_norms_of_parts_are_those_of_whole_rows(seed):
    SplitCall(drawn(seed)).check()
