# SPDX-License-Identifier: MIT
"""The interface of adapters to array libraries, and functions that adapters share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from cunorm._core import tensor
from cunorm._core.plan import OpDef
from cunorm._core.tensor import ArrayView, Device, Shape, TensorSpec

Signature = tuple[list[object], list[int]]  # parts of a key; addresses, with 0 for None


class ArrayAdapter(ABC):
    """Reads the arrays of one library, and makes the results for its users."""

    # These functions take an array for which `signature` gave a key. `pointer` returns its address;
    # `contiguous_type` identifies its dtype and device, or is None if the array is not contiguous.
    pointer: Any = None
    contiguous_type: Callable[[Any], Hashable]
    # These functions take a CUDA device. `stream` returns the raw stream that the caller works on,
    # `device_scope` a context in which the device is current.
    stream: Callable[[Device], int]
    device_scope: Callable[[Device], AbstractContextManager[object]]
    allocates_like = False  # whether an allocator takes the shape from a model array
    # Whether the library makes some calls itself, by `dispatch`, which returns None for the others.
    dispatches_itself = False
    dispatch: Callable[[OpDef[Any], Any, Sequence[Any]], list[Any] | None]

    @abstractmethod
    def accepts(self, function: str, argument: str, kind: type) -> bool:
        """Whether `kind` is a type of this library's arrays; raise an error for a refused type."""

    @abstractmethod
    def view(self, function: str, argument: str, array: Any) -> ArrayView:
        """Return the view of an array of an accepted type, without a copy if possible."""

    @abstractmethod
    def allocator(self, spec: TensorSpec, *, has_model: bool) -> Callable[[Any], Any]:
        """Return a function that makes a dense array of a spec.

        If `has_model`, the function is given an array of this spec, the model; else any object.
        """

    def allocate(self, spec: TensorSpec) -> ArrayView:
        array = self.allocator(spec, has_model=False)(None)
        return new_view(self.pointer(array), spec, array, self)

    @abstractmethod
    def contiguous(self, view: ArrayView) -> ArrayView:
        """Copy an array of this library into C order of the axes of its spec."""

    def signature(self, arrays: Sequence[Any], first_output: int) -> Signature | None:
        """Return the arrays' part of the cache's key, and their addresses; arrays may be None.

        Return None if an array is of another library, or must be refused.
        """
        return None

    def strides(self, array: Any) -> tuple[int, ...] | None:
        """Return the strides, in elements, of an array for which `signature` gave a key."""
        return tensor.in_elements(array.strides, array.itemsize)

    def bump_version(self, arrays: Sequence[Any]) -> None:  # noqa: B027  # few libraries count
        """Count a write to each array but None: autograd then refuses arrays that it had saved."""

    def workspace_view(self, function: str, argument: str, array: Any) -> ArrayView:
        """Return the view of a contiguous array as bytes."""
        view = self.view(function, argument, array)
        spec = view.spec
        check_contiguous(function, argument, spec == spec.dense(), spec.strides)
        view.spec = tensor.bytes_spec(spec.nbytes, spec.device)
        return view

    def export(self, view: ArrayView) -> object:
        """Return the array that the user gets for an output, after the launch that fills it."""
        if not view.is_new:
            self.bump_version([view.owner])
        return view.owner


def copied(view: ArrayView, axes: tuple[int, ...] | None) -> ArrayView:
    """Return a dense copy whose axes lie in memory in the order `axes`; None is C order."""
    if axes is None:
        return view.adapter.contiguous(view)  # type: ignore[no-any-return]
    ordered = ArrayView(view.pointer, view.spec.permuted(axes), view.owner, view.adapter, False)
    copy: ArrayView = view.adapter.contiguous(ordered)
    copy.spec = copy.spec.permuted(tensor.inverse_permutation(axes))
    return copy


def in_memory_order(spec: TensorSpec) -> tuple[Shape, tuple[int, ...] | None]:
    """Return a dense array's shape in memory, and axes that transpose back; None is C order."""
    if spec.strides == tensor.contiguous_strides(spec.shape):
        return spec.shape, None
    axes = sorted(range(len(spec.shape)), key=lambda axis: -spec.strides[axis])
    return spec.permuted(axes).shape, tensor.inverse_permutation(axes)


def check_contiguous(function: str, argument: str, is_contiguous: bool, strides: object) -> None:
    if not is_contiguous:
        subject = f"{function}: {argument} has strides {strides}"
        raise ValueError(f"{subject}, expected a contiguous array")


def new_view(pointer: int, spec: TensorSpec, owner: object, adapter: ArrayAdapter) -> ArrayView:
    return ArrayView(pointer, spec, owner, adapter, writable=True, is_new=True)


def unaligned(subject: str, fix: str) -> ValueError:
    """Return the error for elements whose addresses are no multiples of their size."""
    return ValueError(
        f"{subject} has elements at addresses that are no multiples of their size, expected "
        f"aligned ones: pass {fix}"
    )
