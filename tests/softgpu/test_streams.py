# SPDX-License-Identifier: MIT
"""Late streams: work runs only when the host waits for it, and freed memory is unmapped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests import softgpu
from tests.softgpu.launching import cupy, launch, raises

ADD = "int* x, int n) { x[threadIdx.x] += n; }"
COPY = "int* y, const int* x) { y[threadIdx.x] = x[threadIdx.x]; }"


@pytest.fixture(params=["late", "late_reversed"], autouse=True)
def streams(request) -> Iterator[str]:
    with softgpu.settings(streams=request.param):
        yield request.param


def free_stream():
    return cupy.cuda.Stream(non_blocking=True)


def filled(value: int):
    x = cupy.full(32, value, "i")
    cupy.cuda.Device().synchronize()
    return x


def add(x, n: int, stream=None) -> None:
    launch(ADD, x, np.int32(n), stream=stream)


def read(x, stream) -> int:
    """Copy a number to the host on a stream, and wait for that stream only."""
    with stream:
        (value,) = set(x.get().tolist())
    return value


def test_work_is_done_when_its_stream_is_waited_for_and_not_before():
    x, one, other = filled(1), free_stream(), free_stream()
    add(x, 1, one)
    assert not one.done
    assert read(x, other) == 1
    one.synchronize()
    assert one.done
    assert read(x, other) == 2


def test_a_stream_that_waits_for_an_event_runs_after_it():
    x, y = filled(1), filled(0)
    for is_right in (False, True):
        one, other = free_stream(), free_stream()
        add(x, 1, one)
        event = one.record()
        add(x, 10, one)
        assert not event.done
        if is_right:
            other.wait_event(event)
        launch(COPY, y, x, stream=other)
        assert read(y, other) == (13 if is_right else 1)
        assert event.done == is_right
        cupy.cuda.Device().synchronize()


def test_either_of_two_independent_streams_may_run_first(streams):
    x, one, other = filled(0), free_stream(), free_stream()
    for n, stream in ((1, one), (2, other)):
        with stream:
            x.fill(n)
    cupy.cuda.Device().synchronize()
    assert read(x, one) == {"late": 2, "late_reversed": 1}[streams]


@pytest.mark.parametrize("waits", [True, False])
def test_the_default_stream_and_blocking_streams_wait_for_each_other(waits):
    x, null = filled(1), cupy.cuda.Stream.null
    one, other = (cupy.cuda.Stream(non_blocking=not waits) for _ in range(2))
    add(x, 1, one)
    assert read(x, null) == (2 if waits else 1)
    add(x, 10, null)
    assert read(x, other) == (12 if waits else 1)
    cupy.cuda.Device().synchronize()  # before x is freed


def test_parameters_and_arrays_of_the_host_are_read_at_once():
    stream, n, given = free_stream(), np.full(1, 5, "i"), np.zeros(32, "i")
    with stream:
        x = cupy.asarray(given)
    given[:] = 9
    launch(ADD, x, n, stream=stream)
    n[0] = 7
    assert read(x, stream) == 5


def test_memory_is_freed_in_the_order_of_its_own_stream():
    stream, other = free_stream(), free_stream()
    with stream:
        x = cupy.ones(32, "i")
    add(x, 1, stream)
    del x
    stream.synchronize()
    with stream:
        x = cupy.ones(32, "i")
    other.wait_event(stream.record())
    add(x, 1, other)
    del x  # work on `other` still needs x
    stream.synchronize()
    with raises("ILLEGAL_ADDRESS.*outside of any allocation"):
        other.synchronize()


def test_the_waiting_call_raises_the_error_and_later_work_is_dropped():
    x, y, stream = filled(1), filled(1), free_stream()
    launch("int* x) { x[threadIdx.x] = 2; }", x, block=33, stream=stream)
    add(y, 1, stream)
    with raises(r"(?s)ILLEGAL_ADDRESS: cuStreamSynchronize.*kernel k.*thread 32 of"):
        stream.synchronize()
    assert read(y, stream) == 1
    with raises("outside of any allocation"), softgpu.settings():
        launch("int* x) { x[threadIdx.x] = 2; }", x, block=33)


def test_a_graph_repeats_the_captured_work():
    x, y, stream, other = filled(1), filled(0), free_stream(), free_stream()
    with stream:
        stream.begin_capture()
        add(x, 1, stream)
        other.wait_event(stream.record())
        launch(COPY, y, x, stream=other)
        stream.wait_event(other.record())
        graph = stream.end_capture()
    assert read(x, stream) == 1
    for turn in (2, 3):
        graph.launch(stream)
        assert read(y, stream) == turn


def test_a_capture_refuses_calls_that_a_gpu_refuses():
    stream, other = free_stream(), cupy.cuda.Stream()
    x = filled(1)
    with stream:
        stream.begin_capture()
        for wrong in (stream.synchronize, cupy.cuda.Device().synchronize, x.get):
            with raises("STREAM_CAPTURE_UNSUPPORTED"):
                wrong()
        with raises("STREAM_CAPTURE_ISOLATION"):
            stream.wait_event(other.record())
        with raises("STREAM_CAPTURE_UNSUPPORTED: memory"):
            cupy.empty(12345)
        other.wait_event(stream.record())
        with raises("STREAM_CAPTURE_IMPLICIT"):
            add(x, 1, cupy.cuda.Stream.null)
        add(x, 1, other)
        with raises("STREAM_CAPTURE_UNJOINED"):
            stream.end_capture()
