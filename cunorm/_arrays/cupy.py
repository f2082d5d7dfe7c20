# SPDX-License-Identifier: MIT
"""CuPy arrays, and what CuPy does for the frameworks that have no CUDA calls of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

from cunorm._arrays.adapter import (
    ArrayAdapter,
    Signature,
    check_contiguous,
    empty_dense,
    new_view,
    unaligned,
)
from cunorm._core.dtypes import dtype_of, numpy_dtype
from cunorm._core.tensor import (
    ArrayView,
    Device,
    TensorSpec,
    bytes_spec,
    contiguous,
    in_elements,
    memory_order,
)

_NOTHING = nullcontext()


def cupy() -> Any:
    """Return CuPy. It is imported here for JAX and DLPack arrays in CUDA memory."""
    return sys.modules.get("cupy") or import_module("cupy")


class CupyAdapter(ArrayAdapter):
    """CuPy: CUDA memory, ordered on its current stream."""

    name = "cupy"
    has_signature = True

    def accepts(self, function: str, argument: str, kind: type) -> bool:
        """Take cupy.ndarray and its subclasses, for their memory alone."""
        return issubclass(kind, sys.modules["cupy"].ndarray)

    def view(self, function: str, argument: str, array: Any) -> ArrayView:
        """Return the view of an array by its attributes: CuPy's DLPack knows fewer dtypes."""
        dtype = dtype_of(function, argument, array.dtype)
        strides = in_elements(array.strides, dtype.itemsize)
        data = array.data
        pointer: int = data.ptr
        if strides is None or pointer % dtype.itemsize:
            raise unaligned(f"{function}: {argument}", f"{argument}.copy()")
        spec = TensorSpec(array.shape, strides, dtype, Device("cuda", data.device_id))
        return ArrayView(pointer, spec, array, self, writable=True)

    def memory(self, function: str, argument: str, array: Any) -> ArrayView:
        """Return the view of an array of any dtype."""
        check_contiguous(function, argument, array.flags.c_contiguous, array.strides)
        spec = bytes_spec(array.nbytes, Device("cuda", array.data.device_id))
        return ArrayView(array.data.ptr, spec, array, self, writable=True)

    def allocate(self, spec: TensorSpec) -> ArrayView:
        """Make an array from CuPy's pool."""
        with self.device_scope(spec.device):
            array = empty_dense(spec, partial(cupy().empty, dtype=numpy_dtype(spec.dtype)))
        return new_view(array.data.ptr, spec, array, self)

    def signature(self, arrays: Sequence[Any], first_output: int) -> Signature | None:
        """Return dtype, shape, strides, alignment and device of each array."""
        facts: list[Any] = []
        pointers = []
        own = cupy().ndarray
        for array in arrays:
            if array is None:
                facts.append(None)
                pointers.append(0)
                continue
            if type(array) is not own:
                return None
            data = array.data
            pointer = data.ptr
            pointers.append(pointer)
            facts += (array.dtype, array.shape, array.strides, pointer & 15, data.device_id)
        return facts, pointers

    def allocator(self, spec: TensorSpec, *, has_model: bool) -> Callable[[Any], Any]:
        """Return a function that makes no view; a spec says more than a model's strides."""
        if memory_order(spec) is not None:
            return super().allocator(spec, has_model=has_model)
        empty, shape, dtype = cupy().empty, spec.shape, numpy_dtype(spec.dtype)

        def allocate(model: Any) -> Any:
            with self.device_scope(spec.device):
                return empty(shape, dtype)

        return allocate

    @property
    def pointer(self) -> Callable[[Any], int]:
        """Return a function that returns the address of an array's first element."""
        return _pointer

    def contiguous(self, view: ArrayView) -> ArrayView:
        """Copy into C order, on the current stream."""
        return copied_on_device(view)

    def stream(self, device: Device) -> int:
        """Return CuPy's current stream on `device`."""
        pointer: int = cupy().cuda.get_current_stream(device.index).ptr
        return pointer

    def device_scope(self, device: Device) -> AbstractContextManager[object]:
        """Make `device` current, where it is not."""
        cuda = cupy().cuda
        if cuda.runtime.getDevice() == device.index:
            return _NOTHING
        scope: AbstractContextManager[object] = cuda.Device(device.index)
        return scope


def _pointer(array: Any) -> int:
    pointer: int = array.data.ptr
    return pointer


CUPY = CupyAdapter()


def copied_on_device(view: ArrayView) -> ArrayView:
    """Return a copy in C order of an array in CUDA memory, which stays one of its library.

    bfloat16 is copied as float16, which moves the same bits and needs no ml_dtypes.
    """
    module, spec = cupy(), view.spec
    itemsize, device = spec.dtype.itemsize, spec.device
    with CUPY.device_scope(device):
        # CuPy wants a size and does not use it: the array's own strides say what is read.
        memory = module.cuda.UnownedMemory(view.pointer, itemsize, view.owner, device.index)
        array = module.ndarray(
            spec.shape,
            f"=f{itemsize}",
            module.cuda.MemoryPointer(memory, 0),
            tuple(stride * itemsize for stride in spec.strides),
        ).copy(order="C")
    copy = contiguous(spec.shape, spec.dtype, device)
    return new_view(array.data.ptr, copy, array, view.adapter)
