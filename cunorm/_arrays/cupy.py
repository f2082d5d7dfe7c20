# SPDX-License-Identifier: MIT
"""CuPy arrays; and copies, streams and events for libraries without CUDA calls of their own."""

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from operator import attrgetter
from typing import Any

import numpy as np

from cunorm._arrays import adapter
from cunorm._arrays.adapter import ArrayAdapter, Signature, new_view
from cunorm._core import tensor
from cunorm._core.dtypes import dtype_of, numpy_dtype
from cunorm._core.tensor import ArrayView, Device, TensorSpec

_NOTHING = nullcontext()


def cupy() -> Any:
    """Return CuPy; import it if only arrays of JAX or DLPack were used so far."""
    return sys.modules.get("cupy") or import_module("cupy")


class CupyAdapter(ArrayAdapter):
    """CuPy arrays and their subclasses, ordered on CuPy's current stream."""

    pointer = staticmethod(attrgetter("data.ptr"))

    def accepts(self, function: str, argument: str, kind: type) -> bool:
        return issubclass(kind, sys.modules["cupy"].ndarray)

    def view(self, function: str, argument: str, array: Any) -> ArrayView:
        # CuPy's attributes give more dtypes than its DLPack.
        dtype = dtype_of(function, argument, array.dtype)
        strides = tensor.in_elements(array.strides, dtype.itemsize)
        data = array.data
        pointer: int = data.ptr
        if strides is None or pointer % dtype.itemsize:
            raise adapter.unaligned(f"{function}: {argument}", f"{argument}.copy()")
        spec = TensorSpec(array.shape, strides, dtype, Device("cuda", data.device_id))
        return ArrayView(pointer, spec, array, self, writable=True)

    def workspace_view(self, function: str, argument: str, array: Any) -> ArrayView:
        adapter.check_contiguous(function, argument, array.flags.c_contiguous, array.strides)
        spec = tensor.bytes_spec(array.nbytes, Device("cuda", array.data.device_id))
        return ArrayView(array.data.ptr, spec, array, self, writable=True)

    def signature(self, arrays: Sequence[Any], first_output: int) -> Signature | None:
        key_parts: list[object] = []
        pointers = []
        own = cupy().ndarray
        for array in arrays:
            if array is None:
                key_parts.append(None)
                pointers.append(0)
                continue
            if type(array) is not own:
                return None
            data = array.data
            pointer = data.ptr
            pointers.append(pointer)
            key_parts += (array.dtype, array.shape, array.strides, pointer & 15, data.device_id)
        return key_parts, pointers

    def contiguous_type(self, array: Any) -> Hashable:
        return (array.dtype, array.data.device_id) if array.flags.c_contiguous else None

    def allocator(self, spec: TensorSpec, *, has_model: bool) -> Callable[[Any], Any]:
        (shape, axes), dtype = adapter.in_memory_order(spec), numpy_dtype(spec.dtype)
        empty, is_float8 = cupy().empty, dtype.name.startswith("float8")

        def allocate(model: object) -> Any:
            with self.device_scope(spec.device):
                # CuPy makes no arrays of 8-bit floats, but its arrays can be viewed so.
                return empty(shape, np.uint8).view(dtype) if is_float8 else empty(shape, dtype)

        return allocate if axes is None else lambda model: allocate(model).transpose(axes)

    def contiguous(self, view: ArrayView) -> ArrayView:
        """Copy an array in CUDA memory into C order, on the current stream.

        bfloat16 is copied as float16, which moves the same bits and needs no ml_dtypes.
        """
        module, spec = cupy(), view.spec
        itemsize, device = spec.dtype.itemsize, spec.device
        strides = tuple(stride * itemsize for stride in spec.strides)
        with self.device_scope(device):
            # CuPy wants a size of the memory, but the strides say what is read.
            memory = module.cuda.UnownedMemory(view.pointer, itemsize, view.owner, device.index)
            first = module.cuda.MemoryPointer(memory, 0)
            array = module.ndarray(spec.shape, spec.dtype.host, first, strides).copy(order="C")
        return new_view(array.data.ptr, spec.dense(), array, view.adapter)

    def stream(self, device: Device) -> int:
        return int(cupy().cuda.get_current_stream(device.index).ptr)

    def device_scope(self, device: Device) -> AbstractContextManager[object]:
        cuda = cupy().cuda
        if cuda.runtime.getDevice() == device.index:
            return _NOTHING
        return cuda.Device(device.index)  # type: ignore[no-any-return]  # CuPy has no types


CUPY = CupyAdapter()


@contextmanager
def stream_after_all(
    adapter: ArrayAdapter, views: Iterable[ArrayView], device: Device
) -> Iterator[int]:
    """Yield the stream to launch on, `adapter`'s current one, for arrays of several libraries.

    That stream first waits for the other libraries' streams, which may still compute arrays. In the
    end the other streams wait for it, because the libraries may then reuse the memory.
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
