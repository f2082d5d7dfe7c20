# SPDX-License-Identifier: MIT
"""What the tests of cunorm.torch's higher derivatives share: cases, formulas, directions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.fuzz.torch_programs import formula
from tests.support.operands import draw
from tests.support.torch_cases import CASES, case, factors

FEW = ("rms_norm", "group_norm")  # whose kernels CI compiles
names = pytest.mark.parametrize(
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES],
)


def formula_of(name):
    """Return a case's function in torch's operations."""
    function, operands, options = CASES[name]

    def call(x, *rest):
        named = dict(zip(operands.split(), rest, strict=True))
        y, stream = formula(function, x, named, dict(options), exact=True)
        return (y,) if stream is None else (y, stream)

    return call


def values(name):
    return tuple(one.detach() for one in case(name)[1])


def assert_close(found, expected):
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        one, other = (0.0 if t is None else t.detach().numpy(force=True) for t in (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def leaves(found):
    if found is None or isinstance(found, torch.Tensor):
        return [found]
    return [one for part in found for one in leaves(part)]


def total(call, *tensors):
    return sum((one.sin() * factors(one)).sum() for one in call(*tensors))


def directions(given, turn):
    drawn = [
        draw(f"{turn} {index}", tuple(one.shape), "float64") for index, one in enumerate(given)
    ]
    return tuple(map(torch.from_numpy, drawn))


def all_of(given):
    return tuple(range(len(given)))
