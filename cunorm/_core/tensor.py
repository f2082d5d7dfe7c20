# SPDX-License-Identifier: MIT
"""Arrays as kernels see them: shape, strides, dtype, device and a pointer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from cunorm._core.dtypes import FLOAT16, DType

WIDEST_ACCESS = 16  # bytes that a GPU's thread moves at once, where arrays are aligned to that


class Device(NamedTuple):
    """Where memory lies: kind "cpu" (index 0) or "cuda"."""

    kind: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device("cpu", 0)


class TensorSpec(NamedTuple):
    """An array without its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements, of any sign; 0 along an expanded axis
    dtype: DType
    device: Device

    @property
    def nbytes(self) -> int:
        """Return the bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    def permuted(self, axes: Sequence[int]) -> TensorSpec:
        """Return the spec of the same memory with its axes in another order."""
        shape = tuple(self.shape[axis] for axis in axes)
        return self._replace(shape=shape, strides=tuple(self.strides[axis] for axis in axes))


OptionalSpecs = tuple[TensorSpec | None, ...]


@dataclass(slots=True)
class ArrayView:
    """One array of a call."""

    pointer: int  # the address of the first element; anything where the array is empty
    spec: TensorSpec
    # Keeps the memory alive. It is the caller's array, unless its data was copied or came through
    # a DLPack capsule: an output is right only if it is the array.
    owner: Any
    adapter: Any  # an ArrayAdapter, of the library of the array
    writable: bool  # as the library says
    is_new: bool = False  # made in this call


class ArrayInterface:
    """Memory for NumPy to take as an array, of float16 for bfloat16; keeps its owner alive."""

    def __init__(self, spec: TensorSpec, pointer: int, owner: Any, writable: bool) -> None:
        self.owner, itemsize = owner, spec.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "shape": spec.shape,
            "strides": tuple(stride * itemsize for stride in spec.strides),
            "typestr": f"=f{itemsize}",
            "data": (pointer, not writable),
        }


def contiguous(shape: tuple[int, ...], dtype: DType, device: Device) -> TensorSpec:
    """Return the spec of an array in C order."""
    return TensorSpec(shape, contiguous_strides(shape), dtype, device)


def optional_contiguous(
    shape: tuple[int, ...], dtype: DType | None, device: Device
) -> TensorSpec | None:
    """Return the spec of an array in C order, None without a dtype."""
    return None if dtype is None else contiguous(shape, dtype, device)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the element strides of an array in C order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements lie one after the other, in the order of their axes."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def memory_order(spec: TensorSpec) -> tuple[int, ...] | None:
    """Return the axes of a dense array from the outermost in memory, None in C order."""
    if spec.strides == contiguous_strides(spec.shape):
        return None
    return tuple(sorted(range(len(spec.shape)), key=lambda axis: -spec.strides[axis]))


def inverse_permutation(axes: Sequence[int]) -> tuple[int, ...]:
    """Return the order of axes that undoes another."""
    return tuple(axes.index(axis) for axis in range(len(axes)))


def bytes_spec(size: int, device: Device) -> TensorSpec:
    """Return the spec of an array of a size in bytes, rounded down to an even number."""
    return contiguous((size // 2,), FLOAT16, device)


def in_elements(strides: Iterable[int], itemsize: int) -> tuple[int, ...] | None:
    """Return byte strides in elements, None where one is no whole number of elements."""
    elements = tuple(stride // itemsize for stride in strides)
    return elements if tuple(stride * itemsize for stride in elements) == tuple(strides) else None


def optional_dtype(spec: TensorSpec | None) -> DType | None:
    """Return the dtype of an operand that may be absent."""
    return None if spec is None else spec.dtype
