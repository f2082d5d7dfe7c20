# SPDX-License-Identifier: MIT
"""One launch over arrays of several frameworks, each with a current CUDA stream of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from cunorm._arrays._cupy import CUPY, cupy
from cunorm._arrays._operand import Device, Framework, Operand


@contextmanager
def joined(framework: Framework, operands: Iterable[Operand], device: Device) -> Iterator[int]:
    """Yield the stream to launch on, which is `framework`'s current one.

    It first waits for the other frameworks' streams, where the operands may still be in the
    making; they wait for it after, as their allocators may reuse the memory from then on. Where
    all streams are the same one, as by default, nothing is done.
    """
    stream = framework.stream(device)
    frameworks = {operand.framework for operand in operands} - {framework}
    others = {other.stream(device) for other in frameworks} - {stream}
    for other in others:
        _wait(stream, other, device)
    yield stream
    for other in others:
        _wait(other, stream, device)


def _wait(waiting: int, passed: int, device: Device) -> None:
    """Make one stream wait for what another has been given so far."""
    cuda = cupy().cuda
    with CUPY.device_scope(device):
        event = cuda.Event(disable_timing=True)
        cuda.runtime.eventRecord(event.ptr, passed)
        cuda.runtime.streamWaitEvent(waiting, event.ptr)
