# SPDX-License-Identifier: MIT
"""DispatchMode: how a call is made."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch.autograd import forward_ad

from cunorm._arrays.registry import view
from cunorm._arrays.torch import PLAIN_TYPES

_NUMBERS = (int, float)
# Looked up once: together they take a tenth of a call.
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_is_transforming = torch._C._are_functorch_transforms_active
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_batch = torch._C._functorch.is_batchedtensor
_count_modes = torch._C._len_torch_dispatch_stack


class DispatchMode(Enum):
    """How a call is made."""

    PLAIN = auto()  # by `cunorm._dispatch`: no gradient is recorded
    AUTOGRAD = auto()  # by an `autograd.Function`, which costs a sixth of what an operator does
    OPERATOR = auto()  # by an operator of torch's dispatcher, which tensor subclasses and modes see
    TRANSFORMED = auto()  # by an operator in a Function that torch.func can transform


def dispatch_mode(function: str, names: Sequence[str], arrays: tuple[Any, ...]) -> DispatchMode:
    """Return how to call a function on tensors, of which all but the first, x, may be None."""
    if _is_compiling():
        return DispatchMode.OPERATOR
    if _is_transforming():
        return DispatchMode.TRANSFORMED
    requires_grad = False
    for array in arrays:
        if array is None:
            continue
        if type(array) not in PLAIN_TYPES or _is_wrapped(array):  # by a transform that is over
            _check_tensors(function, names, arrays)
            return DispatchMode.OPERATOR
        requires_grad = requires_grad or array.requires_grad
    if arrays[0] is None:
        _check_tensors(function, names, arrays)
    if _count_modes():  # a mode, as FakeTensorMode, is to see the call
        return DispatchMode.OPERATOR
    if forward_ad._current_level >= 0:  # tensors may have tangents, which the Function refuses
        return DispatchMode.AUTOGRAD
    is_recorded = requires_grad and _is_grad_enabled()
    return DispatchMode.AUTOGRAD if is_recorded else DispatchMode.PLAIN


def _check_tensors(function: str, names: Sequence[str], arrays: tuple[Any, ...]) -> None:
    """Check that every operand is a tensor; all but x may be None."""
    for name, array in zip(names, arrays, strict=True):
        if isinstance(array, torch.Tensor):
            if _is_batch(array):  # of a vmap that is over
                view(function, name, array)  # raises
        elif array is not None or name == "x":
            got = "None" if array is None else f"a {type(array).__qualname__}"
            raise TypeError(f"{function}: {name} is {got}, expected a torch.Tensor")


def specialized(scalar: Any) -> Any:
    """Return a scalar, as a number where torch.compile has a symbol: a set has none of those."""
    is_traced = torch.compiler.is_dynamo_compiling() and isinstance(scalar, _NUMBERS)
    return {scalar}.pop() if is_traced else scalar
