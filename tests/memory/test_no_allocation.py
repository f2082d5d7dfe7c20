# SPDX-License-Identifier: MIT
"""A call with `out=` for each result, and `workspace=`, allocates no memory for arrays.

NumPy tells tracemalloc of its memory, so that the peak of a call shows arrays that are gone when it
returns, too. The least of those here, of 64 KiB, is larger than what Python's objects take. What
PyTorch and CuPy are asked for is in test_out.py.
"""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial

import numpy as np

import cunorm
from tests.support import internals
from tests.support.calls import GROUP_NORMS, call_of, draw, names

KIB = 1 << 10
# In one of them dweight has 64 KiB, in the other rstd.
SHAPES = (4, 16 << 10), (16 << 10, 4)
GROUP_SHAPES = (2, 3, 16 << 10), (16 << 10, 2, 4)


def peak_of(run):
    """Return the most bytes that were allocated at once during a call, beyond those before it."""
    run()  # what is planned and compiled for such a call stays
    gc.disable()  # else what goes meanwhile would hide what comes
    tracemalloc.start()
    peak = 0
    try:
        for forget in (internals._again.forget, lambda: None):  # the call is planned, or repeated
            forget()
            internals._scratch._kept.clear()  # what is lent is allocated
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            run()
            peak = max(peak, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
        gc.enable()
    return peak


@names
def test_numpy_allocates_what_is_left_out_and_nothing_else(name):
    calls = [call_of(name, shape) for shape in (GROUP_SHAPES if name in GROUP_NORMS else SHAPES)]
    assert max(peak_of(call.run) for call in calls) < 16 * KIB
    for part in calls[0].parts():
        assert max(peak_of(partial(call.run, part)) for call in calls) >= 64 * KIB, part


# --- memory that is lent for a call ---------------------------------------------------------------


def test_only_some_mib_of_what_was_lent_are_kept():
    """What a call lends itself to add up the gradients of 400,000 weights is gone after it."""
    x, weight = draw("x", (8, 400_000), "float32"), draw("weight", 400_000, "float32")
    out = cunorm.NormGrads(dweight=np.empty_like(weight))
    told = {"rstd": np.ones(8, np.float32), "needs": ("weight",), "out": out}
    lent = cunorm.workspace_size("rms_norm_backward", x, weight, needs=("weight",))
    assert lent > 8 << 20
    run = partial(cunorm.rms_norm_backward, x, x, weight, **told)
    run()
    internals._scratch._kept.clear()
    tracemalloc.start()
    try:
        run()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak >= lent
    assert kept < 1 << 20
