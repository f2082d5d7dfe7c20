# SPDX-License-Identifier: MIT
"""Calls of every public function with arrays that go together, and what they launch."""

import re
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest

import cunorm
from cunorm import _again, row_norm
from cunorm._arrays import describe
from cunorm._arrays._dlpack import DLPack
from cunorm._arrays._numpy import Numpy
from cunorm._arrays._torch import Torch
from cunorm.group_norm import _backward as _group_backward
from cunorm.group_norm import _forward as _group_forward
from cunorm.row_norm import _backward, _forward
from tests.support.operands import assert_same_bits, draw

WIDTH = 8
NORMS = [name for name in row_norm.__all__ if "norm" in name]
FORWARDS = [name for name in NORMS if not name.endswith("_backward")]
BACKWARDS = [name for name in NORMS if name.endswith("_backward")]
GROUP_NORMS = ["group_norm", "instance_norm", "group_norm_forward", "group_norm_backward"]
FUNCTIONS = [*FORWARDS, *BACKWARDS, *GROUP_NORMS]


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
    monkeypatch.setattr(_again, "remember", lambda *ran: None)  # every call goes that way
    for module, name in ((_forward, "run_forward"), (_backward, "run_backward")):
        monkeypatch.setattr(module, name, partial(run_and_see, getattr(module, name)))
    for framework in (Numpy, Torch, DLPack):
        monkeypatch.setattr(framework, "contiguous", None)
    return seen


# --- calls that are made again --------------------------------------------------------------------


def nothing_known(monkeypatch):
    """Let no call be remembered, and return those that are from now on.

    Nor is the first one on arrays of a type; so let there have been one.
    """
    for kind in ("numpy", *(["torch"] if find_spec("torch") else [])):
        describe("test", "array", to(kind, np.empty(1, np.float32)))
    calls = {}
    monkeypatch.setattr(_again, "_known", calls)
    return calls


def anew(function, *arguments, **more):
    """Call a function as if nothing was remembered: checked and planned. One thread at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_again, "_known", {})
        return function(*arguments, **more)


@contextmanager
def planning_forbidden():
    """Let no call be made but those that are remembered."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (_forward, _backward, _group_forward, _group_backward):
            patch.setattr(module, "describe_all", None)
        yield


def assert_refused(call, error, text):
    """Expect an error that begins so, whether anything is remembered or not."""
    messages = []
    for run in (partial(anew, call), call):
        with pytest.raises(error, match="^" + re.escape(text)) as caught:
            run()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def arrays_of(named):
    """Return those that are arrays, of a call's arguments or of a result's fields."""
    return {name: array for name, array in named.items() if hasattr(array, "shape")}


def fields(result):
    """Name the arrays of a result."""
    return arrays_of(result._asdict() if isinstance(result, tuple) else {"y": result})


def strides_of(array):
    return array.strides if isinstance(array, np.ndarray) else array.stride()


def assert_same(actual, expected):
    """Compare results to the bit, and by what there is to know of their arrays."""
    assert type(actual) is type(expected)
    actual, expected = fields(actual), fields(expected)
    assert actual.keys() == expected.keys()
    for field, array in actual.items():
        right = expected[field]
        assert type(array) is type(right), field
        assert strides_of(array) == strides_of(right), field
        assert_same_bits(array, right, field)


def change(arrays, to_what="another"):
    """Put other numbers into arrays."""
    for name, array in arrays_of(arrays).items():
        array[...] = to(kind_of(array), draw(f"{to_what} {name}", tuple(array.shape), "float32"))


def elsewhere(array, start=0):
    """Return an array of the same form, that many elements after where one may begin."""
    size = int(np.prod(array.shape))
    numbers = draw(f"elsewhere {start}", start + size, "float32")
    return to(kind_of(array), numbers[start:].reshape(array.shape))


def to(kind, array):
    if kind == "numpy":
        return array
    return pytest.importorskip("torch", reason="PyTorch is not installed").from_numpy(array)


def kind_of(array):
    return "numpy" if isinstance(array, np.ndarray) else "torch"


def empty_like(array):
    return np.empty_like(array) if isinstance(array, np.ndarray) else array.new_empty(array.shape)


class Call:
    """A call of a public function with arrays for all that it takes, and for all that it makes."""

    shape, said = (5, WIDTH), {"center": True}

    def __init__(self, name, shape=None, kind="numpy"):
        self.function = getattr(cunorm, name)
        shape, taken = shape or self.shape, signature(self.function).parameters
        drawn = {key: draw(key, size, "float32") for key, size in self.shapes(*shape).items()}
        self.arrays = {key: to(kind, array) for key, array in drawn.items() if key in taken}
        self.workspace, said = None, {key: self.said[key] for key in self.said if key in taken}
        if "workspace" in taken:
            sized = signature(cunorm.workspace_size).parameters.keys() & taken.keys()
            told = {key: value for key, value in (self.arrays | said).items() if key in sized}
            size = cunorm.workspace_size(name, **told)
            self.workspace = to(kind, np.empty(size, np.uint8))
        self.arrays |= said
        result = anew(self.make)
        self.result = type(result) if isinstance(result, tuple) else None
        distinct = {id(array): field for field, array in fields(result).items()}
        self.out = {field: empty_like(fields(result)[field]) for field in distinct.values()}

    def shapes(self, rows, width):
        """Return the shape of each operand that there may be."""
        of_rows = ("x", "dy", "residual", "gate", "d_residual")
        shapes = dict.fromkeys(of_rows, (rows, width)) | dict.fromkeys(("rstd", "mean"), (rows,))
        return shapes | dict.fromkeys(("weight", "bias"), (width,))

    def parts(self):
        """Name what a call has to make if it is left out."""
        return [*self.out, *([] if self.workspace is None else ["workspace"])]

    def make(self):
        """Let the call make all of its results."""
        return self.function(**self.arrays)

    def run(self, without=None):
        given = {field: array for field, array in self.out.items() if field != without}
        out = self.result(**given) if self.result else given.get("y")
        lent = {} if self.workspace is None else {"workspace": self.workspace}
        return self.function(**self.arrays, out=out, **({} if without == "workspace" else lent))


class GroupCall(Call):
    """The same of a group norm."""

    shape, said = (3, 8, WIDTH), {"num_groups": 4, "activation": "silu"}

    def shapes(self, samples, *rest):
        shapes = dict.fromkeys(("x", "dy"), (samples, *rest))
        shapes |= dict.fromkeys(("mean", "rstd"), (samples, self.said["num_groups"]))
        return shapes | dict.fromkeys(("weight", "bias"), rest[-1:])


def call_of(name, shape=None, kind="numpy"):
    """Return a call of any of the functions."""
    return (GroupCall if name in GROUP_NORMS else Call)(name, shape, kind)
