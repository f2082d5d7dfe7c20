# SPDX-License-Identifier: MIT
"""Arrays of CuPy, PyTorch and JAX on a GPU, and of NumPy, for tests that use all of these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.operands import DTYPES


class OnNumpy:
    """NumPy arrays, which need no copy."""

    is_gpu = False
    behind = 64  # bytes to check behind an array, because a store there does not fault

    def put(self, array: Any) -> Any:
        return array

    def allocate(self, content: Any) -> Any:
        """Allocate memory with these bytes."""
        return content.copy()

    def get(self, array: Any) -> Any:
        return np.asarray(array)

    def address(self, array: Any) -> int:
        return array.ctypes.data

    def is_own(self, result: Any, dtype: str) -> bool:
        return type(result) is np.ndarray and result.dtype == DTYPES[dtype]


class OnCupy:
    """Copies arrays between NumPy and CuPy, as integers, because CuPy may lack bfloat16."""

    is_gpu = True
    behind = 0

    def __init__(self) -> None:
        self.cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

    def put(self, array: Any) -> Any:
        return self.cupy.asarray(array.view(f"u{array.itemsize}")).view(array.dtype)

    def allocate(self, content: Any) -> Any:
        return self.put(content)

    def get(self, array: Any) -> Any:
        return self.cupy.asnumpy(array.view(f"u{array.itemsize}")).view(array.dtype)

    def address(self, array: Any) -> int:
        return array.data.ptr

    def is_own(self, result: Any, dtype: str) -> bool:
        return type(result) is self.cupy.ndarray and result.dtype == DTYPES[dtype]


class OnTorch:
    """Copies arrays between NumPy and PyTorch on CUDA."""

    device = "cuda"
    is_gpu = True

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        if self.device == "cuda" and not self.torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")

    def put(self, array: Any) -> Any:
        raw = self.torch.from_numpy(array.view(f"i{array.itemsize}"))
        return raw.to(self.device).view(getattr(self.torch, array.dtype.name))

    def get(self, tensor: Any) -> Any:
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        raw = tensor.detach().view(getattr(self.torch, f"int{8 * dtype.itemsize}"))
        return raw.cpu().numpy().view(dtype)

    def address(self, tensor: Any) -> int:
        return tensor.data_ptr()

    def is_own(self, result: Any, dtype: str) -> bool:
        there = type(result) is self.torch.Tensor and result.device.type == self.device
        return there and result.dtype is getattr(self.torch, dtype)


class OnTorchCpu(OnTorch):
    """Copies arrays between NumPy and PyTorch on the CPU."""

    device, is_gpu = "cpu", False


class OnJax:
    """Copies arrays between NumPy and JAX on CUDA."""

    platform = "cuda"
    is_gpu = True

    def __init__(self) -> None:
        self.jax = pytest.importorskip("jax", reason="JAX is not installed")
        try:
            self.device = self.jax.devices(self.platform)[0]
        except RuntimeError as error:
            pytest.skip(f"this JAX has no CUDA: {error}")

    def put(self, array: Any) -> Any:
        if array.dtype == np.float64 and not self.jax.config.jax_enable_x64:
            pytest.skip("JAX has no float64 unless it is enabled")
        return self.jax.device_put(array, self.device)

    def get(self, array: Any) -> Any:
        return np.asarray(array)

    def address(self, array: Any) -> int:
        return array.unsafe_buffer_pointer()

    def is_own(self, result: Any, dtype: str) -> bool:
        there = isinstance(result, self.jax.Array) and result.devices() == {self.device}
        return there and result.dtype == DTYPES[dtype]


def put_all(gpu: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: gpu.put(array) for name, array in arrays.items()}


def get_all(gpu: Any, result: Any) -> Any:
    return type(result)(*(None if field is None else gpu.get(field) for field in result))


GPUS = [
    pytest.param(kind, marks=pytest.mark.gpu, id=kind.__name__.removeprefix("On").lower())
    for kind in (OnCupy, OnTorch, OnJax)
]
CPU = pytest.param(OnNumpy, id="cpu")
