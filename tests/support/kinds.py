# SPDX-License-Identifier: MIT
"""Arrays of every framework: created from NumPy arrays, read back, and identified."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tests.support.gpu_arrays import OnCupy, OnJax, OnNumpy, OnTorch, OnTorchCpu
from tests.support.internals import describe, numpy_view, read_capsule
from tests.support.operands import DTYPES


class Foreign:
    """An array of no known framework, with DLPack only."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


class ForeignBefore1(Foreign):
    """A foreign array of a DLPack before version 1, without max_version."""

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.array.__dlpack__(stream=stream)


class OnDlpack(OnNumpy):
    """Foreign objects, which wrap NumPy arrays (tensors for bfloat16); results are NumPy arrays."""

    def put(self, array: Any) -> Any:
        return Foreign(OnTorchCpu().put(array) if array.dtype == DTYPES["bfloat16"] else array)

    def get(self, array: Any) -> Any:
        array = getattr(array, "array", array)
        return array if isinstance(array, np.ndarray) else OnTorchCpu().get(array)

    def address(self, array: Any) -> int:
        array = getattr(array, "array", array)
        return array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()


class ForeignOnCuda(Foreign):
    """A CuPy array as a foreign object, which records the streams of its exports."""

    def __init__(self, array: Any) -> None:
        super().__init__(array)
        self.streams: list[int] = []

    def __dlpack_device__(self) -> Any:
        return (2, self.array.data.device_id)

    def __dlpack__(self, *, stream: int, max_version: Any = None) -> Any:
        """Return NumPy's capsule, with the array's device; this does not access the memory."""
        self.streams.append(stream)
        array = self.array
        raw = (ctypes.c_char * array.nbytes).from_address(array.data.ptr)
        raw.owner = array
        capsule = np.ndarray(array.shape, f"f{array.itemsize}", raw).__dlpack__()
        tensor, _ = read_capsule(capsule)
        tensor.device_type, tensor.device_id = self.__dlpack_device__()
        tensor.code = 4 if array.dtype == DTYPES["bfloat16"] else tensor.code
        return capsule


class OnCudaDlpack(OnCupy):
    """Foreign objects on a GPU, whose results are CuPy arrays."""

    def put(self, array: Any) -> Any:
        return ForeignOnCuda(super().put(array))

    def address(self, array: Any) -> int:
        return super().address(getattr(array, "array", array))


class OnJaxCpu(OnJax):
    """JAX on the CPU."""

    platform, is_gpu = "cpu", False


KINDS = {"numpy": OnNumpy, "dlpack": OnDlpack, "torch": OnTorchCpu, "jax": OnJaxCpu}
GPU_KINDS = {
    "cupy": OnCupy,
    "dlpack on CUDA": OnCudaDlpack,
    "torch on CUDA": OnTorch,
    "jax on CUDA": OnJax,
}


def kinds(*without: str) -> list[Any]:
    """Return all kinds as test parameters; kinds on a GPU have the mark gpu."""
    return [
        pytest.param(kind, id=name, marks=[pytest.mark.gpu] * (name in GPU_KINDS))
        for name, kind in (KINDS | GPU_KINDS).items()
        if name not in without
    ]


# --- by the name of a kind ------------------------------------------------------------------------


def to(kind: str, array: Any) -> Any:
    """Return an array of a kind with the same numbers."""
    return KINDS[kind]().put(array)


def numbers(array: Any) -> Any:
    """Return a NumPy view of an array in the CPU's memory."""
    return numpy_view(describe("test", "result", array))
