# SPDX-License-Identifier: MIT
"""The submodules that run on a norm's result: whether they compute an activation of cunorm's."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, functional

from cunorm._arrays._torch_private import has_global_hooks
from cunorm.torch._replace.settings import Settings, settings_of

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


def is_seen(module: Module) -> bool:
    """Return whether something may see or change a call: hooks, or a forward of the instance."""
    has_hooks = any(getattr(module, name) for name in _HOOKS) or has_global_hooks()
    return bool(has_hooks) or "forward" in module.__dict__


class Activation(NamedTuple):
    """An activation of cunorm's that modules of these classes compute one after another."""

    name: str
    kinds: tuple[type[Module], ...]
    settings: tuple[Settings | None, ...]

    def is_of(self, *modules: Module) -> bool:
        """Return whether modules have these classes and settings, and nothing sees their calls."""
        if self.kinds != tuple(map(type, modules)) or any(map(is_seen, modules)):
            return False
        return self.settings == tuple(map(settings_of, modules))


def activation_of(modules: Sequence[Module], exact: bool) -> Activation | None:
    """Return the activation that modules compute one after another, or None.

    If `exact`, it must also give the same numbers of a norm that is not rounded before it.
    """
    found = [name for name in map(_activation, modules) if name != "identity"] or ["identity"]
    name = found[0]
    if not modules or len(found) > 1 or name is None or (exact and name not in _COMMUTING):
        return None
    return Activation(name, tuple(map(type, modules)), tuple(map(settings_of, modules)))


def _activation(module: Module) -> str | None:
    """Return which activation a module computes, also in training, with its gradient."""
    has_own_call = type(module).__call__ is not Module.__call__
    if "forward" in vars(module) or has_own_call or settings_of(module) is None:
        return None
    trial = copy.copy(module)
    x = _numbers()
    try:
        computed = []
        for trial.training in (True, False):
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                computed.append(_with_slope(type(trial).forward.__get__(trial), x))
    except Exception:  # its forward takes more than x, for example
        return None
    scale = x.abs().clamp(min=1).double()
    scales = [scale, scale.clamp(max=20)]  # of y and of its slope, which is about 1
    for name, function in _ACTIVATIONS.items():
        exact = _with_slope(function, x.double())
        if all(
            bool((y - e).abs().le(_ERROR * size).all())
            for each in computed
            for y, e, size in zip(each, exact, scales, strict=True)
        ):
            return name
    return None


def _numbers() -> Tensor:
    """Return numbers of all sizes: a bound of large ones, or a step near 0, must be seen."""
    near = torch.linspace(-20, 20, 1000, dtype=torch.float64, device="cpu")
    sizes = torch.logspace(-8, 4, 500, dtype=torch.float64, device="cpu")
    return torch.cat([near, sizes, -sizes, torch.zeros_like(near[:1])]).float()


def _with_slope(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = function(x.clone())  # the function may work in place
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError(y)
    return [y.detach(), *torch.autograd.grad(y.sum(), x)]
