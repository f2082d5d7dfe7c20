# SPDX-License-Identifier: MIT
"""Calls that are made again on a GPU: on the stream and the device that are right then.

The software GPU does a stream's work late, when somebody waits for it, and knows whose memory is
whose: so that a launch on another stream or device than the right one shows.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest

import cunorm
from tests import softgpu
from tests.memory.test_repeated_calls import run
from tests.support.calls import (
    anew,
    arrays_of,
    call_of,
    elsewhere,
    fields,
    host,
    names,
    planning_forbidden,
    raises,
    to,
)
from tests.support.operands import assert_same_bits, at, draw

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


def with_settings(**values):
    return softgpu.settings(**values) if softgpu.is_loaded() else nullcontext()


def put_others(call, what):
    """Put other numbers into a call's arrays, on the current stream."""
    for key, array in arrays_of(call.arrays).items():
        array[...] = to("cupy", draw(f"{what} {key}", array.shape, "float32"))


def numbers_of(result):
    return {field: host(array) for field, array in fields(result).items()}


def assert_numbers(found, expected):
    assert found.keys() == expected.keys()
    for field, array in found.items():
        assert_same_bits(array, expected[field], field)


@pytest.mark.parametrize(
    "name", ["rms_norm", "layer_norm_backward", "group_norm", "group_norm_backward"]
)
def test_calls_made_again_are_as_calls_made_anew(name):
    """As of arrays on a CPU, in few steps; a misaligned access is an error here."""
    run([name], ["cupy"], 4, 15)


@names
def test_arrays_that_are_aligned_otherwise_make_another_call(name):
    call = call_of(name, kind="cupy")
    for _ in range(2):
        call.make()
    for key, array in arrays_of(call.arrays).items():
        call.arrays[key] = elsewhere(array, start=1)
        made = numbers_of(call.make())
        with at(key):
            assert_numbers(made, numbers_of(anew(call.make)))
        call.arrays[key] = array


@pytest.mark.parametrize("order", ["late", "late_reversed"])
@names
def test_a_call_is_on_the_stream_that_is_current_then(name, order):
    call = call_of(name, kind="cupy")
    for _ in range(2):  # what is met for the first time is not remembered
        call.make()
        call.run()
    with with_settings(streams=order):
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        for turn, stream in enumerate((*streams, cupy.cuda.Stream.null, streams[0])):
            with stream:
                for made in (call.run, call.make):
                    put_others(call, f"{made.__name__} {turn}")
                    expected = numbers_of(anew(call.make))
                    put_others(call, f"{made.__name__} {turn}")
                    with at(turn, made.__name__):
                        with planning_forbidden():
                            result = made()
                        assert_numbers(numbers_of(result), expected)


@pytest.fixture
def two_gpus():
    with with_settings(devices=2):
        if cupy.cuda.runtime.getDeviceCount() < 2:
            pytest.skip("needs two GPUs")
        yield


@names
def test_a_call_is_on_the_device_of_its_arrays_and_leaves_the_callers(name, two_gpus):
    expected = numbers_of(call_of(name).make())
    for device in (1, 0):
        with cupy.cuda.Device(device):
            call = call_of(name, kind="cupy")
        for current in (0, 1, 0):
            with cupy.cuda.Device(current):
                for made in (partial(anew, call.make), call.make, call.run, call.run):
                    result = made()
                    assert cupy.cuda.runtime.getDevice() == current
                    for array in fields(result).values():
                        assert array.device.id == device
                    with at(device, current):
                        assert_within(numbers_of(result), expected)


def assert_within(found, expected):
    """Compare numbers of a GPU with those of a CPU: here a launch elsewhere would give NaNs."""
    for field, array in expected.items():
        assert abs(found[field] - array).max() < 1e-3, field


def test_arrays_on_another_gpu_are_refused_though_their_forms_were_met(two_gpus):
    x, weight = (to("cupy", draw(*form, "float32")) for form in (("x", (4, 64)), ("weight", 64)))
    with cupy.cuda.Device(1):
        far, far_y = weight.copy(), x.copy()
        cunorm.rms_norm(far_y, far, out=far_y)
    cunorm.rms_norm(x, weight)
    cunorm.rms_norm(x, weight, out=x.copy())
    for what, arrays, out in (
        ("weight", (x, far), None),
        ("weight", (x, far), x.copy()),
        ("out", (x, weight), far_y),
    ):
        with raises(ValueError, f"rms_norm: {what} is on cuda:1, expected cuda:0, the device of x"):
            cunorm.rms_norm(*arrays, out=out)


def test_empty_arrays_that_have_no_address_are_recognised():
    x, weight = cupy.empty((0, 64), "float32"), to("cupy", draw("weight", 64, "float32"))
    for turn in range(3):
        with planning_forbidden() if turn > 1 else nullcontext():
            grads = cunorm.rms_norm_backward(x, x, weight, rstd=cupy.empty(0, "float32"))
        assert not host(grads.dweight).any()
        assert grads.dx.shape == (0, 64)
