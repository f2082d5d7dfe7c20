# SPDX-License-Identifier: MIT
"""The ways in which a call can be made, and which one a call takes."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import torch
from torch.autograd import forward_ad

from cunorm._core.dtypes import parse_optional_dtype

_PLAIN = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter))


class Way(Enum):
    """How a call is made."""

    PLAIN = auto()  # the function of cunorm's: no gradient is recorded
    RECORDED = auto()  # by an `autograd.Function`, which costs a sixth of what an operator does
    OPERATOR = auto()  # by an operator of torch's dispatcher, which others than autograd can see
    TRANSFORMED = auto()  # by one inside a function that torch.func knows how to transform


def way_of(function: str, names: Iterable[str], arrays: tuple[Any, ...]) -> Way:
    """Return how to make a call on tensors, some of which are None, but x."""
    if torch.compiler.is_compiling():
        return Way.OPERATOR
    if torch._C._are_functorch_transforms_active():
        return Way.TRANSFORMED
    way = Way.PLAIN
    for name, array in zip(names, arrays, strict=True):
        if type(array) not in _PLAIN:
            if array is None and name != "x":
                continue
            if not isinstance(array, torch.Tensor):
                got = "None" if array is None else f"a {type(array).__qualname__}"
                raise TypeError(f"{function}: {name} is {got}, expected a torch.Tensor")
            way = Way.OPERATOR
        elif array.requires_grad and way is Way.PLAIN:
            way = Way.RECORDED
    if torch._C._len_torch_dispatch_stack():  # a mode, as FakeTensorMode, is to see the call
        return Way.OPERATOR
    if forward_ad._current_level >= 0 and way is Way.PLAIN:
        return Way.RECORDED  # which refuses tensors that have a tangent
    return Way.PLAIN if way is Way.RECORDED and not torch.is_grad_enabled() else way


@torch.compiler.assume_constant_result  # which torch.compile could not follow
def torch_dtype(function: str, argument: str, spec: Any) -> torch.dtype | None:
    """Return torch's dtype of that name, or of that dtype of any framework's."""
    if spec is None or isinstance(spec, torch.dtype):
        return spec
    dtype: torch.dtype = getattr(torch, str(parse_optional_dtype(function, argument, spec)))
    return dtype


def resolved(gradient: Any) -> Any:
    """Return a gradient that may be None, as plain values: autograd may bring a negated view."""
    return None if gradient is None else gradient.resolve_neg()


def any_batched(*gradients: Any) -> bool:
    """Whether gradients come as batches, as for a vectorised Jacobian."""
    if torch._C._are_functorch_transforms_active():
        return True
    is_legacy = torch._C._functorch.is_legacy_batchedtensor  # of is_grads_batched
    return any(one is not None and is_legacy(one) for one in gradients)
