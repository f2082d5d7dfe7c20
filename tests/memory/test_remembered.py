# SPDX-License-Identifier: MIT
"""Cached calls: none is planned twice, keeps an array alive, or runs on a wrong stream or device.

test_repeated_calls.py shows that a cached call gives the results of its own arguments.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext, suppress
from functools import partial

import numpy as np
import pytest

import cunorm
from tests import softgpu
from tests.support.calls import (
    GROUP_NORMS,
    arrays_of,
    assert_same,
    cached_calls_only,
    call_of,
    call_uncached,
    change,
    elsewhere,
    empty_call_cache,
    fields,
    host,
    kinds,
    names,
    raises,
    to,
)
from tests.support.described import clear_all
from tests.support.gpu_arrays import OnNumpy
from tests.support.internals import _scratch
from tests.support.kinds import kinds as kinds_of_arrays
from tests.support.operands import assert_same_bits, at, draw

# --- cached calls ---------------------------------------------------------------------------------


@kinds
@names
def test_a_call_made_again_on_other_arrays_is_not_planned(name, kind, monkeypatch):
    """These calls have no `out`; test_out.py has calls with `out`."""
    cache, call = empty_call_cache(monkeypatch), call_of(name, kind=kind)
    call.make()
    for argument in arrays_of(call.arrays):
        call.arrays[argument] = elsewhere(call.arrays[argument])
        expected = call_uncached(call.make)
        with cached_calls_only(), at(argument):
            assert_same(call.make(), expected)
    assert len(cache) == 1


# --- memory ---------------------------------------------------------------------------------------


@names
def test_no_cache_keeps_an_array_alive(name):
    call = call_of(name, None if name in GROUP_NORMS else (33, 44))
    arrays = [*arrays_of(call.arrays).values(), *call.out.values()]
    arrays += [*fields(call.run()).values(), *fields(call.make()).values()]
    seen = [weakref.ref(array) for array in arrays]
    del call, arrays
    gc.collect()
    assert not any(ref() is not None for ref in seen)


WRONG = ({"weight": [1.0]}, {"eps": None}, {"axis": 7}, {"dtype": [1]}, {"gate": np.ma.array(1.0)})


@pytest.mark.parametrize("kind", kinds_of_arrays())
def test_an_array_of_any_library_lives_no_longer_than_its_users(kind):
    """No error and no reference cycle keeps an array alive."""
    kind, seen = kind(), []

    def new(shape=(5, 8)):
        array = kind.put(draw(f"{len(seen)}", shape, "float32").copy())
        seen.append(weakref.ref(getattr(array, "array", array)))
        return array

    def results(*arrays):
        with suppress(AttributeError):  # only JAX's arrays have the method
            [array.block_until_ready() for array in arrays]
        seen.extend(map(weakref.ref, arrays))

    def calls():
        x, gate, weight = new(), new(), new((8,))
        saved = cunorm.rms_norm_forward(x, weight, gate=gate)
        grads = cunorm.rms_norm_backward(x, x, weight, gate=gate, rstd=saved.rstd)
        results(saved.y, saved.rstd, grads.dx, grads.dweight, cunorm.group_norm(new((2, 4, 8)), 2))
        if isinstance(x, np.ndarray) or "torch" in str(type(x)):
            results(cunorm.rms_norm(x[:, ::2], out=gate[:, :4].reshape(5, 4)))
        elsewhere = OnNumpy().put(draw("elsewhere", (8,), "float32").copy())
        if not kind.is_gpu:
            results(cunorm.rms_norm(x, elsewhere), cunorm.rms_norm(elsewhere, weight))
        for wrong in (*WRONG, {"weight": new((7,))}):
            with pytest.raises((TypeError, ValueError)):
                cunorm.rms_norm(x, **{"weight": weight, "gate": gate} | wrong)

    for _ in range(2):  # planned, and from the cache
        gc.disable()
        try:
            calls()
            if kind.is_gpu:
                clear_all()  # waits for the launch that reads a DLPack capsule's array
            assert [ref() is None for ref in seen] == [True] * len(seen)
        finally:
            gc.enable()


def test_a_call_within_a_call_does_not_touch_the_outer_calls_memory(monkeypatch):
    """A signal handler may make a call while the interrupted call uses scratch memory."""
    empty_call_cache(monkeypatch)
    x, other = draw("x", (1, 24, 24, 64), "float32"), draw("dy", (1, 48, 24, 64), "float32")
    expected, expected_other = (call_uncached(cunorm.group_norm, array, 4) for array in (x, other))
    take, done = _scratch.take, []

    def with_a_signal(size):
        piece = take(size)
        if not done:
            done.append(True)
            piece.array[...] = 7
            assert_same_bits(cunorm.group_norm(other, 4), expected_other)
            assert (piece.array == 7).all()
        return piece

    monkeypatch.setattr(_scratch, "take", with_a_signal)
    for scope in (nullcontext(), cached_calls_only()):
        done.clear()
        with scope:
            assert_same_bits(cunorm.group_norm(x, 4), expected)
        assert done


# --- on GPUs --------------------------------------------------------------------------------------

# The software GPU knows the device of all memory and, with late streams, runs work only when
# something waits for it. These tests therefore find a launch on a wrong stream or device.


def with_settings(**values):
    return softgpu.settings(**values) if softgpu.is_loaded() else nullcontext()


@pytest.mark.gpu
@names
def test_a_call_is_on_the_stream_that_is_current_at_the_call(name):
    import cupy

    call = call_of(name, kind="cupy")
    for _ in range(2):  # the first call fills the cache
        call.make()
        call.run()
    for order in ("late", "late_reversed"):
        with with_settings(streams=order):
            streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
            for turn, stream in enumerate((*streams, cupy.cuda.Stream.null, streams[0])):
                make = call.make if turn % 2 else call.run
                with stream, at(order, turn):
                    change(call.arrays, f"{turn}")
                    expected = {f: host(a) for f, a in fields(call_uncached(call.make)).items()}
                    change(call.arrays, f"{turn}")
                    with cached_calls_only():
                        found = fields(make())
                    for field, right in expected.items():
                        np.testing.assert_array_equal(host(found[field]), right, field)


@pytest.fixture
def two_gpus():
    import cupy

    with with_settings(devices=2):
        if cupy.cuda.runtime.getDeviceCount() < 2:
            pytest.skip("needs two GPUs")
        yield cupy.cuda


@pytest.mark.gpu
@names
def test_a_call_is_on_the_device_of_its_arrays_and_keeps_the_current_device(name, two_gpus):
    expected = fields(call_of(name).make())
    for device in (1, 0):
        with two_gpus.Device(device):
            call = call_of(name, kind="cupy")
        for current in (0, 1):
            with two_gpus.Device(current):
                for make in (partial(call_uncached, call.make), call.make, call.run, call.run):
                    found = fields(make())
                    assert two_gpus.runtime.getDevice() == current
                    assert {array.device.id for array in found.values()} == {device}
                    for field, right in expected.items():
                        np.testing.assert_allclose(host(found[field]), right, rtol=0, atol=1e-3)


@pytest.mark.gpu
def test_arrays_on_another_gpu_are_refused_after_calls_with_equal_specs(two_gpus):
    x, weight = (to("cupy", draw(*spec, "float32")) for spec in (("x", (4, 64)), ("weight", 64)))
    with two_gpus.Device(1):
        far, far_y = weight.copy(), x.copy()
        cunorm.rms_norm(far_y, far, out=far_y)
    cunorm.rms_norm(x, weight)
    for what, arrays, out in (("weight", (x, far), None), ("out", (x, weight), far_y)):
        with raises(ValueError, f"rms_norm: {what} is on cuda:1, expected cuda:0, the device of x"):
            cunorm.rms_norm(*arrays, out=out)
