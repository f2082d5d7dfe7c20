# SPDX-License-Identifier: MIT
"""What a kernel needs to know of an array, and what every framework must be able to do."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

from cunorm._dtypes import FLOAT16, DType


class Device(NamedTuple):
    """Where memory lies: kind "cpu" (index 0) or "cuda"."""

    kind: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device("cpu", 0)
LARGEST_ELEMENT = 8  # bytes, to a multiple of which every element may be aligned
WIDEST_ACCESS = 16  # bytes that a GPU's thread moves at once, if arrays are aligned to as many


@cache
def cuda_device(index: int) -> Device:
    """Return the Device of a CUDA ordinal."""
    return Device("cuda", index)


class Form(NamedTuple):
    """What there is to know of an array but for its memory: calls of equal forms do the same.

    Strides count elements, of any sign; 0 along an expanded axis.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: Device


@dataclass(slots=True)
class Operand:
    """One array as the kernels see it.

    Attributes
    ----------
    pointer : int
        Address of the first element; anything where the array is empty.
    form : Form
        All there is to know of it but for its memory.
    owner : object
        Keeps the memory alive. It is the described array itself, unless its data had to be copied
        or came through a DLPack capsule: an output is right only if it is the array.
    framework : Framework
        Whose array it is.
    writable : bool
        Whether the caller allows writes to it.
    fresh : bool
        Whether it was made in this call.
    """

    pointer: int
    form: Form
    owner: Any
    framework: Framework
    writable: bool
    fresh: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes of its axes."""
        return self.form.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the elements from one index to the next, along each axis."""
        return self.form.strides

    @property
    def dtype(self) -> DType:
        """Return the type of its elements."""
        return self.form.dtype

    @property
    def device(self) -> Device:
        """Return where its memory is."""
        return self.form.device


class Framework(ABC):
    """One array library: reads its arrays, and makes the ones that its user gets back."""

    name: str

    @abstractmethod
    def accepts(self, function: str, argument: str, kind: type) -> bool:
        """Whether `kind` is this library's array type; raises for one that must be refused."""

    @abstractmethod
    def describe(self, function: str, argument: str, array: Any) -> Operand:
        """Describe an array of an accepted type, without a copy wherever that is possible."""

    @abstractmethod
    def allocate(self, form: Form) -> Operand:
        """Make an array with nothing in it yet: dense, in C order of its axes in some order."""

    def allocate_like(self, operand: Operand) -> Operand:
        """Make an array of the form that one of this framework has, where `allocate` can."""
        return self.allocate(operand.form)

    def recognise(self, arrays: Sequence[Any]) -> tuple[list[Any], list[int]] | None:
        """Return what a call on arrays follows from, and where they lie; None: describe them.

        It follows from no more than that where all of them are this library's, so that one stream
        orders them, and nothing about them is to be refused. Arrays may be None, which lie at 0.
        """
        return None

    def call(
        self, asked: Any, numbers: Any, arrays: tuple[Any, ...], first_result: int
    ) -> list[Any] | None:
        """Return the results of a call that the library itself makes, of arrays that are its own.

        None: describe them, and run the kernels.
        """
        return None

    def maker(self, form: Form, has_model: bool) -> Callable[[Any], Any]:
        """Return what makes an array of a form, given another, of the same form if `has_model`."""
        return lambda model: self.allocate(form).owner

    @property
    def pointer(self) -> Callable[[Any], int]:
        """Return what returns where an array that can be recognised lies."""
        raise NotImplementedError(f"{self.name} recognises no arrays")

    def mark_changed(self, arrays: Sequence[Any]) -> None:  # noqa: B027  # few have readers to tell
        """Let those who read arrays before know that they were written to; None is none."""

    @abstractmethod
    def contiguous(self, operand: Operand) -> Operand:
        """Copy an operand of this framework into C order of the axes of its form."""

    def memory(self, function: str, argument: str, array: Any) -> Operand:
        """Describe an array for its memory alone, whatever its dtype, where it is contiguous."""
        operand = self.describe(function, argument, array)
        strides = operand.strides
        check_contiguous(function, argument, strides == contiguous_strides(operand.shape), strides)
        size = math.prod(operand.shape) * operand.dtype.itemsize
        operand.form = memory_form(size, operand.device)
        return operand

    def export(self, operand: Operand) -> Any:
        """Return what the user gets for an output, after the launch that fills it."""
        return operand.owner

    def stream(self, device: Device) -> int:
        """Return the raw CUDA stream that the caller works on; for CUDA devices only."""
        raise NotImplementedError(f"{self.name} has no CUDA streams")

    def device_scope(self, device: Device) -> AbstractContextManager[object]:
        """Make a CUDA device current for a while; the caller's own is current again after."""
        return nullcontext()


@lru_cache(maxsize=1024)
def in_elements(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Return byte strides counted in elements, None where one of them is no whole number."""
    if any(stride % itemsize for stride in strides):
        return None
    return tuple(stride // itemsize for stride in strides)


@lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the element strides of a C-contiguous array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def known_form(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, device: Device
) -> Form:
    """Return a form; of those met before the same object, which is the quickest to compare."""
    return Form(tuple(shape), strides, dtype, device)


@lru_cache(maxsize=4096)
def contiguous_form(shape: tuple[int, ...], dtype: DType, device: Device) -> Form:
    """Return the form of an array in C order."""
    return Form(shape, contiguous_strides(shape), dtype, device)


@lru_cache(maxsize=1024)
def memory_axes(form: Form) -> tuple[int, ...] | None:
    """Return the axes of a dense array from the outermost in memory, None where in C order."""
    if form.strides == contiguous_strides(form.shape):
        return None
    return tuple(sorted(range(len(form.shape)), key=lambda axis: -form.strides[axis]))


def empty_dense(form: Form, empty: Callable[[tuple[int, ...]], Any]) -> Any:
    """Make a dense array of a form, with what makes one of a shape in C order."""
    axes = memory_axes(form)
    if axes is None:
        return empty(form.shape)
    in_memory = empty(tuple(form.shape[axis] for axis in axes))
    return in_memory.transpose(tuple(axes.index(axis) for axis in range(len(axes))))


@lru_cache(maxsize=1024)
def memory_form(size: int, device: Device) -> Form:
    """Return a form for so many bytes, but for an odd one."""
    return contiguous_form((size // 2,), FLOAT16, device)


def check_contiguous(function: str, argument: str, is_contiguous: bool, strides: Any) -> None:
    """Refuse memory with holes."""
    if not is_contiguous:
        raise ValueError(
            f"{function}: {argument} has strides {strides}, expected a contiguous array"
        )


def in_c_order(form: Form) -> Form:
    """Return the form of a copy in C order."""
    return contiguous_form(form.shape, form.dtype, form.device)


def fresh(pointer: int, form: Form, owner: Any, framework: Framework) -> Operand:
    """Return the operand of memory that was just made, and ours to write."""
    return Operand(pointer, form, owner, framework, True, True)


def unaligned(where: str, fix: str) -> ValueError:
    """Return the error for elements that do not lie on multiples of their size."""
    return ValueError(
        f"{where} has elements at addresses that are no multiples of their size, expected aligned "
        f"ones: pass {fix}"
    )
