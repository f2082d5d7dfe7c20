# SPDX-License-Identifier: MIT
"""Which tensors the kernels read, which only an operator takes, and which cunorm refuses."""

import torch
from torch import Tensor

from cunorm._arrays import _torch_private
from cunorm._arrays.torch import PLAIN_TYPES, TORCH_DTYPES
from cunorm._core.validate import describe_type

_DTYPES = frozenset(TORCH_DTYPES.values())
_DEVICES = ("cpu", "cuda", "meta")  # operators on meta return only shapes
_disabled_dispatch = Tensor.__torch_dispatch__
_strided = torch.strided
Shapeless = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)


def refusal(*tensors: object) -> str | None:
    """Return why neither cunorm's kernels nor its operators take one of the tensors, or None."""
    for tensor in tensors:
        reason = None if tensor is None else what_refuses(tensor)
        if reason is not None:
            return f"a tensor {reason}"
    return None


def what_refuses(tensor: object) -> str | None:
    """Return a predicate that says why cunorm refuses a tensor, or None if it takes the tensor."""
    if not isinstance(tensor, Tensor):
        return f"is {describe_type(type(tensor))}"
    if not is_dense(tensor):
        what = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
        return "has no shape yet" if isinstance(tensor, Shapeless) else what
    if tensor.device.type not in _DEVICES:
        return f"is on device {tensor.device}"
    if tensor.dtype not in _DTYPES:
        return f"has dtype {str(tensor.dtype).removeprefix('torch.')}"
    kind = type(tensor)
    if kind in PLAIN_TYPES or _torch_private.is_wrapper(kind) or has_plain_memory(kind):
        return None
    return f"is {describe_type(kind)}, which has operators of its own"


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape, and an element for each of its indices."""
    is_shapeless = isinstance(tensor, Shapeless)
    return not is_shapeless and tensor.layout is _strided and not tensor.is_nested


def has_plain_memory(kind: type[Tensor]) -> bool:
    """Return whether a class has no `__torch_dispatch__`: its tensors are plain memory."""
    return kind.__torch_dispatch__ is _disabled_dispatch


def needs_operator(tensor: object) -> bool:
    """Return whether the kernels refuse an operand that an operator of torch's dispatcher may take.

    Such operands are meta tensors, tensor subclasses, lazy negations and zeros of autograd.
    """
    return isinstance(tensor, torch.Tensor) and (
        type(tensor) not in PLAIN_TYPES
        or tensor.is_meta
        or tensor.is_neg()
        or _torch_private.is_zero(tensor)
        or _torch_private.is_wrapped(tensor)  # by a transform that has ended
    )


def unwrapped(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor of a subclass with plain memory as a plain tensor, any other as it is."""
    if tensor is None or type(tensor) in PLAIN_TYPES or not has_plain_memory(type(tensor)):
        return tensor
    return tensor.as_subclass(torch.Tensor)  # `__torch_function__` is off inside an operator
