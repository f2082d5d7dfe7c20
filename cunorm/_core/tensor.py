# SPDX-License-Identifier: MIT
"""Arrays as kernels see them: shape, strides, dtype, device and pointer; and the layout of rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from cunorm._core.dtypes import FLOAT16, DType

WIDEST_ACCESS = 16  # bytes that a GPU's thread moves at once, if arrays are aligned to 16 bytes
UNBOUNDED = 2**62  # stands for the size of the outermost axis, which kernels do not need

Shape = tuple[int, ...]
Arrays = tuple[Any, ...]  # the arrays of a call, some of which may be None
HostArray = np.ndarray[Any, np.dtype[Any]]


class Device(NamedTuple):
    """Where memory lies: kind "cpu" (index 0) or "cuda"; plans also take "meta", without memory."""

    kind: str
    index: int  # type: ignore[assignment]  # the field hides tuple.index, which is not used

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}" if self.kind == "cuda" else self.kind


CPU = Device("cpu", 0)


class TensorSpec(NamedTuple):
    """An array without its memory."""

    shape: Shape
    strides: tuple[int, ...]  # in elements, negative ones too; 0 along an expanded axis
    dtype: DType
    device: Device

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def permuted(self, axes: Sequence[int]) -> "TensorSpec":
        """Return the spec of the same memory with the axes in another order."""
        shape = tuple(self.shape[axis] for axis in axes)
        return self._replace(shape=shape, strides=tuple(self.strides[axis] for axis in axes))

    def dense(self, axes: Sequence[int] | None = None) -> "TensorSpec":
        """Return the spec of a dense copy with this order of axes in memory; None is C order."""
        if axes is None:
            return contiguous(self.shape, self.dtype, self.device)
        return self.permuted(axes).dense().permuted(inverse_permutation(axes))


OptionalSpec = TensorSpec | None  # None for an absent operand
OptionalSpecs = tuple[OptionalSpec, ...]


@dataclass(slots=True)
class ArrayView:
    """One array of a call."""

    pointer: int  # the address of the first element; any number if the array is empty
    spec: TensorSpec
    # Keeps the memory alive: the caller's array or, for an input, a copy or a DLPack capsule.
    owner: Any
    adapter: Any  # the ArrayAdapter of the array's library
    writable: bool  # according to the library
    is_new: bool = False  # made in this call


def host_array(view: ArrayView) -> HostArray:
    """Return an array in host memory as a NumPy array of the type `DType.host`."""
    spec, itemsize = view.spec, view.spec.dtype.itemsize
    if 0 in spec.shape:  # NumPy refuses the address if it is null
        return np.empty(spec.shape, spec.dtype.host)
    interface = {
        "version": 3,
        "shape": spec.shape,
        "strides": tuple(stride * itemsize for stride in spec.strides),
        "typestr": spec.dtype.host,
        "data": (view.pointer, not view.writable),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface, owner=view.owner))


def contiguous(shape: Shape, dtype: DType, device: Device) -> TensorSpec:
    return TensorSpec(shape, contiguous_strides(shape), dtype, device)


def optional_contiguous(shape: Shape, dtype: DType | None, device: Device) -> OptionalSpec:
    return None if dtype is None else contiguous(shape, dtype, device)


def contiguous_strides(shape: Shape) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Shape, strides: tuple[int, ...]) -> bool:
    """Return whether elements lie one after the other, in the order of their axes."""
    axes = zip(shape, strides, contiguous_strides(shape), strict=True)
    return all(stride == dense for size, stride, dense in axes if size > 1)


def inverse_permutation(axes: Sequence[int]) -> tuple[int, ...]:
    """Return the order of axes that undoes a given order."""
    return tuple(axes.index(axis) for axis in range(len(axes)))


def bytes_spec(size: int, device: Device) -> TensorSpec:
    """Return the spec of an array of a size in bytes, which is rounded down to an even number."""
    return contiguous((size // 2,), FLOAT16, device)


def in_elements(strides: Iterable[int], itemsize: int) -> tuple[int, ...] | None:
    """Return strides in elements, or None if a stride in bytes is no whole number of elements."""
    elements = tuple(stride // itemsize for stride in strides)
    return elements if tuple(stride * itemsize for stride in elements) == tuple(strides) else None


def optional_dtype(spec: OptionalSpec) -> DType | None:
    return None if spec is None else spec.dtype


# --- rows -----------------------------------------------------------------------------------------


class RowLayout(NamedTuple):
    """The position of rows along up to three leading axes, as `Rows` of operands.cuh has it."""

    inner: int  # the size of the inner axis
    middle: int
    outer_stride: int  # strides in elements
    middle_stride: int
    inner_stride: int

    @property
    def strides(self) -> tuple[int, int, int]:
        return self[2:]

    @property
    def axes(self) -> int:
        return 1 if self.inner == UNBOUNDED else 2 if self.middle == UNBOUNDED else 3


class RowAxes(NamedTuple):
    """The axes of rows: the number of leading axes, and the number of groups of the columns."""

    leading_axes: int
    groups: int = 1

    def layout(self, spec: TensorSpec) -> RowLayout | None:
        """Return the layout of an array's rows, or None if kernels cannot follow its strides.

        Each row must be contiguous, with at most three leading axes after `collapsed` joined axes.
        """
        shape, strides, leading = spec.shape, spec.strides, self.leading_axes
        if self.groups > 1:
            width, step = shape[-1] // self.groups, strides[-1]
            shape, strides = (*shape[:-1], self.groups, width), (*strides[:-1], width * step, step)
            leading += 1
        if 0 in shape:
            return SINGLE_ROW
        if not is_contiguous(shape[leading:], strides[leading:]):
            return None
        axes = collapsed(shape[:leading], strides[:leading])
        if len(axes) > 3:
            return None
        if axes:
            axes[0] = UNBOUNDED, axes[0][1]
        outer, middle, inner = [(UNBOUNDED, 0)] * (3 - len(axes)) + axes
        return RowLayout(inner[0], middle[0], outer[1], middle[1], inner[1])


class StridedLayout(NamedTuple):
    """The position of rows whose columns are `step` elements apart, as `SteppedRows` has it."""

    inner: int
    middle: int
    outer_stride: int
    middle_stride: int
    inner_stride: int
    step: int

    @property
    def axes(self) -> int:
        return RowLayout(*self[:-1]).axes


class StridedAxes(NamedTuple):
    """The axes of rows that lie side by side: the number of leading axes."""

    leading_axes: int

    def layout(self, spec: TensorSpec) -> StridedLayout | None:
        """Return the layout of an array's rows, or None if kernels cannot follow its strides.

        One stride walks the columns, and neighbouring rows are no further apart than columns.
        """
        leading = self.leading_axes
        columns = collapsed(spec.shape[leading:], spec.strides[leading:])
        rows = RowAxes(leading).layout(
            spec._replace(shape=spec.shape[:leading], strides=spec.strides[:leading])
        )
        if rows is None or len(columns) > 1:
            return None
        step = columns[0][1] if columns else 0
        is_apart = 0 < abs(step) < abs(rows.inner_stride)
        return None if is_apart else StridedLayout(*rows, step)


WHOLE = RowAxes(0)  # the array is one row
SINGLE_ROW = RowLayout(UNBOUNDED, UNBOUNDED, 0, 0, 0)
SINGLE_STRIDED_ROW = StridedLayout(*SINGLE_ROW, 0)


def collapsed(shape: Shape, strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (size, stride) of each axis, after joining neighbours that one stride can walk."""
    axes: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == stride * max(size, 1):
            axes[-1] = (axes[-1][0] * size, stride)
        else:
            axes.append((size, stride))
    return axes
