# SPDX-License-Identifier: MIT
"""The settings of a module: those attributes of its instance that may change what it computes."""

from typing import Any

import torch
from torch.nn import Module

Settings = tuple[tuple[str, Any], ...]  # by name, values with their types: 1 equals True

_MODULE_ATTRIBUTES = frozenset(vars(Module()))
_SIMPLE = (int, float, str, bool, type(None), torch.dtype)


def own_attributes(module: Module) -> dict[str, Any]:
    """Return an instance's attributes without those that every module has, such as training."""
    attributes = module.__dict__.items()
    return {name: value for name, value in attributes if name not in _MODULE_ATTRIBUTES}


def is_simple(value: object) -> bool:
    if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
        return all(map(is_simple, value))
    return type(value) in _SIMPLE  # other values may have equal reprs


def typed(value: object) -> object:
    """Return a value with its type, and those of a tuple's elements."""
    if isinstance(value, tuple):
        return tuple([typed(one) for one in value])
    return type(value), value


def settings_of(module: Module) -> Settings | None:
    """Return a module's settings; None if not all are simple, or if it has tensors or parts."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    attributes = own_attributes(module)
    if module._modules or any(one is not None for one in tensors):
        return None
    if not all(map(is_simple, attributes.values())):
        return None
    return tuple([(name, typed(value)) for name, value in attributes.items()])


def simple_settings(module: Module, eps: str) -> Settings:
    """Return those settings of a module that are simple, without its eps."""
    attributes = own_attributes(module).items()
    return tuple((n, typed(value)) for n, value in attributes if n != eps and is_simple(value))


def key_of(module: Module) -> object:
    """Return a key of all that a probe depends on, or a unique key if a value is not simple."""
    values = own_attributes(module)
    if not is_simple((*values.values(),)):
        return object()
    tensors = [
        (name, None if tensor is None else (tensor.shape, tensor.dtype))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    ]
    children = [(name, child and key_of(child)) for name, child in module._modules.items()]
    return type(module), repr((values, tensors)), (*children,)  # repr, because 1 equals True
