# SPDX-License-Identifier: MIT
"""A call with `out=` for each result, and `workspace=`, allocates no memory for arrays.

NumPy tells tracemalloc of its memory, so that the peak of a call shows arrays that are gone when it
returns, too. The least of those here, of 64 KiB, is larger than what Python's objects take. PyTorch
tells its dispatcher. And no framework is asked for memory: not even for a small array.
"""

import gc
import tracemalloc
from contextlib import contextmanager
from functools import partial
from inspect import signature

import numpy as np
import pytest
from calls import BACKWARDS, FORWARDS
from operands import draw

import cunorm
from cunorm._arrays import Framework

KIB = 1 << 10
WIDE, TALL = (4, 16 << 10), (16 << 10, 4)  # in one of them dweight has 64 KiB, in the other rstd


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


def peak_of(run):
    """Return the most bytes that were allocated at once during a call, beyond those before it."""
    run()  # what is planned and compiled for such a call stays
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def frameworks(kind=Framework):
    for sub in kind.__subclasses__():
        yield sub
        yield from frameworks(sub)


@contextmanager
def no_framework_allocates(monkeypatch):
    def refuse(self, *asked):
        raise MemoryError(f"{self.name} was asked for {asked}")

    with monkeypatch.context() as patch:
        for framework in frameworks():
            for name in ("allocate", "contiguous"):
                if name in vars(framework):
                    patch.setattr(framework, name, refuse)
        yield


@pytest.mark.parametrize("name", [*FORWARDS, *BACKWARDS])
@pytest.mark.parametrize("shape", [WIDE, TALL], ids=["wide", "tall"])
def test_numpy_allocates_nothing_during_a_call(shape, name):
    assert peak_of(Call(name, shape).run) < 16 * KIB


@pytest.mark.parametrize("name", [*FORWARDS, *BACKWARDS])
def test_numpy_allocates_what_is_left_out(name):
    """Else the test above would pass whatever a call did."""
    wide, tall = Call(name, WIDE), Call(name, TALL)
    for part in wide.parts():
        peaks = (peak_of(partial(call.run, part)) for call in (wide, tall))
        assert max(peaks) >= 64 * KIB, part


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", [*FORWARDS, *BACKWARDS])
def test_no_framework_is_asked_for_memory(monkeypatch, name, kind):
    call = Call(name, (5, 8), kind)
    with no_framework_allocates(monkeypatch):
        call.run()
        for part in call.parts():
            with pytest.raises(MemoryError, match=f"^{kind} was asked for"):
                call.run(without=part)


@pytest.mark.parametrize("name", [*FORWARDS, *BACKWARDS])
def test_torch_runs_no_operation_that_allocates(name):
    """It sees no more than a workspace of bytes that is viewed as floats."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = set()

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            self.names.add(operation.overloadpacket.__name__)
            return operation(*args, **kwargs or {})

    call = Call(name, (5, 8), "torch")
    with Operations() as operations:
        call.run()
    assert operations.names <= {"view", "slice", "detach"}
    for part in call.parts():
        with Operations() as operations:
            call.run(without=part)
        assert "empty_strided" in operations.names, part
