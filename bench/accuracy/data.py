# SPDX-License-Identifier: MIT
"""The operands of the accuracy report: x of several kinds, and the other operands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.timing.cases import DTYPES, Operands, Operator, Shape
from cunorm.reference.tolerance import ulp

MEANS = {f"mean {text}": float(text) for text in ("0", "1", "100", "1e4", "1e6")}
TAILS, ACTIVATIONS = "tails", "activations"
KINDS = (*MEANS, TAILS, ACTIVATIONS)
# Inputs of the last norm of the model of `examples/char_lm` (width 128, 2 layers of 4 heads,
# context 64) after 300 steps at rate 5e-3, with batches of 16 windows of its default text.
_STREAM = Path(__file__).with_name("activations.npy")
_STREAM_WIDTH = 128


def exists(kind: str, dtype: str, shape: Shape) -> bool:
    """Whether x of a kind exists for a dtype and a shape.

    If a dtype's numbers near the mean lie farther apart than the rows' deviation, 1, rounding would
    make rows constant or not finite. So float16 and bfloat16 have no mean above 100.
    """
    if kind == ACTIVATIONS:
        return len(shape) == 2 and shape[1] == _STREAM_WIDTH
    return kind == TAILS or float(ulp(np.float64(MEANS[kind]), dtype)) <= 1


def operands(operator: Operator, kind: str, dtype: str, shape: Shape) -> Operands:
    """Draw the operands of forward and backward on the host, all of one dtype.

    dy is standard normal, weight normal about 1 with deviation 1/2, bias standard normal.
    """
    rng = np.random.default_rng(0)
    if kind == ACTIVATIONS:
        stream = np.load(_STREAM)
        x = stream[np.arange(shape[0]) * len(stream) // shape[0]]
    elif kind == TAILS:
        x = rng.standard_t(2, shape)
    else:
        x = MEANS[kind] + rng.standard_normal(shape)
    values = {"x": x, "dy": rng.standard_normal(shape)}
    values["weight"] = 1 + rng.standard_normal(shape[1]) / 2
    values["bias"] = rng.standard_normal(shape[1])
    names = ("x", "dy", *operator.parameters)
    return {name: values[name].astype(DTYPES[dtype]) for name in names}


def rows_of(operator: Operator, array: Any) -> Any:
    """Return an array of x's shape as [rows, d]; a row has one mean and one deviation."""
    groups = operator.groups(array.shape[1]) if operator.of_channels else 1
    return array.reshape(array.shape[0] * groups, -1)
