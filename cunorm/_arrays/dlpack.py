# SPDX-License-Identifier: MIT
"""Reads objects with ``__dlpack__`` whose libraries have no adapter of their own, by a capsule.

The capsule is read and never consumed: its destructor frees the array when the view that holds the
capsule is gone. The producer may then reuse the memory, so a capsule on CUDA is held until its
launch has ended. A later view on CUDA lets it go; clearing the caches waits for all launches.
"""

import ctypes
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ClassVar

from cunorm._arrays.adapter import ArrayAdapter, unaligned
from cunorm._arrays.cupy import CUPY, CupyAdapter, cupy
from cunorm._arrays.numpy import NUMPY, NumpyAdapter
from cunorm._core.dtypes import (
    BFLOAT16,
    DTYPES,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
    FLOAT8_E8M0FNU,
    INT8,
    expected_dtypes,
)
from cunorm._core.memo import on_clear
from cunorm._core.tensor import CPU, ArrayView, Device, TensorSpec, contiguous_strides
from cunorm._core.types import SupportsDLPack

# DLDeviceType, DLDataTypeCode and flags of dlpack.h
_KDL_CPU, _KDL_CUDA, _KDL_CUDA_MANAGED = 1, 2, 13
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
# The codes of the types whose host type, which only has as many bits, has another code.
CODES = {BFLOAT16: 4, INT8: 0, FLOAT8_E4M3FN: 10, FLOAT8_E5M2: 12, FLOAT8_E8M0FNU: 14}
_READ_ONLY = 1
_LEGACY_STREAM = 1  # the protocol's number for CUDA's default stream, whose handle is 0


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _VersionedTensor(ctypes.Structure):
    """DLManagedTensorVersioned. The older DLManagedTensor begins with its DLTensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


_is_named = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_content = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def read_capsule(capsule: object) -> tuple[DLTensor, bool]:
    """Return the DLTensor in a capsule (keep the capsule alive), and whether it is writable."""
    if _is_named(capsule, b"dltensor"):
        return DLTensor.from_address(_content(capsule, b"dltensor")), True
    if not _is_named(capsule, b"dltensor_versioned"):
        raise BufferError(f"expected an unconsumed DLPack capsule, got {capsule!r}")
    managed = _VersionedTensor.from_address(_content(capsule, b"dltensor_versioned"))
    if managed.major > 1:
        raise BufferError(f"DLPack version {managed.major}.{managed.minor} is too new, expected 1")
    return managed.tensor, not managed.flags & _READ_ONLY


class Hold:
    """Keeps a capsule until a stream has done all that was enqueued before the Hold was deleted."""

    __slots__ = ("capsule", "device", "stream")
    passing: ClassVar[deque[tuple[Any, object]]] = deque()  # (event, capsule), oldest first

    def __init__(self, capsule: object, stream: Any, device: Device) -> None:
        if self.passing and not stream.is_capturing():  # a capture forbids queries of events
            self.let_go(wait=False)
        self.capsule, self.stream, self.device = capsule, stream, device

    def __del__(self) -> None:
        if sys.is_finalizing() or self.stream.is_capturing():  # a graph's user must keep its arrays
            return
        with CUPY.device_scope(self.device):
            event = cupy().cuda.Event(disable_timing=True)
            event.record(self.stream)
        self.passing.append((event, self.capsule))

    @classmethod
    def let_go(cls, *, wait: bool = True) -> None:
        """Delete the capsules whose streams have passed their events; with `wait`, wait for all."""
        with suppress(IndexError):  # none is left
            while True:
                held = cls.passing.popleft()  # atomic: no other thread gets it
                if wait:
                    held[0].synchronize()
                elif not held[0].done:
                    cls.passing.appendleft(held)
                    return


on_clear(Hold.let_go)


def view_of_capsule(
    function: str, argument: str, capsule: object, owner: object, adapter: ArrayAdapter
) -> ArrayView:
    """Return the view of the array in a capsule; `owner` keeps the capsule alive."""
    tensor, writable = read_capsule(capsule)
    kind = _KINDS.get(tensor.code, f"DLPack type {tensor.code} of bits ")
    dtype = DTYPES.get(f"{kind}{tensor.bits}")
    if dtype is None or tensor.lanes != 1:
        name = f"{kind}{tensor.bits}" + (f"x{tensor.lanes}" if tensor.lanes != 1 else "")
        expected = expected_dtypes(argument, name)
        raise TypeError(f"{function}: {argument} has dtype {name}, {expected}")
    integers = ctypes.c_int64 * tensor.ndim
    shape = tuple(integers.from_address(tensor.shape)) if tensor.ndim else ()
    strides = contiguous_strides(shape)
    if tensor.strides and tensor.ndim:
        strides = tuple(integers.from_address(tensor.strides))
    pointer = (tensor.data or 0) + tensor.byte_offset
    if pointer % dtype.itemsize:
        raise unaligned(f"{function}: {argument}", f"a copy of {argument}")
    device = CPU if tensor.device_type == _KDL_CPU else Device("cuda", tensor.device_id)
    return ArrayView(pointer, TensorSpec(shape, strides, dtype, device), owner, adapter, writable)


class DLPackAdapter(ArrayAdapter):
    """Objects of other libraries; results for them are NumPy or CuPy arrays."""

    stream = CUPY.stream

    def accepts(self, function: str, argument: str, kind: type) -> bool:
        return hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")

    def view(self, function: str, argument: str, array: Any) -> ArrayView:
        try:
            kind, index = array.__dlpack_device__()
            if kind == _KDL_CPU:
                capsule = owner = _capsule(array)
            elif kind in (_KDL_CUDA, _KDL_CUDA_MANAGED):
                device = Device("cuda", index)
                with self.device_scope(device):
                    stream = cupy().cuda.get_current_stream()
                    capsule = _capsule(array, stream=stream.ptr or _LEGACY_STREAM)
                owner = Hold(capsule, stream, device)
            else:
                raise BufferError(f"it is on DLPack device type {int(kind)}, expected CPU or CUDA")
            return view_of_capsule(function, argument, capsule, owner, self)
        except (BufferError, RuntimeError) as error:
            raise ValueError(
                f"{function}: {argument} does not give its memory through DLPack: {error}"
            ) from error

    def allocator(self, spec: TensorSpec, *, has_model: bool) -> Callable[[Any], Any]:
        return _own(spec).allocator(spec, has_model=False)

    def allocate(self, spec: TensorSpec) -> ArrayView:
        return _own(spec).allocate(spec)

    def contiguous(self, view: ArrayView) -> ArrayView:
        return _own(view.spec).contiguous(view)

    def device_scope(self, device: Device) -> AbstractContextManager[object]:
        return nullcontext() if device.kind == "cpu" else CUPY.device_scope(device)


def _own(spec: TensorSpec) -> NumpyAdapter | CupyAdapter:
    """Return the adapter of the library that makes arrays on a device."""
    return NUMPY if spec.device.kind == "cpu" else CUPY


def _capsule(array: SupportsDLPack, **stream: int) -> object:
    """Return a capsule, if possible a versioned one, which can be marked as read-only."""
    try:
        return array.__dlpack__(max_version=(1, 0), **stream)
    except TypeError:  # the producer predates DLPack 1.0
        return array.__dlpack__(**stream)


DLPACK = DLPackAdapter()
