# SPDX-License-Identifier: MIT
"""What is remembered of calls: enough to plan none twice, no array, nothing that is another's.

That what is remembered gives each call what is its own is shown in test_repeated_calls.py.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import cunorm
from cunorm import NormForward
from tests import softgpu
from tests.support.calls import (
    GROUP_NORMS,
    anew,
    arrays_of,
    assert_same,
    call_of,
    change,
    elsewhere,
    fields,
    host,
    kinds,
    names,
    nothing_known,
    planning_forbidden,
    raises,
    to,
)
from tests.support.internals import _scratch
from tests.support.operands import assert_same_bits, at, draw


@pytest.fixture
def known(monkeypatch):
    return nothing_known(monkeypatch)


# --- what is not planned again --------------------------------------------------------------------


@kinds
@names
def test_a_call_made_again_on_other_arrays_is_not_planned(name, kind, known):
    """With memory for its results it is, which may overlap; on the same, see test_out.py."""
    several = [(2, 4900, 8)] if name in GROUP_NORMS and kind == "numpy" else []  # launches
    for number, shape in enumerate((None, *several)):
        call = call_of(name, shape, kind)
        call.make()
        for argument in arrays_of(call.arrays):
            call.arrays[argument] = elsewhere(call.arrays[argument])
            expected = anew(call.make)
            with planning_forbidden(), at(shape, argument):
                assert_same(call.make(), expected)
        assert len(known) == 1 + number


def test_a_result_of_the_form_of_one_that_is_given_is_another_array():
    x, y = draw("x", (5, 8), "float16"), np.empty((5, 8), np.float32)
    told = {"residual_dtype": "float32", "out": NormForward(y=y)}
    made = [cunorm.rms_norm_forward(x, **told).residual for _ in range(3)]
    assert len({id(array) for array in (*made, y)}) == 4
    for residual in made:
        assert_same_bits(residual, x.astype(np.float32))


# --- what is not kept -----------------------------------------------------------------------------


def test_calls_that_are_too_many_are_forgotten(known):
    x, y = draw("x", (5, 8), "float32"), np.empty((5, 8), np.float32)
    for number in range(1, 1500):
        cunorm.l2_norm(x, eps=number, out=y)
        assert 1 <= len(known) <= 1024
    with planning_forbidden():
        cunorm.l2_norm(x, eps=1499, out=y)


@names
def test_nothing_that_is_remembered_keeps_an_array(name):
    call = call_of(name, None if name in GROUP_NORMS else (33, 44))
    arrays = [*arrays_of(call.arrays).values(), *call.out.values()]
    arrays += [*fields(call.run()).values(), *fields(call.make()).values()]
    seen = [weakref.ref(array) for array in arrays]
    del call, arrays
    gc.collect()
    assert not any(ref() is not None for ref in seen)


@pytest.mark.parametrize("is_known", [False, True], ids=["planned", "again"])
def test_a_call_within_a_call_does_not_touch_its_memory(monkeypatch, is_known):
    """A signal's handler may call while a call of its own thread has lent memory."""
    nothing_known(monkeypatch)
    x, other = draw("x", (1, 24, 24, 64), "float32"), draw("dy", (1, 48, 24, 64), "float32")
    expected, of_other = (anew(cunorm.group_norm, array, 4) for array in (x, other))
    call, lend, handled = partial(anew, cunorm.group_norm), _scratch.take, []
    if is_known:
        call = cunorm.group_norm
        call(x, 4)
        call(other, 4)

    def with_a_signal(size):
        piece = lend(size)
        if not handled:
            handled.append(True)
            piece.array[...] = 7
            assert_same_bits(call(other, 4), of_other)
            assert (piece.array == 7).all()
        return piece

    monkeypatch.setattr(_scratch, "take", with_a_signal)
    with planning_forbidden() if is_known else nullcontext():
        assert_same_bits(call(x, 4), expected)
    assert handled


# --- on GPUs --------------------------------------------------------------------------------------

# The software GPU does a stream's work late, when somebody waits for it, and knows whose memory is
# whose: so that a launch on another stream or device than the right one shows.


def with_settings(**values):
    return softgpu.settings(**values) if softgpu.is_loaded() else nullcontext()


@pytest.mark.gpu
@names
def test_a_call_is_on_the_stream_that_is_current_then(name):
    import cupy

    call = call_of(name, kind="cupy")
    for _ in range(2):  # what is met for the first time is not remembered
        call.make()
        call.run()
    for order in ("late", "late_reversed"):
        with with_settings(streams=order):
            streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
            for turn, stream in enumerate((*streams, cupy.cuda.Stream.null, streams[0])):
                made = call.make if turn % 2 else call.run
                with stream, at(order, turn):
                    change(call.arrays, f"{turn}")
                    expected = {f: host(a) for f, a in fields(anew(call.make)).items()}
                    change(call.arrays, f"{turn}")
                    with planning_forbidden():
                        found = fields(made())
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
def test_a_call_is_on_the_device_of_its_arrays_and_leaves_the_callers(name, two_gpus):
    expected = fields(call_of(name).make())
    for device in (1, 0):
        with two_gpus.Device(device):
            call = call_of(name, kind="cupy")
        for current in (0, 1):
            with two_gpus.Device(current):
                for made in (partial(anew, call.make), call.make, call.run, call.run):
                    found = fields(made())
                    assert two_gpus.runtime.getDevice() == current
                    assert {array.device.id for array in found.values()} == {device}
                    for field, right in expected.items():  # a launch elsewhere would give NaNs
                        np.testing.assert_allclose(host(found[field]), right, rtol=0, atol=1e-3)


@pytest.mark.gpu
def test_arrays_on_another_gpu_are_refused_though_their_forms_were_met(two_gpus):
    x, weight = (to("cupy", draw(*form, "float32")) for form in (("x", (4, 64)), ("weight", 64)))
    with two_gpus.Device(1):
        far, far_y = weight.copy(), x.copy()
        cunorm.rms_norm(far_y, far, out=far_y)
    cunorm.rms_norm(x, weight)
    for what, arrays, out in (("weight", (x, far), None), ("out", (x, weight), far_y)):
        with raises(ValueError, f"rms_norm: {what} is on cuda:1, expected cuda:0, the device of x"):
            cunorm.rms_norm(*arrays, out=out)
