# SPDX-License-Identifier: MIT
"""What cunorm and its tests use of CuPy, on the software GPU's driver.

Kernels are compiled by the real NVRTC with the options that CuPy adds, and started with the bytes
that CuPy would hand over. Arrays lie in memory of exactly their size.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np

from . import cuda
from ._kernels import RawKernel
from .cuda import Memory, MemoryPointer

__version__ = "14.2.0"
__all__ = [
    "RawKernel",
    "asarray",
    "asnumpy",
    "broadcast_to",
    "cuda",
    "empty",
    "ndarray",
    "tile",
    "zeros",
]


class _Data:
    def __init__(self, ptr, owner):
        self.ptr, self._owner = ptr, owner

    @property
    def device_id(self):
        return self._owner.device_id


class ndarray:
    """An array in memory of the device, which NumPy sees too."""

    __array_priority__ = 100

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        if memptr is None:
            memory = Memory(math.prod(shape) * dtype.itemsize)
            memptr = MemoryPointer(memory, 0)
        if strides is None:
            strides = np.empty(shape, np.int8, order=order).strides
            strides = tuple(s * dtype.itemsize for s in strides)
        steps = [(n - 1) * s for n, s in zip(shape, strides)] if 0 not in shape else []
        low = sum(s for s in steps if s < 0)
        high = sum(s for s in steps if s > 0) + dtype.itemsize
        raw = (ctypes.c_char * (high - low)).from_address(memptr.ptr + low)
        self._a = np.ndarray(shape, dtype, raw, -low, strides)
        self._owner = memptr.mem

    @classmethod
    def _of(cls, array, owner):
        out = cls.__new__(cls)
        out._a, out._owner = array, owner
        return out

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    shape = property(lambda self: self._a.shape)
    dtype = property(lambda self: self._a.dtype)
    strides = property(lambda self: self._a.strides)
    size = property(lambda self: self._a.size)
    ndim = property(lambda self: self._a.ndim)
    nbytes = property(lambda self: self._a.nbytes)
    itemsize = property(lambda self: self._a.itemsize)
    flags = property(lambda self: self._a.flags)
    T = property(lambda self: self.transpose())

    @property
    def data(self):
        return _Data(self._a.__array_interface__["data"][0] if self.size else 0, self._owner)

    def __len__(self):
        return len(self._a)

    def view(self, dtype=None):
        return self._of(self._a.view(dtype), self._owner)

    def reshape(self, *shape):
        made = self._a.reshape(*shape)
        return self._of(made, self._owner) if np.shares_memory(made, self._a) else asarray(made)

    def ravel(self):
        return self.reshape(-1)

    def transpose(self, *axes):
        return self._of(self._a.transpose(*axes), self._owner)

    def __getitem__(self, key):
        part = self._a[key]
        if isinstance(part, np.ndarray) and np.shares_memory(part, self._a):
            return self._of(part, self._owner)
        return asarray(part)

    def __setitem__(self, key, value):
        self._a[key] = value._a if isinstance(value, ndarray) else value

    def copy(self, order="C"):
        out = empty(self.shape, self.dtype, order=order)
        out._a[...] = self._a
        return out

    def astype(self, dtype, copy=True):
        return asarray(self._a.astype(dtype))

    def get(self, *args, **kwargs):
        return self._a.copy()


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype, order=order)


def zeros(shape, dtype=float, order="C"):
    out = empty(shape, dtype, order)
    out._a[...] = 0
    return out


def asarray(array, dtype=None):
    if isinstance(array, ndarray) and dtype is None:
        return array
    array = np.asarray(array._a if isinstance(array, ndarray) else array, dtype)
    out = empty(array.shape, array.dtype)
    out._a[...] = array
    return out


array = asarray


def asnumpy(array):
    return array.get() if isinstance(array, ndarray) else np.asarray(array)


def tile(array, times):
    return asarray(np.tile(array._a, times))


def broadcast_to(array, shape):
    return ndarray._of(np.broadcast_to(array._a, shape), array._owner)
