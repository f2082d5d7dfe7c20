# SPDX-License-Identifier: MIT
"""Calls of every public row norm with arrays that go together, and what they launch."""

import re
from functools import partial
from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest
from operands import draw

import cunorm
from cunorm import _again, row_norm
from cunorm._arrays._dlpack import DLPack
from cunorm._arrays._numpy import Numpy
from cunorm._arrays._torch import Torch
from cunorm.row_norm import _backward, _forward

WIDTH = 8
NORMS = [name for name in row_norm.__all__ if "norm" in name]
FORWARDS = [name for name in NORMS if not name.endswith("_backward")]
BACKWARDS = [name for name in NORMS if name.endswith("_backward")]


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

    def run_and_see(run, call):
        seen.append(call)
        return run(call)

    _again.forget()
    for module, name in ((_forward, "run_forward"), (_backward, "run_backward")):
        monkeypatch.setattr(module, name, partial(run_and_see, getattr(module, name)))
    for framework in (Numpy, Torch, DLPack):
        monkeypatch.setattr(framework, "contiguous", None)
    return seen


def to(kind, array):
    if kind == "numpy":
        return array
    return pytest.importorskip("torch", reason="PyTorch is not installed").from_numpy(array)


def empty_like(array):
    return np.empty_like(array) if isinstance(array, np.ndarray) else array.new_empty(array.shape)


class Call:
    """A call of a public function with arrays for all that it takes, and for all that it makes."""

    def __init__(self, name, shape, kind="numpy"):
        self.function = getattr(cunorm, name)
        taken = signature(self.function).parameters
        of_rows = ("x", "dy", "residual", "gate", "d_residual")
        shapes = dict.fromkeys(of_rows, shape) | dict.fromkeys(("rstd", "mean"), shape[:1])
        shapes |= dict.fromkeys(("weight", "bias"), shape[1:])
        drawn = {key: draw(key, shapes[key], "float32") for key in shapes if key in taken}
        self.arrays = {key: to(kind, array) for key, array in drawn.items()}
        if "center" in taken:
            self.arrays["center"] = True
        result = self.function(**self.arrays)
        self.result = type(result) if isinstance(result, tuple) else None
        made = result._asdict() if self.result else {"y": result}
        distinct = {id(array): field for field, array in made.items() if array is not None}
        self.out = {field: empty_like(made[field]) for field in distinct.values()}
        self.workspace = None
        if "workspace" in taken:
            operands = {key: self.arrays[key] for key in ("x", "weight", "bias") if key in taken}
            size = cunorm.workspace_size(name, **operands)
            self.workspace = to(kind, np.empty(size, np.uint8))

    def parts(self):
        """Name what a call has to make if it is left out."""
        return [*self.out, *([] if self.workspace is None else ["workspace"])]

    def run(self, without=None):
        given = {field: array for field, array in self.out.items() if field != without}
        out = self.result(**given) if self.result else given.get("y")
        lent = {} if self.workspace is None else {"workspace": self.workspace}
        return self.function(**self.arrays, out=out, **({} if without == "workspace" else lent))
