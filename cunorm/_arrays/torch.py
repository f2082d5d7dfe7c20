# SPDX-License-Identifier: MIT
"""PyTorch tensors, on the CPU and on CUDA. The first tensor in any call imports this module.

A view reads a tensor's attributes, which takes a tenth of the time that ``__dlpack__`` takes.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from cunorm._arrays import _torch_private
from cunorm._arrays._torch_private import count_modes, has_dual_level, has_tangent, is_tracing
from cunorm._arrays.adapter import ArrayAdapter, Signature, check_contiguous, new_view, unaligned
from cunorm._core.dtypes import ALL_DTYPES, DTYPES, DType, allowed, expected_dtypes
from cunorm._core.tensor import CPU, ArrayView, Device, TensorSpec, bytes_spec

_DTYPES: dict[torch.dtype, DType] = {
    getattr(torch, name): dtype for name, dtype in ALL_DTYPES.items() if hasattr(torch, name)
}
RESULT_DTYPES = {dtype: torch_dtype for torch_dtype, dtype in _DTYPES.items()}
TORCH_DTYPES = {dtype: RESULT_DTYPES[dtype] for dtype in DTYPES.values()}  # of operands
# Types of tensors that are nothing but their memory.
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter))
_PIECES = ("row_moments", "combine_moments", "normalize_backward_sums")
_QUANTIZED = "_quantized"  # the end of the names of functions whose results have no gradient
_increment_version: Callable[[Tensor], None] = torch.autograd.graph.increment_version
_is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled


class TorchAdapter(ArrayAdapter):
    """PyTorch tensors, made by its allocator and ordered on its current stream."""

    allocates_like = True
    pointer = staticmethod(torch.Tensor.data_ptr)

    def accepts(self, function: str, argument: str, kind: type) -> bool:
        if kind in PLAIN_TYPES:
            return True
        if issubclass(kind, torch.Tensor):
            raise TypeError(
                f"{function}: {argument} is of type {kind.__module__}.{kind.__qualname__}, a "
                "tensor subclass whose memory may not be what it stands for, expected a plain "
                "torch.Tensor: pass its local or plain tensor "
                f"({argument}.to_local() for a DTensor)"
            )
        return False

    def view(self, function: str, argument: str, array: Tensor) -> ArrayView:
        activity = _observer()
        if activity is not None:
            raise TypeError(
                f"{function}: {argument} is used where torch {activity}, expected plain calls: use "
                "cunorm.torch there"
            )
        pointer, device = _address_and_device(function, argument, array)
        dtype, is_recorded = _DTYPES.get(array.dtype), array.requires_grad and _is_grad_enabled()
        if (
            dtype is None
            or dtype.name not in allowed(argument)
            or array.is_neg()
            or is_recorded
            or pointer % dtype.itemsize
        ):
            raise _refusal(function, argument, array)
        if has_dual_level() and has_tangent(array):
            raise no_tangents(function, argument)
        spec = TensorSpec(tuple(array.shape), array.stride(), dtype, device)
        return ArrayView(pointer, spec, array, self, writable=True)

    def workspace_view(self, function: str, argument: str, array: Tensor) -> ArrayView:
        if array.dtype is not torch.uint8:
            return super().workspace_view(function, argument, array)
        pointer, device = _address_and_device(function, argument, array, torch.uint8)
        check_contiguous(function, argument, array.is_contiguous(), array.stride())
        return ArrayView(pointer, bytes_spec(array.numel(), device), array, self, writable=True)

    def signature(self, arrays: Sequence[Tensor | None], first_output: int) -> Signature | None:
        if is_tracing() or has_dual_level() or (count_modes() and _observer()):
            return None
        grad_enabled = _is_grad_enabled()
        key_parts: list[object] = []
        pointers = []
        try:
            for array in arrays:
                if array is None:
                    key_parts.append(None)
                    pointers.append(0)
                    continue
                if type(array) not in PLAIN_TYPES or array.is_neg():
                    return None
                pointer = array.data_ptr()
                if (not pointer and array.numel()) or (grad_enabled and array.requires_grad):
                    return None
                pointers.append(pointer)
                if array.is_cpu:
                    key_parts += (array.dtype, array.shape, array.stride(), pointer & 7)
                elif array.is_cuda:
                    key_parts += (array.dtype, array.shape, array.stride(), pointer & 15)
                    key_parts.append(array.get_device())
                else:
                    return None
        except RuntimeError:  # no address, see `_address_and_device`
            return None
        return key_parts, pointers

    def strides(self, array: Tensor) -> tuple[int, ...] | None:
        return array.stride()

    def contiguous_type(self, array: Tensor) -> Hashable:
        return (array.dtype, array.get_device()) if array.is_contiguous() else None

    def allocator(self, spec: TensorSpec, *, has_model: bool) -> Callable[[Tensor], Tensor]:
        if has_model:
            return torch.empty_like  # parses the fewest arguments, torch.empty the most
        dtype, device = torch_dtype(spec.dtype), torch.device(str(spec.device))
        empty = partial(torch.empty_strided, spec.shape, spec.strides, dtype=dtype, device=device)
        return lambda model: empty()

    def bump_version(self, arrays: Sequence[Tensor | None]) -> None:
        for array in arrays:
            if array is not None:
                _increment_version(array)

    def contiguous(self, view: ArrayView) -> ArrayView:
        spec = view.spec
        tensor = view.owner.as_strided(spec.shape, spec.strides).contiguous()
        return new_view(tensor.data_ptr(), spec.dense(), tensor, self)

    def stream(self, device: Device) -> int:
        return _torch_private.raw_stream(device.index)

    def device_scope(self, device: Device) -> AbstractContextManager[object]:
        return torch.cuda.device(device.index)


def torch_dtype(dtype: DType) -> torch.dtype:
    if dtype not in RESULT_DTYPES:
        raise TypeError(f"torch {torch.__version__} has no such dtype, expected 2.7 or later")
    return RESULT_DTYPES[dtype]


def _observer() -> str | None:
    """Describe an active mode of torch that would have to see our writes to memory; or None."""
    if is_tracing():
        return "records operations (torch.jit.trace)"
    if _torch_private.has_mode(_torch_private.FAKE):
        return "makes tensors without memory (FakeTensorMode)"
    has_proxies = _torch_private.has_mode(_torch_private.PROXY)
    return "records operations (make_fx)" if has_proxies else None


def _address_and_device(
    function: str, argument: str, array: Tensor, *more: torch.dtype
) -> tuple[int, Device]:
    """Return the address and device of a strided tensor with data; raise for other tensors."""
    try:
        pointer: int = array.data_ptr()
        array.stride()
    except RuntimeError:  # no address: sparse, nested, inside a transform
        raise _refusal(function, argument, array, *more) from None
    if not (array.is_cpu or array.is_cuda) or (not pointer and array.numel()):
        raise _refusal(function, argument, array, *more)
    return pointer, CPU if array.is_cpu else Device("cuda", array.get_device())


def dense_form(argument: str, array: Tensor) -> str:
    """Return the expression that makes a dense tensor of a sparse or a nested one."""
    padded = f"torch.nested.to_padded_tensor({argument}, 0.0)"
    return padded if array.is_nested else f"{argument}.to_dense()"


def _refusal(function: str, argument: str, array: Tensor, *more: torch.dtype) -> Exception:
    """Return the error for a tensor that `view` refuses; dtypes in `more` are allowed, too."""
    subject = f"{function}: {argument}"
    if array.layout is not torch.strided or array.is_nested:
        layout = "nested" if array.is_nested else array.layout
        return ValueError(
            f"{subject} has layout {layout}, expected a dense tensor: pass "
            f"{dense_form(argument, array)}"
        )
    if _torch_private.is_wrapped(array):
        return TypeError(
            f"{subject} is a tensor inside a torch.func transform (vmap, grad, jvp), expected a "
            "plain one: call this outside the transform"
        )
    if array.device.type not in ("cpu", "cuda"):
        fix = "use cunorm.torch, which takes meta tensors"
        fix = fix if array.is_meta else "pass a tensor with data there"
        return ValueError(f"{subject} is on device {array.device}, expected cpu or cuda: {fix}")
    name = str(array.dtype).removeprefix("torch.")
    if name not in allowed(argument) and array.dtype not in more:
        if array.is_quantized:
            expected = expected_dtypes(argument, name) + f": pass {argument}.dequantize()"
        else:
            is_integer = not (array.dtype.is_floating_point or array.dtype.is_complex)
            kind = "i" if is_integer else ""
            expected = expected_dtypes(argument, name, kind, f"{argument}.float()")
        return TypeError(f"{subject} has dtype {name}, {expected}")
    if array.is_neg():
        return ValueError(
            f"{subject} has its negative bit set, expected plain values: pass "
            f"{argument}.resolve_neg()"
        )
    if not array.data_ptr():
        return ValueError(
            f"{subject} has no memory behind it (freed storage, or a zero tensor of autograd's), "
            f"expected a tensor with data: pass {argument}.clone() of one that has"
        )
    if array.data_ptr() % array.element_size():
        return unaligned(subject, f"{argument}.clone()")
    return no_gradients(function, argument)


def no_gradients(function: str, argument: str) -> ValueError:
    """Return the error for a tensor that requires grad."""
    why = "which this function does not record: use cunorm.torch,"
    if function.endswith(_QUANTIZED):
        why = "but quantised results have no gradient: use"
    elif function in _PIECES:
        why = "which this function does not record: give process_group to a norm of cunorm.torch,"
    subject = f"{function}: {argument} requires grad"
    return ValueError(f"{subject}, {why} torch.no_grad() or {argument}.detach()")


def no_tangents(function: str, argument: str) -> ValueError:
    """Return the error for a tensor with a forward-mode tangent."""
    why = "which this call does not propagate: use cunorm.torch in eager mode, or"
    if function.endswith(_QUANTIZED):
        why = "but quantised results have no tangent: use"
    subject = f"{function}: {argument} has a forward-mode tangent"
    return ValueError(f"{subject}, {why} {argument}.detach()")


ADAPTER = TorchAdapter()
