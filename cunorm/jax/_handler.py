# SPDX-License-Identifier: MIT
"""What XLA calls to run the kernels: on a CPU, or on the stream that it gives of a GPU.

XLA's own threads call it; ctypes takes the GIL for it, and lets go of it while a kernel runs. It
allocates nothing on a GPU: results and workspace are XLA's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

from cunorm import _backend
from cunorm._arrays import CPU, NUMPY, Device, Form, Framework, Operand
from cunorm._arrays._cupy import CUPY, cupy
from cunorm._arrays._operand import cuda_device, memory_form
from cunorm.jax import _frame
from cunorm.jax._kinds import Settled, settle
from cunorm.jax._op import Op

_EXECUTE = 3  # the stage of a frame in which kernels run
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_checked: set[int] = set()  # where an api lies whose version is known
_calling: set[Any] = set()  # what was called


def handler(run: Callable[[_frame.Frame], None]) -> Any:
    """Return a C function for XLA; it must be kept for as long as the process lives."""

    def handle(address: int) -> int | None:
        frame = _frame.Frame.from_address(address)
        try:
            _calling.add(run)
            if frame.extension and _frame.answered(frame):
                return None
            if frame.api not in _checked:
                _frame.check(frame)
                _checked.add(frame.api)
            if frame.stage == _EXECUTE:  # in others there are no values
                run(frame)
        except BaseException as error:  # it must not go on into C
            return _frame.error(frame, f"cunorm: {type(error).__name__}: {error}")
        return None

    return _CALLBACK(handle)


def was_called() -> bool:
    """Whether XLA called any of the handlers, which it does first when it compiles."""
    return bool(_calling)


def run_on_cpu(frame: _frame.Frame) -> None:
    """Run a call whose arrays lie in the CPU's memory."""
    op, settled = _settled(_frame.attribute(frame.attributes), CPU)
    pointers = _pointers(settled, frame, len(settled.made))
    if _backend.has_compiler():
        settled.kernels()(pointers)
    else:
        settled.run(settled.call(*_operands(op, settled, CPU, pointers, NUMPY)))


def run_on_cuda(frame: _frame.Frame) -> None:
    """Start a call on the stream that XLA gives."""
    text = _frame.attribute(frame.attributes)
    device = _device(_frame.addresses(frame.results)[0])
    op, settled = _settled(text, device)
    pointers = _pointers(settled, frame, len(settled.made) + (settled.workspace > 0))
    given = OnStream(_frame.stream_of(frame))
    settled.run(settled.call(*_operands(op, settled, device, pointers, given)))


class OnStream(Framework):
    """The arrays of a call of XLA's: they are ordered on its stream, and nothing is allocated."""

    name = "jax"

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def accepts(self, function: str, argument: str, kind: type) -> bool:
        """Take nothing: these operands are not described."""
        return False

    def describe(self, function: str, argument: str, array: Any) -> Operand:
        """Raise: these operands are not described."""
        raise NotImplementedError("operands of XLA's are not described")

    def allocate(self, form: Form) -> Operand:
        """Raise: XLA allocates."""
        raise NotImplementedError("memory is XLA's to allocate")

    def contiguous(self, operand: Operand) -> Operand:
        """Return it: XLA's arrays are in C order."""
        return operand

    def stream(self, device: Device) -> int:
        """Return XLA's stream."""
        return self._stream

    def device_scope(self, device: Device) -> AbstractContextManager[object]:
        """Make a CUDA device current."""
        return CUPY.device_scope(device)


def _device(pointer: int) -> Device:
    """Return the GPU whose memory lies there."""
    return cuda_device(cupy().cuda.runtime.pointerGetAttributes(pointer).device)


@lru_cache(maxsize=1024)
def _settled(text: bytes, device: Device) -> tuple[Op, Settled]:
    """Return what a text says."""
    op = Op.parse(text)
    return op, settle(op, device)


def _pointers(settled: Settled, frame: _frame.Frame, results: int) -> list[int]:
    """Return where all arrays lie, 0 for none."""
    taken, given = _frame.addresses(frame.arguments), _frame.addresses(frame.results)
    if (len(taken), len(given)) != (len(settled.places), results):
        raise RuntimeError(
            f"XLA gives {len(taken)} arguments and {len(given)} results, expected "
            f"{len(settled.places)} and {results}"
        )
    pointers = [0] * settled.arrays
    for place, pointer in zip(settled.places, taken, strict=True):
        pointers[place] = pointer
    for (place, _), pointer in zip(settled.made, given, strict=False):
        pointers[place] = pointer
    if len(given) > len(settled.made):
        pointers[-1] = given[-1]
    return pointers


def _operands(
    op: Op, settled: Settled, device: Device, pointers: Sequence[int], framework: Framework
) -> list[Operand | None]:
    """Return the operands of all arrays."""
    forms: list[Form | None] = [*op.forms(device)]
    forms += [None] * (settled.arrays - len(forms))
    for place, form in settled.made:
        forms[place] = form
    if pointers[-1] and forms[-1] is None:
        forms[-1] = memory_form(settled.workspace, device)
    return [
        None if form is None else Operand(pointer, form, None, framework, True)
        for form, pointer in zip(forms, pointers, strict=True)
    ]
