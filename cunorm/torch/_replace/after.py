# SPDX-License-Identifier: MIT
"""The submodules that run on a norm's result: whether they compute an activation of cunorm's."""

import copy
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, functional

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
_COMMUTING = ("identity", "relu")  # with a rounding
# Four roundings of float32, relative to the larger of 1 and |x|: swish(x) and the like multiply.
_ERROR = 2.0**-21
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: Module) -> bool:
    return any(getattr(module, name) for name in _HOOKS)


class Activation(NamedTuple):
    """An activation of cunorm's that modules of these classes compute one after another."""

    name: str
    kinds: tuple[type[Module], ...]

    def is_of(self, *modules: Module) -> bool:
        """Return whether modules have these classes and no hooks, which would see their results."""
        return self.kinds == tuple(map(type, modules)) and not any(map(has_hooks, modules))


def activation_of(module: Module, names: tuple[str, ...], exact: bool) -> Activation | None:
    """Return the activation that submodules of these names compute, or None.

    If `exact`, it must also give the same numbers of a norm that is not rounded before it.
    """
    modules = [getattr(module, name) for name in names]
    found = [name for name in map(_activation, modules) if name != "identity"] or ["identity"]
    name = found[0]
    if not modules or len(found) > 1 or name is None or (exact and name not in _COMMUTING):
        return None
    return Activation(name, tuple(map(type, modules)))


def _activation(module: Module) -> str | None:
    """Return which activation a module computes, also in training, with its gradient."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    if "forward" in vars(module) or module._modules or any(one is not None for one in tensors):
        return None
    trial = copy.copy(module)
    x = torch.linspace(-20, 20, 1000, dtype=torch.float32, device="cpu").requires_grad_()
    try:
        computed = []
        for trial.training in (True, False):
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                computed.append(_with_slope(type(trial).forward.__get__(trial), x))
    except Exception:  # its forward takes more than x, for example
        return None
    scale = x.detach().abs().clamp(min=1).double()
    for name, function in _ACTIVATIONS.items():
        exact = _with_slope(function, x.double())
        if all((y - e).abs().le(_ERROR * scale).all() for y, e in _pairs(computed, exact)):
            return name
    return None


def _with_slope(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = function(x.clone())  # the function may work in place
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError(y)
    return [y.detach(), *torch.autograd.grad(y.sum(), x)]


def _pairs(computed: list[list[Tensor]], exact: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [pair for each in computed for pair in zip(each, exact, strict=True)]
