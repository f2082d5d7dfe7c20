# SPDX-License-Identifier: MIT
"""One launch over arrays of several libraries, each with a current CUDA stream of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from cunorm._arrays.adapter import ArrayAdapter
from cunorm._arrays.cupy import CUPY, cupy
from cunorm._core.tensor import ArrayView, Device


@contextmanager
def joined(adapter: ArrayAdapter, views: Iterable[ArrayView], device: Device) -> Iterator[int]:
    """Yield the stream to launch on, which is `adapter`'s current one.

    It first waits for the other libraries' streams, on which arrays may still be computed; they
    wait for it after, as their allocators may then reuse the memory. If all streams are the same,
    as by default, nothing is done.
    """
    stream = adapter.stream(device)
    adapters: set[ArrayAdapter] = {view.adapter for view in views} - {adapter}
    others = {other.stream(device) for other in adapters} - {stream}
    for other in others:
        _wait(stream, other, device)
    yield stream
    for other in others:
        _wait(other, stream, device)


def _wait(waiting: int, passed: int, device: Device) -> None:
    """Make one stream wait for all work on another so far."""
    cuda = cupy().cuda
    with CUPY.device_scope(device):
        event = cuda.Event(disable_timing=True)
        cuda.runtime.eventRecord(event.ptr, passed)
        cuda.runtime.streamWaitEvent(waiting, event.ptr)
