# SPDX-License-Identifier: MIT
"""A call with `out=` for each result, and `workspace=`, allocates no memory for arrays.

NumPy tells tracemalloc of its memory, so that the peak of a call shows arrays that are gone when it
returns, too. The least of those here, of 64 KiB, is larger than what Python's objects take. PyTorch
tells its dispatcher, and CuPy is asked for arrays by one name: of small ones, too.
"""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial

import numpy as np
import pytest

import cunorm
from tests.support import internals
from tests.support.calls import GROUP_NORMS, anew, call_of, draw, names, nothing_known

KIB = 1 << 10
# In one of them dweight has 64 KiB, in the other rstd.
WIDE, TALL = (4, 16 << 10), (16 << 10, 4)
WIDE_GROUPS, TALL_GROUPS = (2, 3, 16 << 10), (16 << 10, 2, 4)


def calls_of(name):
    shapes = (WIDE_GROUPS, TALL_GROUPS) if name in GROUP_NORMS else (WIDE, TALL)
    return [call_of(name, shape) for shape in shapes]


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
        internals._again.forget()  # the call is planned, not just repeated
    internals._scratch._kept.clear()  # what is lent is allocated
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@names
def test_numpy_allocates_what_is_left_out_and_nothing_else(name):
    calls = calls_of(name)
    assert max(peak_of(call.run) for call in calls) < 16 * KIB
    for part in calls[0].parts():
        assert max(peak_of(partial(call.run, part)) for call in calls) >= 64 * KIB, part


@names
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

    call = call_of(name, kind="torch")
    for run in (partial(anew, call.run), call.run, call.run):
        assert operations(run) <= {"view", "slice", "detach"}
    for part in call.out:
        makes = partial(call.run, without=part)
        for run in (partial(anew, makes), makes, makes):
            assert operations(run) & {"empty_strided", "empty_like"}, part


@pytest.mark.gpu
@names
def test_cupy_allocates_what_is_left_out_and_nothing_else(name, monkeypatch):
    import cupy

    taken, empty = [], cupy.empty
    monkeypatch.setattr(
        cupy, "empty", lambda *form, **more: taken.append(form) or empty(*form, **more)
    )
    nothing_known(monkeypatch)
    call = call_of(name, kind="cupy")
    for part in (None, *call.parts()):
        has_none = part is None or (part == "workspace" and not call.workspace.size)
        for run in (partial(anew, call.run), call.run, call.run):
            taken.clear()
            run(without=part)
            assert bool(taken) != has_none, part


# --- memory that is lent for a call ---------------------------------------------------------------


def test_only_some_mib_of_what_was_lent_are_kept():
    """What a call lends itself to add up the gradients of 400,000 weights is gone after it."""
    internals._scratch._kept.clear()
    x, weight = draw("x", (8, 400_000), "float32"), draw("weight", 400_000, "float32")
    dweight, rstd = np.empty_like(weight), np.ones(8, np.float32)
    out = cunorm.NormGrads(dweight=dweight)
    told = {"rstd": rstd, "needs": ("weight",), "out": out}
    lent = cunorm.workspace_size("rms_norm_backward", x, weight, needs=("weight",))
    assert lent > 8 << 20
    run = partial(cunorm.rms_norm_backward, x, x, weight, **told)
    run()
    tracemalloc.start()
    try:
        run()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak >= lent
    assert kept < 1 << 20
