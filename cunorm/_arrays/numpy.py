# SPDX-License-Identifier: MIT
"""NumPy arrays, and NumPy views of any array in host memory."""

import ctypes
import sys
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from cunorm._arrays.adapter import (
    ArrayAdapter,
    Signature,
    check_contiguous,
    in_memory_order,
    new_view,
)
from cunorm._core import tensor
from cunorm._core.dtypes import dtype_of, numpy_dtype
from cunorm._core.tensor import CPU, ArrayView, HostArray, TensorSpec

_address_at = ctypes.c_void_p.from_address
# PyArrayObject has the data pointer as its first field after the object's head. The field cannot
# move, because NumPy's macros have compiled its offset into every extension.
_AFTER_HEAD = object.__basicsize__


def _pointer_by_object(array: HostArray) -> int:
    """Return the address of the first element, in a tenth of the time of `array.ctypes`."""
    return _address_at(id(array) + _AFTER_HEAD).value or 0


def _pointer_by_ctypes(array: HostArray) -> int:
    return int(array.ctypes.data)


data_pointer = _pointer_by_object if sys.implementation.name == "cpython" else _pointer_by_ctypes


class NumpyAdapter(ArrayAdapter):
    """NumPy arrays and their subclasses; bfloat16 is ``ml_dtypes.bfloat16``."""

    allocates_like = True
    pointer = staticmethod(data_pointer)

    def accepts(self, function: str, argument: str, kind: type) -> bool:
        if issubclass(kind, np.ma.MaskedArray):
            raise TypeError(
                f"{function}: {argument} is a masked array, whose mask would be ignored, expected "
                f"a plain one: pass {argument}.filled(value)"
            )
        return issubclass(kind, np.ndarray)

    def view(self, function: str, argument: str, array: HostArray) -> ArrayView:
        dtype = dtype_of(function, argument, array.dtype)
        strides = tensor.in_elements(array.strides, dtype.itemsize)
        pointer = data_pointer(array)
        if strides is None or pointer % dtype.itemsize:
            array = np.array(array, order="C")
            spec = tensor.contiguous(array.shape, dtype, CPU)
            return new_view(data_pointer(array), spec, array, self)
        spec = TensorSpec(array.shape, strides, dtype, CPU)
        return ArrayView(pointer, spec, array, self, array.flags.writeable)

    def workspace_view(self, function: str, argument: str, array: HostArray) -> ArrayView:
        flags, dtype = array.flags, array.dtype
        check_contiguous(function, argument, flags.c_contiguous, array.strides)
        if dtype.kind not in "biufcV" or dtype.hasobject:
            raise TypeError(f"{function}: {argument} has dtype {dtype}, expected a numeric dtype")
        spec = tensor.bytes_spec(array.nbytes, CPU)
        return ArrayView(data_pointer(array), spec, array, self, flags.writeable)

    def signature(self, arrays: Sequence[HostArray | None], first_output: int) -> Signature | None:
        key_parts: list[object] = []
        pointers = []
        for array in arrays:
            if array is None:
                key_parts.append(None)
                pointers.append(0)
                continue
            if type(array) is not np.ndarray and (
                not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray)
            ):
                return None
            if len(pointers) >= first_output and not array.flags.writeable:
                return None
            pointer = data_pointer(array)
            pointers.append(pointer)
            key_parts += (array.dtype, array.shape, array.strides, pointer & 7)
        return key_parts, pointers

    def contiguous_type(self, array: HostArray) -> Hashable:
        return array.dtype if array.flags.c_contiguous else None

    def allocator(self, spec: TensorSpec, *, has_model: bool) -> Callable[[HostArray], HostArray]:
        (shape, axes), dtype = in_memory_order(spec), numpy_dtype(spec.dtype)
        if axes is not None:
            return lambda model: np.empty(shape, dtype).transpose(axes)
        if has_model:
            return lambda model: np.empty(model.shape, dtype)
        return lambda model: np.empty(shape, dtype)

    def contiguous(self, view: ArrayView) -> ArrayView:
        array = np.array(tensor.host_array(view), order="C")
        return new_view(data_pointer(array), view.spec.dense(), array, view.adapter)


NUMPY = NumpyAdapter()


def numpy_view(view: ArrayView) -> HostArray:
    """Return any library's array in host memory as a NumPy array of the same dtype."""
    return tensor.host_array(view).view(numpy_dtype(view.spec.dtype))
