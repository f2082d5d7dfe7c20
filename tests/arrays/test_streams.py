# SPDX-License-Identifier: MIT
"""A launch and the work of other frameworks on their own streams run in the right order.

On the software GPU streams are late: they work only when the host waits for them, so a missing wait
gives wrong numbers. Which missing wait is noticed depends on the order in which the host waits for
two streams.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import numpy as np
import pytest

import cunorm
from tests import softgpu
from tests.support.described import clear_all
from tests.support.internals import CupyAdapter, _registry
from tests.support.kinds import ForeignOnCuda, OnCupy
from tests.support.operands import draw

pytestmark = pytest.mark.gpu
SHAPE = (6, 64)


@pytest.fixture
def gpu():
    return OnCupy()


@pytest.fixture
def late():
    with softgpu.settings(streams="late") if softgpu.is_loaded() else nullcontext():
        yield


def library(gpu, stream, patch):
    """Register an array type of a library that works on a stream; return the type's constructor."""

    class Own(gpu.cupy.ndarray):
        """An array of the library."""

    class Library(CupyAdapter):
        def stream(self, device):
            return stream.ptr

    patch.setitem(_registry.library_types, Own, Library())

    def own(array):
        memory = gpu.cupy.cuda.UnownedMemory(array.data.ptr, array.nbytes, array, 0)
        return Own(array.shape, array.dtype, gpu.cupy.cuda.MemoryPointer(memory, 0))

    return own


@pytest.mark.parametrize("waited_for_first", [0, 1])
@pytest.mark.parametrize("is_one_stream", [True, False])
def test_a_launch_and_the_streams_of_other_operands_wait_for_each_other(
    waited_for_first, is_one_stream, gpu, late, monkeypatch
):
    ours, other = (gpu.cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    theirs = ours if is_one_stream else other
    own, foreign = (library(gpu, stream, monkeypatch) for stream in (ours, theirs))
    x, *seeds = (draw(name, SHAPE, "float32") for name in ("x", "seed", "another"))
    there, *sources = map(gpu.put, (x, *seeds))
    weight = gpu.put(np.zeros(SHAPE[1], np.float32))
    gpu.cupy.cuda.runtime.deviceSynchronize()

    def write(number):
        with theirs:
            cunorm.rms_norm(sources[number][:1], out=weight.reshape(1, -1))

    write(0)
    y = cunorm.rms_norm(own(there), foreign(weight))
    write(1)
    for stream in (ours, theirs)[:: 1 - 2 * waited_for_first]:
        stream.synchronize()
    expected = cunorm.rms_norm(x, cunorm.rms_norm(seeds[0][:1])[0])
    np.testing.assert_allclose(gpu.get(y), expected, rtol=1e-6)
    np.testing.assert_allclose(gpu.get(weight), cunorm.rms_norm(seeds[1][:1])[0], rtol=1e-6)


def test_a_producer_orders_our_stream_after_its_work(gpu):
    thing, stream = ForeignOnCuda(gpu.put(draw("x", SHAPE, "float32"))), gpu.cupy.cuda.Stream()
    cunorm.rms_norm(thing)
    with stream:
        cunorm.rms_norm(thing)
    assert thing.streams == [1, stream.ptr]  # DLPack has no stream 0; its default stream is 1


def test_a_capsule_is_held_until_the_stream_has_passed_the_launch(gpu, late):
    alive, results = [], []

    def call():
        array = gpu.put(draw("x", SHAPE, "float32"))
        alive.append(weakref.ref(array))
        results.append(cunorm.rms_norm(ForeignOnCuda(array)))
        del array
        gc.collect()

    stream = gpu.cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()
        assert alive[0]() is not None
        if softgpu.is_loaded():  # a real GPU may be done by now
            call()
            assert alive[0]() is not None
        stream.synchronize()
        call()
    assert alive[0]() is None
    stream.synchronize()
    expected = cunorm.rms_norm(draw("x", SHAPE, "float32"))
    for y in results:
        np.testing.assert_allclose(gpu.get(y), expected, rtol=1e-6)


def test_the_last_capsule_is_freed_when_caches_are_cleared_and_not_before_its_launch(gpu, late):
    stream = gpu.cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = gpu.put(draw("x", SHAPE, "float32"))
        alive = weakref.ref(x)
        y = cunorm.rms_norm(ForeignOnCuda(x))
        launched = stream.record()
        cunorm.rms_norm(ForeignOnCuda(x))
        del x
        gc.collect()
        assert alive() is not None or not softgpu.is_loaded()  # a real GPU may be done by now
        clear_all()
        assert alive() is None
        assert launched.done
        stream.synchronize()
    expected = cunorm.rms_norm(draw("x", SHAPE, "float32"))
    np.testing.assert_allclose(gpu.get(y), expected, rtol=1e-6)


def test_a_foreign_call_is_captured_and_calls_after_it_are_as_before(gpu):
    x = gpu.put(draw("x", SHAPE, "float32"))
    stream, out = gpu.cupy.cuda.Stream(non_blocking=True), gpu.cupy.empty(SHAPE, np.float32)
    with stream:
        cunorm.rms_norm(ForeignOnCuda(x), out=out)
        stream.synchronize()
        cunorm.rms_norm(ForeignOnCuda(x), out=out)
        stream.begin_capture()
        for _ in range(2):
            cunorm.rms_norm(ForeignOnCuda(x), out=out)
        graph = stream.end_capture()
        y = cunorm.rms_norm(ForeignOnCuda(x))
        out[...] = 0
        graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(gpu.get(out), gpu.get(y))
