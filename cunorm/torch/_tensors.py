# SPDX-License-Identifier: MIT
"""Which tensors the kernels read, and which only the operators of torch's dispatcher take."""

import torch
from torch import Tensor

from cunorm._arrays import _torch_private
from cunorm._arrays.torch import PLAIN_TYPES, TORCH_DTYPES
from cunorm._core.validate import describe_type

_DTYPES = frozenset(TORCH_DTYPES.values())
_DEVICES = ("cpu", "cuda", "meta")  # of meta tensors operators return the shapes
_disabled_dispatch = Tensor.__torch_dispatch__
_strided = torch.strided
Shapeless = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)


def refusal(*tensors: object) -> str | None:
    """Return why neither cunorm's kernels nor its operators can take tensors; None: they can.

    Some may be None. Meta and fake tensors are taken: of those an operator returns the shapes. It
    says nothing of shapes, nor of dtypes or devices that do not go together.
    """
    for tensor in tensors:
        reason = None if tensor is None else what_refuses(tensor)
        if reason is not None:
            return f"a tensor {reason}"
    return None


def what_refuses(tensor: object) -> str | None:
    """Return what is wrong with a tensor, as a predicate, None where nothing is."""
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
    is_known = kind in PLAIN_TYPES or _torch_private.is_wrapper(kind) or has_plain_memory(kind)
    if not is_known:
        return f"is {describe_type(kind)}, which has operators of its own"
    return None


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has a shape, and an element for each place of it."""
    is_shapeless = isinstance(tensor, Shapeless)
    return not is_shapeless and tensor.layout is _strided and not tensor.is_nested


def has_plain_memory(kind: type[Tensor]) -> bool:
    """Whether tensors of a class are their memory, whatever its functions are."""
    return kind.__torch_dispatch__ is _disabled_dispatch


def needs_operator(tensor: object) -> bool:
    """Whether the kernels refuse an operand, and torch's dispatcher may hand on another.

    So it does where memory is missing or is not all there is: meta tensors, wrappers, lazy
    negations, zeros of autograd. The kernels' refusals tell, so no other call pays for this.
    """
    return isinstance(tensor, torch.Tensor) and (
        type(tensor) not in PLAIN_TYPES
        or tensor.is_meta
        or tensor.is_neg()
        or _torch_private.is_zero(tensor)
        or _torch_private.is_wrapped(tensor)  # by a transform that is over
    )


def unwrapped(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor of a subclass that is its memory as a plain one, others as they are."""
    if tensor is None or type(tensor) in PLAIN_TYPES or not has_plain_memory(type(tensor)):
        return tensor
    return tensor.as_subclass(torch.Tensor)  # its functions are off inside an operator
