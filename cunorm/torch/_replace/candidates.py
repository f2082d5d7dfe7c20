# SPDX-License-Identifier: MIT
"""Which modules may normalise: those that a report has."""

import torch
from torch.nn import Module

from cunorm.torch._replace.trial import EPS_NAMES, NORM_FUNCTIONS


def name_of(module: Module) -> str:
    """Return the name of a module's class; of a scripted module, that which was scripted."""
    name = getattr(module, "original_name", None) if isinstance(module, _SCRIPTED) else None
    return name or type(module).__name__


def may_normalise(module: Module) -> bool:
    """Return whether a module is called norm, has an eps, or calls a norm of torch's."""
    if "norm" in name_of(module).lower():
        return True
    kind = type(module)
    return not kind.__module__.startswith("torch.nn.modules.") and (
        any(_has(module, name) for name in EPS_NAMES) or _calls_norm(module)
    )


_SCRIPTED = torch.jit.ScriptModule


def _has(module: Module, name: str) -> bool:
    """Return whether a module has an attribute itself: a wrapper has those of what it wraps."""
    attributes = (vars(module), module._parameters, module._buffers)
    return any(name in names for names in attributes) or hasattr(type(module), name)


def _calls_norm(module: Module) -> bool:
    """Return whether forward's code names a function such as layer_norm; not one of its modules."""
    code = getattr(type(module).forward, "__code__", None)
    names = () if code is None else code.co_names
    return any(name.endswith(NORM_FUNCTIONS) and not hasattr(module, name) for name in names)
