# SPDX-License-Identifier: MIT
"""Arrays in `out=`: they are written and returned, and they determine the dtype of results."""

from __future__ import annotations

import gc
import tracemalloc
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, NormForward, NormGrads
from tests.support import internals
from tests.support.calls import (
    GROUP_NORMS,
    assert_same,
    cached_calls_only,
    call_of,
    call_uncached,
    devices,
    empty_call_cache,
    fields,
    host,
    names,
    to,
)
from tests.support.operands import assert_same_bits, at, draw


@contextmanager
def operations(kind):
    """Yield a set that gets the names of PyTorch's operations, or of CuPy's allocations."""
    seen = set()
    if kind == "cupy":
        import cupy

        empty = cupy.empty
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cupy, "empty", lambda *a, **k: seen.add("empty") or empty(*a, **k))
            yield seen
    elif kind == "torch":
        from torch.utils._python_dispatch import TorchDispatchMode

        class Operations(TorchDispatchMode):
            def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
                seen.add(operation.overloadpacket.__name__)
                return operation(*args, **kwargs or {})

        with Operations():
            yield seen
    else:
        yield seen


def versions(named):
    """Return the version counters of tensors, which count writes."""
    return {key: array._version for key, array in named.items() if hasattr(array, "_version")}


@pytest.mark.parametrize("kind", ["numpy", "torch", pytest.param("cupy", marks=pytest.mark.gpu)])
@names
def test_results_are_written_to_given_arrays_and_others_are_allocated(name, kind, monkeypatch):
    """All arrays are given, or all but one; calls are planned first, and then cached.

    If all are given, nothing is allocated. torch's version counters show which arrays were written.
    """
    empty_call_cache(monkeypatch)
    call = call_of(name, kind=kind)
    expected = {
        field: host(array).copy() for field, array in fields(call_uncached(call.make)).items()
    }
    read = call.arrays | {"workspace": call.workspace}
    with operations(kind) as seen:
        for part, turn in ((part, turn) for part in (None, *call.parts()) for turn in range(3)):
            for array in call.out.values():
                array[...] = np.nan
            before, unchanged = versions(call.out), versions(read)
            seen.clear()
            with cached_calls_only() if turn == 2 else nullcontext(), at(part, turn):
                result, called = fields(call.run(without=part)), {*seen}
                assert versions(read) == unchanged
                assert versions(call.out) == {f: n + (f != part) for f, n in before.items()}
                for field, array in call.out.items():
                    assert (result[field] is array) == (field != part)
                for field, right in expected.items():
                    assert_same_bits(host(result[field]), right, field)
                allocates_workspace = (
                    kind == "cupy" and part == "workspace" and call.workspace.size > 0
                )
                allocates = kind != "numpy" and (part in call.out or allocates_workspace)
                assert bool(called & {"empty", "empty_strided", "empty_like"}) == allocates
                assert allocates or called <= {"view", "slice", "detach"}  # views of the workspace


def test_gradients_of_x_and_of_the_stream_may_each_have_an_array():
    call = call_of("layer_norm_backward")
    expected = call.make()
    one, other = (np.empty((5, 8), np.float32) for _ in range(2))
    for dx, dresidual in ((one, None), (None, one), (one, other)):
        grads = call.make(out=NormGrads(dx=dx, dresidual=dresidual))
        assert grads.dx is one
        assert grads.dresidual is (one if dresidual is None else dresidual)
        assert_same(grads, expected)


def test_a_stream_that_is_x_itself_is_returned_with_given_results():
    x = draw("x", (5, 8), "float32")
    y = np.empty_like(x)
    for _ in range(2):
        assert cunorm.add_rms_norm(x, None, out=AddNorm(y=y)).residual is x
        assert cunorm.rms_norm_forward(x, out=NormForward(y=y)).residual is None
        kwargs = {"residual_dtype": "float32", "out": NormForward(y=y)}
        assert cunorm.rms_norm_forward(x, **kwargs).residual is x


# --- dtypes ---------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize(
    ("name", "fields_of_any_dtype"),
    [
        ("layer_norm_forward", ["y"]),
        ("layer_norm_backward", ["dweight", "dbias", "dgate"]),
        ("group_norm_forward", ["y"]),
        ("group_norm_backward", ["dx", "dweight", "dbias"]),
    ],
)
def test_an_array_in_out_sets_the_dtype_of_a_result(name, fields_of_any_dtype, kind):
    """A float16 array gets the float32 result, rounded."""
    call = call_of(name, kind=kind)
    wide, narrow = (
        {field: to(kind, np.empty(call.out[field].shape, dtype)) for field in fields_of_any_dtype}
        for dtype in ("float64", "float16")
    )
    for out in (wide, narrow):
        found = call.make(out=call.result(**out))
        assert all(getattr(found, field) is array for field, array in out.items())
    for field, array in narrow.items():
        right = host(wide[field]).astype(np.float32).astype(np.float16)
        assert_same_bits(host(array), right, field)


def test_an_array_in_out_sets_the_dtype_of_a_stream():
    x, stream = draw("x", (5, 8), "bfloat16"), np.empty((5, 8), np.float16)
    assert cunorm.add_rms_norm(x, None, out=AddNorm(residual=stream)).residual is stream
    assert_same_bits(stream, cunorm.add_rms_norm(x, None, residual_dtype="float16").residual)


# --- memory that NumPy allocates ------------------------------------------------------------------

# dweight takes 64 KiB in one shape, rstd in the other; Python's own objects take less.
SHAPES = (4, 16 << 10), (16 << 10, 4)
GROUP_SHAPES = (2, 3, 16 << 10), (16 << 10, 2, 4)


def peaks_of(run):
    """Return the peak memory of a call that is planned, and of a cached call.

    Each is the smaller of two: a table of a cache may grow during one call.
    """
    run()  # loads the kernels
    gc.disable()  # a collection would hide allocations
    tracemalloc.start()
    peaks = []
    try:
        for clear in (*[internals._dispatch.clear_calls] * 2, *[lambda: None] * 2):
            clear()
            internals._scratch._kept.clear()  # so that scratch memory is allocated
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            run()
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
        gc.enable()
    return min(peaks[:2]), min(peaks[2:])


@names
def test_numpy_allocates_only_arrays_that_are_not_given(name):
    calls = [call_of(name, shape) for shape in (GROUP_SHAPES if name in GROUP_NORMS else SHAPES)]
    for call in calls:
        planned, repeated = peaks_of(call.run)
        assert planned < 32 << 10
        assert repeated < 8 << 10
    for part in calls[0].parts():
        for peaks in zip(*(peaks_of(partial(call.run, part)) for call in calls), strict=True):
            assert max(peaks) >= 64 << 10, part


def test_only_some_mib_of_scratch_memory_are_kept():
    """The scratch memory for the gradients of 700,000 weights is freed after the call."""
    x, weight = draw("x", (16, 700_000), "float32"), draw("weight", 700_000, "float32")
    out = cunorm.NormGrads(dweight=np.empty_like(weight))
    kwargs = {"rstd": np.ones(16, np.float32), "needs": ("weight",), "out": out}
    size = cunorm.workspace_size("rms_norm_backward", x, weight, needs=("weight",))
    assert size > 16 << 20
    run = partial(cunorm.rms_norm_backward, x, x, weight, **kwargs)
    run()
    internals._scratch._kept.clear()
    tracemalloc.start()
    try:
        run()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak >= size
    assert kept < 1 << 20
