# SPDX-License-Identifier: MIT
"""CuPy arrays, and what CuPy does for the frameworks that have no CUDA calls of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

from cunorm._arrays._operand import (
    WIDEST_ACCESS,
    Device,
    Form,
    Framework,
    Operand,
    check_contiguous,
    cuda_device,
    empty_dense,
    fresh,
    in_c_order,
    in_elements,
    known_form,
    memory_axes,
    memory_form,
    unaligned,
)
from cunorm._dtypes import dtype_of, numpy_dtype

_NOTHING = nullcontext()


def cupy() -> Any:
    """Return CuPy. It is imported here for JAX and DLPack arrays in CUDA memory."""
    return sys.modules.get("cupy") or import_module("cupy")


class Cupy(Framework):
    """CuPy: CUDA memory, ordered on its current stream."""

    name = "cupy"

    def accepts(self, function: str, argument: str, kind: type) -> bool:
        """Take cupy.ndarray and its subclasses, for their memory alone."""
        return issubclass(kind, sys.modules["cupy"].ndarray)

    def describe(self, function: str, argument: str, array: Any) -> Operand:
        """Describe an array from its attributes: its DLPack road knows fewer dtypes."""
        dtype = dtype_of(function, argument, array.dtype)
        strides = in_elements(array.strides, dtype.itemsize)
        data = array.data
        pointer: int = data.ptr
        if strides is None or pointer % dtype.itemsize:
            raise unaligned(f"{function}: {argument}", f"{argument}.copy()")
        form = known_form(array.shape, strides, dtype, cuda_device(data.device_id))
        return Operand(pointer, form, array, self, True)

    def memory(self, function: str, argument: str, array: Any) -> Operand:
        """Describe an array of any dtype."""
        check_contiguous(function, argument, array.flags.c_contiguous, array.strides)
        form = memory_form(array.nbytes, cuda_device(array.data.device_id))
        return Operand(array.data.ptr, form, array, self, True)

    def allocate(self, form: Form) -> Operand:
        """Make an array from CuPy's pool."""
        with self.device_scope(form.device):
            array = empty_dense(form, partial(cupy().empty, dtype=numpy_dtype(form.dtype)))
        return fresh(array.data.ptr, form, array, self)

    def recognise(self, arrays: Sequence[Any]) -> tuple[list[Any], list[int]] | None:
        """Recognise arrays of CuPy's own type."""
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
            facts += (array.dtype, array.shape, array.strides, pointer % WIDEST_ACCESS)
            facts.append(data.device_id)
        return facts, pointers

    def maker(self, form: Form, has_model: bool) -> Callable[[Any], Any]:
        """Allocate without making an operand of it; the form says more than a model's strides."""
        if memory_axes(form) is not None:
            return super().maker(form, has_model)
        empty, shape, dtype = cupy().empty, form.shape, numpy_dtype(form.dtype)

        def make(model: Any) -> Any:
            with self.device_scope(form.device):
                return empty(shape, dtype)

        return make

    @property
    def pointer(self) -> Callable[[Any], int]:
        """Return what returns the address of an array's first element."""
        return _pointer

    def contiguous(self, operand: Operand) -> Operand:
        """Copy into C order, on the current stream."""
        return copied_on_device(operand)

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


CUPY = Cupy()


def copied_on_device(operand: Operand) -> Operand:
    """Return a C-contiguous copy of a CUDA operand, which stays one of its framework.

    bfloat16 travels as float16, which moves the same bits and needs no ml_dtypes.
    """
    module, itemsize = cupy(), operand.dtype.itemsize
    with CUPY.device_scope(operand.device):
        # The size is asked for and not used: the view's own strides say what is read.
        memory = module.cuda.UnownedMemory(
            operand.pointer, itemsize, operand.owner, operand.device.index
        )
        view = module.ndarray(
            operand.shape,
            f"=f{itemsize}",
            module.cuda.MemoryPointer(memory, 0),
            tuple(stride * itemsize for stride in operand.strides),
        )
        array = view.copy(order="C")
    return fresh(array.data.ptr, in_c_order(operand.form), array, operand.framework)
