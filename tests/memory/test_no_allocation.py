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

import pytest

from cunorm import _again, _scratch
from cunorm._arrays import Framework
from tests.support.calls import BACKWARDS, FORWARDS, Call, anew

KIB = 1 << 10
WIDE, TALL = (4, 16 << 10), (16 << 10, 4)  # in one of them dweight has 64 KiB, in the other rstd


def peak_of(run):
    """Return the most bytes that were allocated at once during a call, beyond those before it."""
    run()  # what is planned and compiled for such a call stays
    gc.disable()  # else what goes meanwhile would hide what comes
    try:
        return max(_peak_of_one(run, forgets) for forgets in (True, False))
    finally:
        gc.enable()


def _peak_of_one(run, forgets):
    if forgets:
        _again.forget()  # the call is planned, not just repeated
    _scratch._kept.clear()  # what is lent is allocated
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


def refuse(framework, *asked):
    raise MemoryError(f"{framework.name} was asked for {asked}")


WHEN_PLANNED = dict.fromkeys(("allocate", "allocate_like", "contiguous"), refuse)
WHEN_MADE_AGAIN = {"maker": lambda framework, form, has_model: partial(refuse, framework, form)}


@contextmanager
def frameworks_that(ways):
    """Let all frameworks do something else, and nothing be kept to lend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_scratch, "_kept", [])
        for framework in (Framework, *frameworks()):
            for way in ways.keys() & vars(framework).keys():
                patch.setattr(framework, way, ways[way])
        yield


def check_what_frameworks_are_asked_for(call, kind):
    """Check that it is nothing but what is left out, when a call is planned and when made again."""
    _again.forget()
    with frameworks_that(WHEN_PLANNED | WHEN_MADE_AGAIN):
        for _ in range(3):
            call.run()
        for part in call.parts():  # a workspace is of NumPy for all
            asked = "numpy" if part == "workspace" else kind
            with pytest.raises(MemoryError, match=f"^{asked} was asked for"):
                anew(call.run, without=part)
    with frameworks_that(WHEN_MADE_AGAIN):
        for part in call.out:
            call.run(without=part)
            with pytest.raises(MemoryError, match=f"^{kind} was asked for"):
                call.run(without=part)
    _again.forget()


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
def test_no_framework_is_asked_for_memory(name, kind):
    check_what_frameworks_are_asked_for(Call(name, (5, 8), kind), kind)


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

    def operations(run):
        with Operations() as seen:
            run()
        return seen.names

    call = Call(name, (5, 8), "torch")
    for run in (partial(anew, call.run), call.run, call.run):
        assert operations(run) <= {"view", "slice", "detach"}
    for part in call.out:
        makes = partial(call.run, without=part)
        for run in (partial(anew, makes), makes, makes):
            assert operations(run) & {"empty_strided", "empty_like"}, part
