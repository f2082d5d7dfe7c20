# SPDX-License-Identifier: MIT
"""NumPy arrays, and NumPy views of any operand in host memory."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from cunorm._arrays._operand import (
    CPU,
    LARGEST_ELEMENT,
    Form,
    Framework,
    Operand,
    check_contiguous,
    contiguous_form,
    empty_dense,
    fresh,
    in_c_order,
    in_elements,
    known_form,
    memory_axes,
    memory_form,
)
from cunorm._dtypes import BFLOAT16, dtype_of, known_dtype, numpy_dtype


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
    """Return the same (0.1 µs), where the address of an object is its id."""
    return _address_at(id(array) + _AFTER_HEAD).value or 0


data_pointer = _pointer_by_object if sys.implementation.name == "cpython" else _pointer_by_interface


class Numpy(Framework):
    """NumPy: host memory only, bfloat16 as ``ml_dtypes.bfloat16``."""

    name = "numpy"

    def accepts(self, function: str, argument: str, kind: type) -> bool:
        """Take ndarray and its subclasses, for their memory alone; masks are not memory."""
        if issubclass(kind, np.ma.MaskedArray):
            raise TypeError(
                f"{function}: {argument} is a masked array, whose mask would be ignored, expected "
                f"a plain one: pass {argument}.filled(value)"
            )
        return issubclass(kind, np.ndarray)

    def describe(self, function: str, argument: str, array: Any) -> Operand:
        """Describe an array; one whose elements are not aligned is copied, once."""
        try:
            form = _form_of(array.shape, array.strides, array.dtype)
        except KeyError:
            form = None
        if form is None:
            dtype_of(function, argument, array.dtype)
            form = _form_of(array.shape, array.strides, array.dtype)
        pointer = data_pointer(array)
        if form is None or pointer % form.dtype.itemsize:
            array = np.array(array, order="C")
            pointer, dtype = data_pointer(array), dtype_of(function, argument, array.dtype)
            form = contiguous_form(array.shape, dtype, CPU)
        return Operand(pointer, form, array, self, array.flags.writeable)

    def memory(self, function: str, argument: str, array: Any) -> Operand:
        """Describe an array of any dtype whose elements are their bytes."""
        flags = array.flags
        check_contiguous(function, argument, flags.c_contiguous, array.strides)
        if not _is_plain(array.dtype):
            raise TypeError(
                f"{function}: {argument} has dtype {array.dtype}, expected one of numbers"
            )
        form = memory_form(array.nbytes, CPU)
        return Operand(data_pointer(array), form, array, self, flags.writeable)

    def allocate(self, form: Form) -> Operand:
        """Make an array of the right dtype."""
        array = empty_dense(form, partial(np.empty, dtype=numpy_dtype(form.dtype)))
        return fresh(data_pointer(array), form, array, self)

    def recognise(self, arrays: Sequence[Any]) -> tuple[list[Any], list[int]] | None:
        """Recognise arrays of NumPy's own type."""
        facts: list[Any] = []
        pointers = []
        for array in arrays:
            if array is None:
                facts.append(None)
                pointers.append(0)
            elif type(array) is np.ndarray:
                pointer = data_pointer(array)
                pointers.append(pointer)
                form = (array.dtype, array.shape, array.strides, array.flags.writeable)
                facts.append((form, pointer % LARGEST_ELEMENT))
            else:
                return None
        return facts, pointers

    def maker(self, form: Form, has_model: bool) -> Callable[[Any], Any]:
        """Copy the form of a model, where NumPy keeps the strides of axes of one element, too."""
        if memory_axes(form) is not None:
            return super().maker(form, has_model)
        shape, dtype = form.shape, numpy_dtype(form.dtype)
        if has_model:
            return partial(np.empty_like, dtype=dtype)  # without its metadata
        return lambda model: np.empty(shape, dtype)

    @property
    def pointer(self) -> Callable[[Any], int]:
        """Return what returns the address of an array's first element."""
        return data_pointer

    def contiguous(self, operand: Operand) -> Operand:
        """Copy into C order."""
        return copied_on_host(operand)


@lru_cache(maxsize=64)
def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether elements hold no references."""
    return dtype.kind in "biufcV" and not dtype.hasobject


@lru_cache(maxsize=4096)
def _form_of(
    shape: tuple[int, ...], strides: tuple[int, ...], numpy_type: np.dtype[Any]
) -> Form | None:
    """Return the form of an array with strides in bytes, None where one is no whole number.

    KeyError: its dtype is not known yet, or never will be.
    """
    dtype = known_dtype(numpy_type)
    in_whole = in_elements(strides, dtype.itemsize)
    return None if in_whole is None else known_form(shape, in_whole, dtype, CPU)


NUMPY = Numpy()


class _Memory:
    """Lends an operand's memory to NumPy, and keeps its owner alive for as long as that lasts."""

    def __init__(self, operand: Operand) -> None:
        itemsize = operand.dtype.itemsize
        self.owner = operand.owner
        self.__array_interface__ = {
            "version": 3,
            "shape": operand.shape,
            "typestr": f"=f{itemsize}",
            "strides": tuple(stride * itemsize for stride in operand.strides),
            "data": (operand.pointer, not operand.writable),
        }


def raw_view(operand: Operand) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a NumPy view of a host operand, with bfloat16 looking like float16.

    Enough to move bits around, and it needs no ml_dtypes.
    """
    if math.prod(operand.shape) == 0:  # its address may be null, which NumPy would refuse
        return np.empty(operand.shape, f"=f{operand.dtype.itemsize}")
    return np.asarray(_Memory(operand))


def numpy_view(operand: Operand) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a NumPy view of a host operand of any framework, with its own dtype."""
    view = raw_view(operand)
    return view.view(numpy_dtype(operand.dtype)) if operand.dtype is BFLOAT16 else view


def copied_on_host(operand: Operand) -> Operand:
    """Return a C-contiguous copy of a host operand, which stays one of its framework."""
    array = np.array(raw_view(operand), order="C")
    return fresh(data_pointer(array), in_c_order(operand.form), array, operand.framework)
