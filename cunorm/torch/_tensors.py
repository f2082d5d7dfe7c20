# SPDX-License-Identifier: MIT
"""Which tensors the kernels read, and which only the operators of torch's dispatcher take."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from cunorm._arrays.torch import PLAIN_TYPES, TORCH_DTYPES
from cunorm._core.validate import of_type

_DTYPES = frozenset(TORCH_DTYPES.values())
_DEVICES = ("cpu", "cuda", "meta")  # of meta tensors operators return the shapes
# Subclasses that run any operator on the tensors that they wrap, by name: torch.distributed may be
# absent.
_WRAPPERS = (FakeTensor, FunctionalTensor)
_COLLECTIVE = ("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
_disabled_dispatch: Any = torch.Tensor.__torch_dispatch__
_strided = torch.strided


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
        reason = None if is_usual else _reason(tensor)
        if reason is not None:
            return reason
    return None


def has_plain_memory(kind: type) -> bool:
    """Whether tensors of a class are their memory: operators are not the class's own."""
    lazy = torch.nn.parameter.UninitializedTensorMixin
    return kind.__torch_dispatch__ is _disabled_dispatch and not issubclass(kind, lazy)  # type: ignore[attr-defined]


def _reason(tensor: Any) -> str | None:
    kind = type(tensor)
    if not isinstance(tensor, torch.Tensor):
        return f"an operand is {of_type(kind)}, not a tensor"
    if issubclass(kind, torch.nn.parameter.UninitializedTensorMixin):
        return "a tensor has no shape yet"
    if tensor.is_nested:
        return "a tensor is nested"
    if tensor.layout is not torch.strided:
        return f"a tensor has layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.device.type not in _DEVICES:
        return f"a tensor is on device {tensor.device}"
    if tensor.dtype not in _DTYPES:
        return f"a tensor has dtype {str(tensor.dtype).removeprefix('torch.')}"
    is_known = issubclass(kind, _WRAPPERS) or (kind.__module__, kind.__name__) == _COLLECTIVE
    if not is_known and not has_plain_memory(kind):
        return f"a tensor is {of_type(kind)}, which has operators of its own"
    return None
