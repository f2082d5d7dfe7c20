# SPDX-License-Identifier: MIT
"""PyTorch tensors, on the CPU and on CUDA.

Attributes are read one by one: together they cost a tenth of what ``__dlpack__`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

from cunorm._arrays.adapter import (
    ArrayAdapter,
    Signature,
    check_contiguous,
    new_view,
    unaligned,
)
from cunorm._core.dtypes import ALLOWED, DTYPES, DType
from cunorm._core.tensor import (
    CPU,
    ArrayView,
    Device,
    TensorSpec,
    bytes_spec,
    contiguous,
)


class TorchAdapter(ArrayAdapter):
    """PyTorch: its allocator makes the outputs, ordered on its current stream."""

    name = "torch"
    has_signature = True

    @cached_property
    def _torch(self) -> Any:
        return sys.modules["torch"]  # the caller's tensor shows that it is there

    @cached_property
    def _dtypes(self) -> dict[Any, DType]:
        return {getattr(self._torch, name): dtype for name, dtype in DTYPES.items()}

    @cached_property
    def _torch_dtypes(self) -> dict[DType, Any]:
        return {dtype: torch_dtype for torch_dtype, dtype in self._dtypes.items()}

    @cached_property
    def _grad_enabled(self) -> Any:
        return self._torch.is_grad_enabled

    @cached_property
    def _forward_ad(self) -> Any:
        return self._torch.autograd.forward_ad

    def _has_tangent(self, array: Any) -> bool:
        """Whether forward-mode differentiation is on, and gave the tensor a tangent."""
        forward_ad = self._forward_ad
        return forward_ad._current_level >= 0 and forward_ad.unpack_dual(array).tangent is not None

    @cached_property
    def _fake_mode(self) -> Callable[[], Any]:
        """Return what returns the FakeTensorMode in which this is called, or None."""
        native = self._torch._C
        return partial(native._get_dispatch_mode, native._TorchDispatchModeKey.FAKE)

    def accepts(self, function: str, argument: str, kind: type) -> bool:
        """Take Tensor and Parameter alone: any other subclass gives its memory another meaning."""
        if kind in self._plain_types:
            return True
        if issubclass(kind, self._torch.Tensor):
            raise TypeError(
                f"{function}: {argument} is a {kind.__module__}.{kind.__qualname__}, a tensor "
                "subclass whose memory may not be what it stands for, expected a plain "
                "torch.Tensor: pass its local or plain tensor "
                f"({argument}.to_local() for a DTensor)"
            )
        return False

    def view(self, function: str, argument: str, array: Any) -> ArrayView:
        """Return the view of a tensor; one that is more than its memory raises."""
        if self._fake_mode() is not None:
            raise TypeError(
                f"{function}: {argument} is used where torch makes tensors without memory "
                "(FakeTensorMode), expected real ones: use cunorm.torch there"
            )
        dtype = self._dtypes.get(array.dtype)
        if dtype is None or array.is_neg() or (array.requires_grad and self._grad_enabled()):
            raise self._refusal(function, argument, array)
        try:
            pointer: int = array.data_ptr()
            shape, strides = array.shape, array.stride()
        except RuntimeError:  # it has no such thing: sparse, nested, inside a transform
            raise self._refusal(function, argument, array) from None
        device = self._device(array)
        if device is None:
            raise self._refusal(function, argument, array)
        if pointer % dtype.itemsize or (not pointer and array.numel()):
            raise self._refusal(function, argument, array)
        if self._has_tangent(array):
            raise ValueError(
                f"{function}: {argument} has a forward-mode tangent, which this function does not "
                "propagate: use cunorm.torch with reverse-mode differentiation, or "
                f"{argument}.detach()"
            )
        spec = TensorSpec(tuple(shape), strides, dtype, device)
        return ArrayView(pointer, spec, array, self, writable=True)

    def memory(self, function: str, argument: str, array: Any) -> ArrayView:
        """Return the view of a tensor of uint8, or of a dtype that kernels read."""
        uint8 = self._torch.uint8
        if array.dtype is not uint8:
            return super().memory(function, argument, array)
        try:
            pointer: int = array.data_ptr()
            size, strides = array.numel(), array.stride()
        except RuntimeError:  # as in `view`
            raise self._refusal(function, argument, array, uint8) from None
        device = self._device(array)
        if device is None or (not pointer and size):
            raise self._refusal(function, argument, array, uint8)
        check_contiguous(function, argument, array.is_contiguous(), strides)
        return ArrayView(pointer, bytes_spec(size, device), array, self, writable=True)

    def _device(self, array: Any) -> Device | None:
        """Return where a tensor is, None where that is neither the CPU nor CUDA."""
        if array.is_cpu:
            return CPU
        return Device("cuda", array.get_device()) if array.is_cuda else None

    def _refusal(self, function: str, argument: str, array: Any, *also: Any) -> Exception:
        """Return the error for a tensor whose memory does not hold its values as they are.

        `also` are dtypes that are right here, beside those that kernels read.
        """
        where = f"{function}: {argument}"
        if array.layout is not self._torch.strided or array.is_nested:
            layout = "nested" if array.is_nested else array.layout
            return ValueError(
                f"{where} has layout {layout}, expected a dense tensor: pass {argument}.to_dense() "
                "(a nested tensor: padded)"
            )
        if self._torch._C._functorch.is_functorch_wrapped_tensor(array):
            return TypeError(
                f"{where} is a tensor inside a torch.func transform (vmap, grad, jvp), expected a "
                "plain one: call this outside the transform"
            )
        if array.device.type not in ("cpu", "cuda"):
            return ValueError(
                f"{where} is on device {array.device}, expected cpu or cuda: pass a tensor with "
                "data there"
            )
        if array.dtype not in (*self._dtypes, *also):
            name = str(array.dtype).removeprefix("torch.")
            fix = f": pass {argument}.dequantize()" if array.is_quantized else ""
            return TypeError(f"{where} has dtype {name}, expected {ALLOWED}{fix}")
        return _state_refusal(where, argument, array)

    def allocate(self, spec: TensorSpec) -> ArrayView:
        """Make a tensor with torch's allocator."""
        tensor = self._empty(spec)()
        return new_view(tensor.data_ptr(), spec, tensor, self)

    def _empty(self, spec: TensorSpec) -> Callable[[], Any]:
        """Return what makes a tensor of a spec; empty_strided parses less than torch.empty."""
        dtype, device = self._torch_dtypes[spec.dtype], self._torch.device(str(spec.device))
        return partial(
            self._torch.empty_strided, spec.shape, spec.strides, dtype=dtype, device=device
        )

    @cached_property
    def _increment_version(self) -> Callable[[Any], None]:
        increment: Callable[[Any], None] = self._torch.autograd.graph.increment_version
        return increment

    @cached_property
    def _plain_types(self) -> tuple[type, ...]:
        """Return the types of tensors that are no more than their memory."""
        nn = self._torch.nn
        return (self._torch.Tensor, nn.Parameter, getattr(nn, "Buffer", nn.Parameter))

    def signature(self, arrays: Sequence[Any], first_output: int) -> Signature | None:
        """Return dtype, shape, strides, alignment and device of tensors that `view` takes."""
        if self._fake_mode() is not None or self._forward_ad._current_level >= 0:
            return None
        plain_types, grad_enabled = self._plain_types, self._grad_enabled()
        facts: list[Any] = []
        pointers = []
        try:
            for array in arrays:
                if array is None:
                    facts.append(None)
                    pointers.append(0)
                    continue
                if type(array) not in plain_types or array.is_neg():
                    return None
                pointer = array.data_ptr()
                if (not pointer and array.numel()) or (grad_enabled and array.requires_grad):
                    return None
                pointers.append(pointer)
                if array.is_cpu:
                    facts += (array.dtype, array.shape, array.stride(), pointer & 7)
                elif array.is_cuda:
                    facts += (array.dtype, array.shape, array.stride(), pointer & 15)
                    facts.append(array.get_device())
                else:
                    return None
        except RuntimeError:  # as in `view`
            return None
        return facts, pointers

    def allocator(self, spec: TensorSpec, *, has_model: bool) -> Callable[[Any], Any]:
        """Return torch.empty_like for a model, as there is less to parse."""
        if has_model:
            like: Callable[[Any], Any] = self._torch.empty_like
            return like
        empty = self._empty(spec)
        return lambda model: empty()

    @cached_property
    def pointer(self) -> Callable[[Any], int]:
        """Return what returns the address of a tensor's first element."""
        pointer: Callable[[Any], int] = self._torch.Tensor.data_ptr
        return pointer

    def bump_version(self, arrays: Sequence[Any]) -> None:
        """Count a write to each tensor: autograd may have saved it."""
        for array in arrays:
            if array is not None:
                self._increment_version(array)

    def contiguous(self, view: ArrayView) -> ArrayView:
        """Copy into C order, on the current stream."""
        spec = view.spec
        tensor = view.owner.as_strided(spec.shape, spec.strides).contiguous()
        copy = contiguous(spec.shape, spec.dtype, spec.device)
        return new_view(tensor.data_ptr(), copy, tensor, self)

    def export(self, view: ArrayView) -> Any:
        """Return the tensor; a write to one that was given is counted."""
        if not view.is_new:
            self.bump_version([view.owner])
        return view.owner

    @cached_property
    def _raw_stream(self) -> Callable[[int], int]:
        """Return what returns a stream as torch's own compiler asks for it: without an object."""
        raw: Callable[[int], int] = self._torch._C._cuda_getCurrentRawStream
        return raw

    def stream(self, device: Device) -> int:
        """Return torch's current stream on `device`."""
        return self._raw_stream(device.index)

    def device_scope(self, device: Device) -> AbstractContextManager[object]:
        """Make a CUDA device current."""
        if device.kind == "cpu":
            return nullcontext()
        scope: AbstractContextManager[object] = self._torch.cuda.device(device.index)
        return scope


def _state_refusal(where: str, argument: str, array: Any) -> Exception:
    """Return the error for a plain dense tensor in a state that one call undoes."""
    if array.is_neg():
        return ValueError(
            f"{where} has its negative bit set, expected plain values: pass "
            f"{argument}.resolve_neg()"
        )
    if not array.data_ptr():
        return ValueError(
            f"{where} has no memory behind it (freed storage, or a zero tensor of autograd's), "
            f"expected a tensor with data: pass {argument}.clone() of one that has"
        )
    if array.data_ptr() % array.element_size():
        return unaligned(where, f"{argument}.clone()")
    return ValueError(
        f"{where} requires grad, which this function does not record: use cunorm.torch, "
        f"torch.no_grad() or {argument}.detach()"
    )


TORCH = TorchAdapter()
