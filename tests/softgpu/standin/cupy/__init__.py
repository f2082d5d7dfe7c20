# SPDX-License-Identifier: MIT
"""The part of CuPy that cunorm and its tests use, on the software GPU's driver.

The real NVRTC compiles kernels with the options that CuPy adds, and launches get the argument bytes
that CuPy would give them. Arrays have memory of exactly their size. Assignments to elements are
queued on the current stream; functions of NumPy wait for it.
"""

from __future__ import annotations

import ctypes
import math
import operator
from functools import partial

import numpy as np

from . import cuda
from ._driver import later
from ._kernels import RawKernel as RawKernel
from .cuda import get_current_stream

__version__ = "14.2.0"


def __getattr__(name):
    """Return an attribute of NumPy. A function also accepts arrays of the device."""
    found = getattr(np, name)
    return _on_host(found) if callable(found) and not isinstance(found, type) else found


def _on_host(function):
    """Return a function that waits for the current stream and computes on the host."""

    def compute(*args, **kwargs):
        host_kwargs = {name: _host(value) for name, value in kwargs.items()}
        result = function(*map(_host, args), **host_kwargs)
        return asarray(result) if isinstance(result, (np.ndarray, np.generic)) else result

    return compute


class _Data:
    def __init__(self, ptr, owner):
        self.ptr, self._owner = ptr, owner
        self.device_id, self.mem = owner.device_id, owner


class ndarray:
    """An array in memory of the device, which NumPy can access too."""

    __array_priority__ = 100
    __hash__ = None

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        if dtype.name.startswith("float8"):
            raise TypeError(f"Unsupported dtype {dtype}")  # but arrays can be viewed so
        if memptr is None:
            memptr = cuda.alloc(math.prod(shape) * dtype.itemsize)
        if strides is None:
            strides = np.empty(shape, np.int8, order=order).strides
            strides = tuple(s * dtype.itemsize for s in strides)
        steps = [(n - 1) * s for n, s in zip(shape, strides, strict=True)] if 0 not in shape else []
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

    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        return _on_host(getattr(ufunc, method))(*args, **kwargs)

    def __array_function__(self, function, types, args, kwargs):
        return _on_host(function)(*args, **kwargs)

    shape = property(lambda self: self._a.shape)
    dtype = property(lambda self: self._a.dtype)
    strides = property(lambda self: self._a.strides)
    size = property(lambda self: self._a.size)
    ndim = property(lambda self: self._a.ndim)
    nbytes = property(lambda self: self._a.nbytes)
    itemsize = property(lambda self: self._a.itemsize)
    flags = property(lambda self: self._a.flags)
    T = property(lambda self: self.transpose())
    device = property(lambda self: cuda.Device(self._owner.device_id))

    @property
    def data(self):
        return _Data(self._a.__array_interface__["data"][0] if self.size else 0, self._owner)

    def __len__(self):
        return len(self._a)

    def view(self, dtype=None):
        return self._of(self._a.view(dtype), self._owner)

    def reshape(self, *shape):
        wanted = shape[0] if isinstance(shape[0], tuple) else shape
        try:
            return self._of(np.reshape(self._a, wanted, copy=False), self._owner)
        except ValueError:  # reshaping needs a copy
            copy = self.copy()
            return self._of(copy._a.reshape(wanted), copy._owner)

    def ravel(self):
        return self.reshape(-1)

    def transpose(self, *axes):
        return self._of(self._a.transpose(*axes), self._owner)

    def __getitem__(self, key):
        key = _host(key if isinstance(key, tuple) else (key,))
        part = self._a[key]
        if not isinstance(part, np.ndarray):
            part = self._a[(*key, ...)]
        if part.size and not np.may_share_memory(part, self._a):
            return asarray(self.get()[key])
        return self._of(part, self._owner)

    def __setitem__(self, key, value):
        _write(self, _host(key), value)

    def fill(self, value):
        _write(self, ..., value)

    def copy(self, order="C"):
        return self.astype(self.dtype, order=order)

    def astype(self, dtype, order="C", copy=True):
        out = empty(self.shape, dtype, order)
        _write(out, ..., self)
        return out

    def get(self, *args, **kwargs):
        with self.device:
            stream = get_current_stream()
            later(lambda: None, stream.ptr)  # in place of CuPy's copy: waits for the same streams
            stream.synchronize()
        return self._a.copy()

    def item(self):
        return self.get().item()

    def tolist(self):
        return self.get().tolist()

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(_on_host(getattr(np.ndarray, name)), self)

    __bool__, __int__, __float__ = (
        lambda self, kind=kind: kind(self.item()) for kind in (bool, int, float)
    )


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul", "abs"):
    setattr(ndarray, f"__{_name}__", _on_host(getattr(operator, _name)))
for _name in ("add", "sub", "mul"):
    setattr(ndarray, f"__r{_name}__", _on_host(getattr(np.ndarray, f"__r{_name}__")))


def _host(value):
    if isinstance(value, (list, tuple)):
        return type(value)(map(_host, value))
    return value.get() if isinstance(value, ndarray) else value


def _write(out, key, value):
    """Queue an assignment on the current stream; a value of the host is read at once."""
    source = value if isinstance(value, ndarray) else None
    value = source._a if source is not None else np.array(value)

    def write():
        out._a[key] = value
        return source  # keeps the array alive as long as this function

    later(write, get_current_stream().ptr)


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype, order=order)


def full(shape, value, dtype=float, order="C"):
    out = empty(shape, dtype, order)
    out.fill(value)
    return out


def zeros(shape, dtype=float, order="C"):
    return full(shape, 0, dtype, order)


def ones(shape, dtype=float, order="C"):
    return full(shape, 1, dtype, order)


def asarray(array, dtype=None):
    if isinstance(array, ndarray):
        return array if dtype in (None, array.dtype) else array.astype(dtype)
    array = np.asarray(array, dtype)
    out = empty(array.shape, array.dtype)
    _write(out, ..., array)
    return out


array = asarray


def asnumpy(array):
    return array.get() if isinstance(array, ndarray) else np.asarray(array)


def broadcast_to(array, shape):
    return ndarray._of(np.broadcast_to(array._a, shape), array._owner)
