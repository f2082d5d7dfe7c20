# SPDX-License-Identifier: MIT
"""All that a call launches on a GPU, with arguments that are made once.

A call that is made again differs in where its arrays lie, and in the stream that is current then.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

from cunorm import _cuda
from cunorm._again import Ran
from cunorm._arguments import Kernels, Pointers, template
from cunorm._arrays import Device, Form, Framework, Operand, joined
from cunorm._builds import Launch

Start = Callable[[Pointers, int], None]  # starts all launches of a call on a stream
Launches = Sequence[tuple[Launch, bytes]]  # each with its arguments


class Call(Protocol):
    """A call whose arrays are on a GPU; the last of its pointers is that of its memory, if any."""

    @property
    def x(self) -> Operand:
        """Return the array whose framework and device are the call's."""

    def operands(self) -> list[Operand]:
        """Return every array of the call."""

    def pointers(self) -> tuple[int, ...]:
        """Return where the arrays lie, 0 for none."""


def starter(launches: Callable[[Pointers], Launches], arrays: int, device: Device) -> Start:
    """Return what starts launches, given where arrays lie; `launches` is asked here and not again.

    The arguments are made anew in each call: threads may be in the midst of the same one.
    """
    planned = launches([0] * arrays)
    plain, places = template(lambda at: b"".join(given for _, given in launches(at)), arrays)
    ends = accumulate((len(given) for _, given in planned), initial=0)
    parts = [
        (launch, slice(*part)) for (launch, _), part in zip(planned, pairwise(ends), strict=True)
    ]
    words = array("Q", plain)

    def start(pointers: Pointers, stream: int) -> None:
        filled = words[:]
        for word, place in places:
            filled[word] += pointers[place]
        arguments = filled.tobytes()
        for launch, part in parts:
            _cuda.launch(launch, arguments[part], device, stream)

    return start


def run(call: Call, start: Start, memory: Form | None) -> Ran:
    """Start a call that was not made before, after all that its arrays may wait for.

    `memory` is what its kernels need beside its arrays, where the call does not give it. What is
    returned is for arrays of one framework, whose current stream orders all of them.
    """
    x, pointers = call.x, call.pointers()
    framework, device = x.framework, x.device
    if memory is not None:
        start = _lent(start, framework, memory)
    with framework.device_scope(device), joined(framework, call.operands(), device) as stream:
        start(pointers, stream)
    return Ran(pointers, _on_current_stream(start, framework, device))


def _lent(start: Start, framework: Framework, memory: Form) -> Start:
    """Lend launches memory whose address they take last, where that is 0.

    The framework's allocator may lend it again at once: to what the same stream does after them.
    """

    def run(pointers: Pointers, stream: int) -> None:
        if pointers[-1]:
            start(pointers, stream)
            return
        lent = framework.allocate(memory)
        start([*pointers[:-1], lent.pointer], stream)

    return run


def _on_current_stream(start: Start, framework: Framework, device: Device) -> Kernels:
    """Return what enters the device where it is not current, which takes some time in PyTorch."""

    def kernels(pointers: Pointers) -> None:
        if _cuda.current_device() == device.index:
            start(pointers, framework.stream(device))
        else:
            with framework.device_scope(device):
                start(pointers, framework.stream(device))

    return kernels
