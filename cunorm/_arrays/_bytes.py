# SPDX-License-Identifier: MIT
"""Arrays whose memory is lent to the kernels as so many bytes, whatever their dtype is."""

from __future__ import annotations

import sys
from functools import lru_cache
from math import prod
from typing import Any

from cunorm._arrays._operand import Operand, contiguous_strides

_ALIGNMENT = 16  # bytes of a GPU's widest access


def as_floats(function: str, argument: str, array: Any) -> Any:
    """Return an array of bytes as one of float32, without a copy; any other as it is."""
    float32 = _float32_for_bytes(getattr(array, "dtype", None))
    if float32 is None:
        return array
    try:
        (count,) = array.shape
        return (array[: count // 4 * 4] if count % 4 else array).view(float32)
    except (ValueError, RuntimeError):  # of NumPy and CuPy, of PyTorch
        raise ValueError(
            f"{function}: {argument} is an array of bytes of shape {tuple(array.shape)}, expected "
            f"one axis, contiguous, at an address that is a multiple of {_ALIGNMENT}"
        ) from None


@lru_cache(maxsize=64)
def _float32_for_bytes(dtype: Any) -> Any:
    """Return the float32 of the framework to which a uint8 belongs, None for another dtype."""
    if str(dtype) == "torch.uint8":
        return sys.modules["torch"].float32
    return "float32" if str(dtype) == "uint8" else None


def check_bytes(function: str, argument: str, operand: Operand, array: Any, size: int) -> None:
    """Check that memory can be written as if it had no shape, and is as large as needed."""
    where = f"{function}: {argument}"
    if operand.owner is not array or not operand.writable or operand.pointer % _ALIGNMENT:
        raise ValueError(
            f"{where} cannot be used in place, expected a writable array whose address is a "
            f"multiple of {_ALIGNMENT} (JAX arrays are immutable)"
        )
    if operand.strides != contiguous_strides(operand.shape):
        raise ValueError(f"{where} has strides {operand.strides}, expected a contiguous array")
    got = prod(operand.shape) * operand.dtype.itemsize
    if got < size:
        raise ValueError(
            f"{where} has {got} bytes, expected at least {size}, as cunorm.workspace_size says"
        )
