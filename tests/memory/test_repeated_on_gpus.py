# SPDX-License-Identifier: MIT
"""Calls that are made again on a GPU: on the stream and the device that are right then.

The software GPU does a stream's work late, when somebody waits for it, and knows whose memory is
whose: so that a launch on another stream or device than the right one shows.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import cunorm
from tests import softgpu
from tests.support.calls import (
    anew,
    call_of,
    change,
    fields,
    host,
    names,
    planning_forbidden,
    raises,
    to,
)
from tests.support.operands import at, draw

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


def with_settings(**values):
    return softgpu.settings(**values) if softgpu.is_loaded() else nullcontext()


@names
def test_a_call_is_on_the_stream_that_is_current_then(name):
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
    with with_settings(devices=2):
        if cupy.cuda.runtime.getDeviceCount() < 2:
            pytest.skip("needs two GPUs")
        yield


@names
def test_a_call_is_on_the_device_of_its_arrays_and_leaves_the_callers(name, two_gpus):
    expected = fields(call_of(name).make())
    for device in (1, 0):
        with cupy.cuda.Device(device):
            call = call_of(name, kind="cupy")
        for current in (0, 1):
            with cupy.cuda.Device(current):
                for made in (partial(anew, call.make), call.make, call.run, call.run):
                    found = fields(made())
                    assert cupy.cuda.runtime.getDevice() == current
                    assert {array.device.id for array in found.values()} == {device}
                    for field, right in expected.items():  # a launch elsewhere would give NaNs
                        np.testing.assert_allclose(host(found[field]), right, rtol=0, atol=1e-3)


def test_arrays_on_another_gpu_are_refused_though_their_forms_were_met(two_gpus):
    x, weight = (to("cupy", draw(*form, "float32")) for form in (("x", (4, 64)), ("weight", 64)))
    with cupy.cuda.Device(1):
        far, far_y = weight.copy(), x.copy()
        cunorm.rms_norm(far_y, far, out=far_y)
    cunorm.rms_norm(x, weight)
    for what, arrays, out in (("weight", (x, far), None), ("out", (x, weight), far_y)):
        with raises(ValueError, f"rms_norm: {what} is on cuda:1, expected cuda:0, the device of x"):
            cunorm.rms_norm(*arrays, out=out)
