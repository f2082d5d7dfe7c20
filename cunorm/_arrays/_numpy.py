# SPDX-License-Identifier: MIT
"""NumPy arrays, and NumPy views of any operand in host memory."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from cunorm._arrays._operand import (
    CPU,
    Form,
    Framework,
    Operand,
    contiguous_strides,
    fresh,
    in_c_order,
    in_elements,
)
from cunorm._dtypes import BFLOAT16, dtype_of, numpy_dtype


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


def data_pointer(array: Any) -> int:
    """Return the address of a NumPy array's first element (0.5 µs; ``array.ctypes.data``: 1-5)."""
    capsule = array.__array_struct__
    return _address_at(_struct_of(capsule, None) + _DATA).value or 0


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
        dtype = dtype_of(function, argument, array.dtype)
        strides = in_elements(array.strides, dtype.itemsize)
        pointer = data_pointer(array)
        if strides is None or pointer % dtype.itemsize:
            array = np.array(array, order="C")
            strides, pointer = contiguous_strides(array.shape), data_pointer(array)
        form = Form(array.shape, strides, dtype, CPU)
        return Operand(pointer, form, array, self, array.flags.writeable)

    def allocate(self, form: Form) -> Operand:
        """Make an array of the right dtype."""
        array = np.empty(form.shape, numpy_dtype(form.dtype))
        return fresh(data_pointer(array), form, array, self)

    def contiguous(self, operand: Operand) -> Operand:
        """Copy into C order."""
        return copied_on_host(operand)


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
