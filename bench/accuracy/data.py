# SPDX-License-Identifier: MIT
"""The operands of the accuracy report: x of several kinds, and the other operands."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.timing.cases import DTYPES, Operands, Operator, Shape
from examples.char_lm.adam import Adam, learning_rate
from examples.char_lm.data import corpus, installation_text, random_windows
from examples.char_lm.model import Model
from examples.char_lm.model import Shape as ModelShape
from tests.support.ulps import ulp

MEANS = {f"mean {text}": float(text) for text in ("0", "1", "100", "1e4", "1e6")}
TAILS, ACTIVATIONS = "tails", "activations"
KINDS = (*MEANS, TAILS, ACTIVATIONS)
_MODEL = {"width": 128, "layers": 2, "heads": 4, "context": 64}
_STEPS, _BATCH, _RATE = 300, 16, 5e-3

Float64 = NDArray[np.float64]


def exists(kind: str, dtype: str, shape: Shape) -> bool:
    """Whether x of a kind exists for a dtype and a shape.

    If a dtype's numbers near the mean lie farther apart than the rows' deviation, 1, rounding would
    make rows constant or not finite. So float16 and bfloat16 have no mean above 100.
    """
    if kind == ACTIVATIONS:
        return len(shape) == 2 and shape[1] == _MODEL["width"]
    return kind == TAILS or float(ulp(MEANS[kind], dtype)) <= 1


def operands(operator: Operator, kind: str, dtype: str, shape: Shape) -> Operands:
    """Draw the operands of forward and backward on the host, all of one dtype.

    dy is standard normal, weight normal about 1 with deviation 1/2, bias standard normal.
    """
    rng = np.random.default_rng(0)
    values = {"x": _x(rng, kind, shape), "dy": rng.standard_normal(shape)}
    values["weight"] = 1 + rng.standard_normal(shape[1]) / 2
    values["bias"] = rng.standard_normal(shape[1])
    names = ("x", "dy", *operator.parameters)
    return {name: values[name].astype(DTYPES[dtype]) for name in names}


def rows_of(operator: Operator, array: Any) -> Any:
    """Return an array of x's shape as [rows, d]; a row has one mean and one deviation."""
    groups = operator.groups(array.shape[1]) if operator.of_channels else 1
    return array.reshape(array.shape[0] * groups, -1)


def _x(rng: np.random.Generator, kind: str, shape: Shape) -> Float64:
    if kind == ACTIVATIONS:
        stream = activations()
        return stream[np.arange(shape[0]) * len(stream) // shape[0]]
    if kind == TAILS:
        return rng.standard_t(2, shape)
    return MEANS[kind] + rng.standard_normal(shape)


@lru_cache(maxsize=1)
def activations() -> Float64:
    """Train the small Transformer of `examples/` for half a minute; return its residual stream.

    Each row is the input of the model's last norm at one character of a random window of the text.
    """
    data = corpus(installation_text()[1])
    rng = np.random.default_rng(0)
    shape = ModelShape(vocabulary=len(data.characters), **_MODEL)
    model = Model(shape, rng, np, np.float32)
    optimizer = Adam(model.parameters)
    for step in range(_STEPS):
        batch = random_windows(rng, data.training, _BATCH, shape.context)
        optimizer.step(model.loss_and_gradients(*batch)[1], learning_rate(step, _STEPS, _RATE))
    inputs, _ = random_windows(rng, data.validation, _BATCH, shape.context)
    _, saved = model.forward(inputs)
    return np.asarray(saved.final.residual, np.float64).reshape(-1, shape.width)
