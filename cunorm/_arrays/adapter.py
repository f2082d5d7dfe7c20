# SPDX-License-Identifier: MIT
"""The interface of an adapter to an array library."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from cunorm._core import tensor
from cunorm._core.plan import OpDef
from cunorm._core.tensor import ArrayView, Device, TensorSpec

Signature = tuple[list[object], list[int]]  # parts of the cache's key, and addresses, 0 for None


class ArrayAdapter(ABC):
    """One array library: reads its arrays, and makes the ones that its user gets back."""

    name: str
    pointer: Any = None  # a function of an array that has a signature: returns its address
    allocates_like = False  # allocators take the shape of a model
    dispatches_itself = False  # `dispatch` makes some

    @abstractmethod
    def accepts(self, function: str, argument: str, kind: type) -> bool:
        """Whether `kind` is this library's array type; raises for one that must be refused."""

    @abstractmethod
    def view(self, function: str, argument: str, array: Any) -> ArrayView:
        """Return the view of an array of an accepted type, without a copy wherever possible."""

    @abstractmethod
    def allocate(self, spec: TensorSpec) -> ArrayView:
        """Make an array of a spec: dense, in C order of its axes in some order."""

    @abstractmethod
    def contiguous(self, view: ArrayView) -> ArrayView:
        """Copy an array of this library into C order of the axes of its spec."""

    def dispatch(self, op: OpDef[Any], spec: Any, arrays: Sequence[Any]) -> list[Any] | None:
        """Return the outputs of a call that the library itself makes; None: it makes none."""
        return None

    def signature(self, arrays: Sequence[Any], first_output: int) -> Signature | None:
        """Return what the cache's key has of the arrays of a call, and their addresses.

        None where an array is not this library's, or is to be refused; arrays may be None.
        """
        return None

    # Of an array that has a signature:

    def is_contiguous(self, array: Any) -> bool:
        """Whether it is in C order."""
        return False

    def strides(self, array: Any) -> tuple[int, ...] | None:
        """Return its strides in elements."""
        return None

    def memory_type(self, array: Any) -> Hashable:
        """Return its dtype and device."""
        return None

    def allocator(self, spec: TensorSpec, *, has_model: bool) -> Callable[[Any], Any]:
        """Return a function that makes an array of a spec, given an array: of this spec or any."""
        return lambda model: self.allocate(spec).owner

    def bump_version(self, arrays: Sequence[Any]) -> None:  # noqa: B027  # few count versions
        """Count a write to each array, which autograd may have saved; some are None."""

    def workspace_view(self, function: str, argument: str, array: Any) -> ArrayView:
        """Return the view of a contiguous array of any dtype, as bytes."""
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

    def stream(self, device: Device) -> int:
        """Return the raw CUDA stream that the caller works on; for CUDA devices only."""
        raise NotImplementedError(f"{self.name} has no CUDA streams")

    def device_scope(self, device: Device) -> AbstractContextManager[object]:
        """Make a CUDA device current for a while; the caller's own is current again after."""
        return nullcontext()


def copied(view: ArrayView, axes: tuple[int, ...] | None) -> ArrayView:
    """Return a dense copy whose axes lie in memory in this order, None for C order."""
    if axes is None:
        return view.adapter.contiguous(view)  # type: ignore[no-any-return]
    ordered = ArrayView(view.pointer, view.spec.permuted(axes), view.owner, view.adapter, False)
    copy: ArrayView = view.adapter.contiguous(ordered)
    copy.spec = copy.spec.permuted(tensor.inverse_permutation(axes))
    return copy


def empty_dense(spec: TensorSpec, empty: Callable[[tuple[int, ...]], Any]) -> Any:
    """Make a dense array of a spec, with a function that makes one of a shape in C order."""
    axes = tensor.memory_order(spec)
    if axes is None:
        return empty(spec.shape)
    return empty(spec.permuted(axes).shape).transpose(tensor.inverse_permutation(axes))


def check_contiguous(function: str, argument: str, is_contiguous: bool, strides: object) -> None:
    if is_contiguous:
        return
    raise ValueError(f"{function}: {argument} has strides {strides}, expected a contiguous array")


def new_view(pointer: int, spec: TensorSpec, owner: object, adapter: ArrayAdapter) -> ArrayView:
    """Return the view of an array that was made in this call."""
    return ArrayView(pointer, spec, owner, adapter, writable=True, is_new=True)


def unaligned(subject: str, fix: str) -> ValueError:
    """Return the error for elements that do not lie on multiples of their size."""
    return ValueError(
        f"{subject} has elements at addresses that are no multiples of their size, expected "
        f"aligned ones: pass {fix}"
    )
