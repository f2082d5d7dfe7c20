# SPDX-License-Identifier: MIT
"""Which tensors the kernels read, and which only the operators of torch's dispatcher take."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from cunorm._arrays.torch import PLAIN_TYPES, TORCH_DTYPES
from cunorm._core.validate import describe_type

_DTYPES = frozenset(TORCH_DTYPES.values())
_DEVICES = ("cpu", "cuda", "meta")  # of meta tensors operators return the shapes
# Subclasses that run any operator on the tensors that they wrap, by name: torch.distributed may be
# absent.
_WRAPPERS = (FakeTensor, FunctionalTensor)
_COLLECTIVE = ("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
_disabled_dispatch: Any = torch.Tensor.__torch_dispatch__
_strided = torch.strided
Shapeless = torch.nn.parameter.UninitializedTensorMixin


def refusal(*tensors: Any) -> str | None:
    """Return why neither cunorm's kernels nor its operators can take tensors; None: they can.

    Some may be None. Meta and fake tensors are taken: of those an operator returns the shapes. It
    says nothing of shapes, nor of dtypes or devices that do not go together. It costs some 0.2 us
    a tensor, so a caller may also run first, and ask when there is an error.
    """
    for tensor in tensors:
        is_usual = tensor is None or (
            type(tensor) in PLAIN_TYPES
            and (tensor.is_cpu or tensor.is_cuda)
            and tensor.dtype in _DTYPES
            and tensor.layout is _strided
            and not tensor.is_nested
        )
        why = None if is_usual else what_refuses(tensor)
        if why is not None:
            return f"a tensor {why}"
    return None


def what_refuses(tensor: Any) -> str | None:
    """Return what is wrong with a tensor, as a predicate, None where nothing is."""
    kind = type(tensor)
    if not isinstance(tensor, torch.Tensor):
        return f"is {describe_type(kind)}"
    if not is_dense(tensor):
        what = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
        return "has no shape yet" if isinstance(tensor, Shapeless) else what
    if tensor.device.type not in _DEVICES:
        return f"is on device {tensor.device}"
    if tensor.dtype not in _DTYPES:
        return f"has dtype {str(tensor.dtype).removeprefix('torch.')}"
    is_known = issubclass(kind, _WRAPPERS) or (kind.__module__, kind.__name__) == _COLLECTIVE
    if not is_known and not has_plain_memory(kind):
        return f"is {describe_type(kind)}, which has operators of its own"
    return None


def is_dense(tensor: Any) -> bool:
    """Whether a tensor has a shape, and an element for each place of it."""
    is_shapeless = isinstance(tensor, Shapeless)
    return not is_shapeless and tensor.layout is _strided and not tensor.is_nested


def has_plain_memory(kind: Any) -> bool:
    """Whether tensors of a class are their memory, whatever its functions are."""
    return kind.__torch_dispatch__ is _disabled_dispatch


def needs_operator(tensor: Any) -> bool:
    """Whether the kernels refuse an operand, and torch's dispatcher may hand on another.

    So it does where memory is missing or is not all there is: meta tensors, wrappers, lazy
    negations, zeros of autograd. The kernels' refusals tell, so no other call pays for this.
    """
    return isinstance(tensor, torch.Tensor) and (
        type(tensor) not in PLAIN_TYPES
        or tensor.is_meta
        or tensor.is_neg()
        or tensor._is_zerotensor()
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # by a transform that is over
    )


def unwrapped(tensor: Any) -> Any:
    """Return a tensor of a subclass that is its memory as a plain one, others as they are."""
    kind = type(tensor)
    if tensor is None or kind in PLAIN_TYPES or not has_plain_memory(kind):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)
