# SPDX-License-Identifier: MIT
"""Arrays whose memory is lent to the kernels as so many bytes, whatever their dtype is."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

from cunorm._arrays._operand import Operand, contiguous_strides


def of_floats(array: Any) -> Any:
    """Return a one-dimensional array of bytes as one of float32, without a copy; others as are."""
    dtype = str(getattr(array, "dtype", ""))
    if dtype not in ("uint8", "torch.uint8") or len(array.shape) != 1:
        return array
    float32 = sys.modules["torch"].float32 if dtype == "torch.uint8" else "float32"
    return array[: array.shape[0] // 4 * 4].view(float32)


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


_ALIGNMENT = 16  # bytes of a GPU's widest access
