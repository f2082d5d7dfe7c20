# SPDX-License-Identifier: MIT
"""NumPy arrays, and NumPy views of any array in host memory."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from cunorm._arrays.adapter import (
    ArrayAdapter,
    Signature,
    check_contiguous,
    empty_dense,
    new_view,
)
from cunorm._core.dtypes import BFLOAT16, dtype_of, numpy_dtype
from cunorm._core.tensor import (
    CPU,
    ArrayView,
    TensorSpec,
    bytes_spec,
    contiguous,
    in_elements,
    memory_order,
)


class _Interface(ctypes.Structure):
    """PyArrayInterface, what ``__array_struct__`` points to (NumPy's array interface protocol)."""

    _fields_ = (
        ("two", ctypes.c_int),
        ("nd", ctypes.c_int),
        ("typekind", ctypes.c_char),
        ("itemsize", ctypes.c_int),
        ("flags", ctypes.c_int),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("descr", ctypes.c_void_p),
    )


_DATA = _Interface.data.offset
_struct_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_address_at = ctypes.c_void_p.from_address


def _pointer_by_interface(array: Any) -> int:
    """Return the address of an array's first element (0.6 µs; ``array.ctypes.data``: 1-5)."""
    capsule = array.__array_struct__
    return _address_at(_struct_of(capsule, None) + _DATA).value or 0


# The data pointer of PyArrayObject is its first field after the object's head: NumPy's macros for
# C put that into every extension, so it cannot move.
_AFTER_HEAD = object.__basicsize__


def _pointer_by_object(array: Any) -> int:
    """Return the address of an array's first element (0.1 µs), where an object's is its id."""
    return _address_at(id(array) + _AFTER_HEAD).value or 0


data_pointer = _pointer_by_object if sys.implementation.name == "cpython" else _pointer_by_interface


class NumpyAdapter(ArrayAdapter):
    """NumPy: host memory only, bfloat16 as ``ml_dtypes.bfloat16``."""

    name = "numpy"
    has_signature = True

    def accepts(self, function: str, argument: str, kind: type) -> bool:
        """Take ndarray and its subclasses, for their memory alone; masks are not memory."""
        if issubclass(kind, np.ma.MaskedArray):
            raise TypeError(
                f"{function}: {argument} is a masked array, whose mask would be ignored, expected "
                f"a plain one: pass {argument}.filled(value)"
            )
        return issubclass(kind, np.ndarray)

    def view(self, function: str, argument: str, array: Any) -> ArrayView:
        """Return the view of an array; one whose elements are not aligned is copied."""
        dtype = dtype_of(function, argument, array.dtype)
        strides = in_elements(array.strides, dtype.itemsize)
        pointer = data_pointer(array)
        if strides is None or pointer % dtype.itemsize:
            array = np.array(array, order="C")
            spec = contiguous(array.shape, dtype, CPU)
            return ArrayView(data_pointer(array), spec, array, self, writable=True)
        spec = TensorSpec(array.shape, strides, dtype, CPU)
        return ArrayView(pointer, spec, array, self, array.flags.writeable)

    def memory(self, function: str, argument: str, array: Any) -> ArrayView:
        """Return the view of an array of any dtype whose elements are their bytes."""
        flags, dtype = array.flags, array.dtype
        check_contiguous(function, argument, flags.c_contiguous, array.strides)
        if dtype.kind not in "biufcV" or dtype.hasobject:
            raise TypeError(f"{function}: {argument} has dtype {dtype}, expected one of numbers")
        spec = bytes_spec(array.nbytes, CPU)
        return ArrayView(data_pointer(array), spec, array, self, flags.writeable)

    def allocate(self, spec: TensorSpec) -> ArrayView:
        """Make an array of the right dtype."""
        array = empty_dense(spec, partial(np.empty, dtype=numpy_dtype(spec.dtype)))
        return new_view(data_pointer(array), spec, array, self)

    def signature(self, arrays: Sequence[Any], first_output: int) -> Signature | None:
        """Return dtype, shape, strides and alignment of each array; outputs must be writable."""
        facts: list[Any] = []
        pointers = []
        for array in arrays:
            if array is None:
                facts.append(None)
                pointers.append(0)
                continue
            if type(array) is not np.ndarray and not _is_plain(array):
                return None
            pointer = data_pointer(array)
            fact = (array.dtype, array.shape, array.strides, pointer & 7)
            if len(pointers) >= first_output and not array.flags.writeable:
                return None
            facts.append(fact)
            pointers.append(pointer)
        return facts, pointers

    def allocator(self, spec: TensorSpec, *, has_model: bool) -> Callable[[Any], Any]:
        """Return np.empty_like or np.empty, with a dtype without a model's metadata."""
        if memory_order(spec) is not None:
            return super().allocator(spec, has_model=has_model)
        shape, dtype = spec.shape, numpy_dtype(spec.dtype)
        if has_model:  # NumPy keeps the strides of axes of one element, too
            return partial(np.empty_like, dtype=dtype, subok=False)
        return lambda model: np.empty(shape, dtype)

    @property
    def pointer(self) -> Callable[[Any], int]:
        """Return a function that returns the address of an array's first element."""
        return data_pointer

    def contiguous(self, view: ArrayView) -> ArrayView:
        """Copy into C order."""
        return copied_on_host(view)


def _is_plain(array: Any) -> bool:
    """Whether an object is an array without a mask."""
    return isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray)


NUMPY = NumpyAdapter()


class _Memory:
    """Lends an array's memory to NumPy, and keeps its owner alive for as long as that lasts."""

    def __init__(self, view: ArrayView) -> None:
        spec = view.spec
        self.owner = view.owner
        self.__array_interface__ = {
            "version": 3,
            "shape": spec.shape,
            "typestr": f"=f{spec.dtype.itemsize}",
            "strides": tuple(stride * spec.dtype.itemsize for stride in spec.strides),
            "data": (view.pointer, not view.writable),
        }


def raw_view(view: ArrayView) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array in host memory as NumPy's, with bfloat16 as float16.

    That is enough to copy bits, and needs no ml_dtypes.
    """
    if math.prod(view.spec.shape) == 0:  # its address may be null, which NumPy would refuse
        return np.empty(view.spec.shape, f"=f{view.spec.dtype.itemsize}")
    return np.asarray(_Memory(view))


def numpy_view(view: ArrayView) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array in host memory, of any library, as NumPy's, with its own dtype."""
    dtype = view.spec.dtype
    raw = raw_view(view)
    return raw.view(numpy_dtype(dtype)) if dtype is BFLOAT16 else raw


def copied_on_host(view: ArrayView) -> ArrayView:
    """Return a copy in C order of an array in host memory, which stays one of its library."""
    array, spec = np.array(raw_view(view), order="C"), view.spec
    copy = contiguous(spec.shape, spec.dtype, spec.device)
    return new_view(data_pointer(array), copy, array, view.adapter)
