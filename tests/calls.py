# SPDX-License-Identifier: MIT
"""Calls of every public row norm with arrays that go together, and what they launch."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from operands import draw

import cunorm
from cunorm._arrays._dlpack import DLPack
from cunorm._arrays._numpy import Numpy
from cunorm._arrays._torch import Torch
from cunorm.row_norm import _backward, _forward

WIDTH = 8
FORWARDS = [
    name
    for name in cunorm.__all__
    if "norm" in name.lower() and name.islower() and not name.endswith("_backward")
]
BACKWARDS = [name for name in cunorm.__all__ if name.endswith("_backward")]


def given():
    """Arrays that go together, and the backward's."""
    rows, parameter = (5, WIDTH), (WIDTH,)
    names = dict.fromkeys(("x", "residual", "gate", "dy", "d_residual"), rows)
    names |= {"weight": parameter, "bias": parameter, "rstd": (5,), "mean": (5,)}
    return SimpleNamespace(**{name: draw(name, shape, "float32") for name, shape in names.items()})


def forward(name, x, **more):
    """Call any forward, those that add with a residual."""
    streams = [more.pop("residual", None)] if name.startswith("add_") else []
    return getattr(cunorm, name)(x, *streams, **more)


def backward(name, dy, x, **more):
    """Call any backward, with statistics that fit it."""
    statistics = {"rstd": np.ones(5, np.float32)}
    if name == "layer_norm_backward":
        statistics["mean"] = np.zeros(5, np.float32)
    return getattr(cunorm, name)(dy, x, **statistics | more)


def raises(error, *texts):
    """Expect an error whose message is exactly these texts, one after the other."""
    return pytest.raises(error, match="^" + re.escape("".join(texts)) + "$")


def launched(monkeypatch):
    """Collect what is launched, and let nothing be copied on the way there."""
    seen = []
    for module, name in ((_forward, "run_forward"), (_backward, "run_backward")):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda call, run=run: (seen.append(call), run(call)))
    for framework in (Numpy, Torch, DLPack):
        monkeypatch.setattr(framework, "contiguous", None)
    return seen
