# SPDX-License-Identifier: MIT
"""The classes of replaced norms: their forward calls cunorm, or the module's own where it cannot.

The module stays the same object. `torch.nn.utils.parametrize` works in the same way.
"""

import warnings
from collections.abc import Callable
from inspect import signature
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn import Module

from cunorm._arrays._torch_private import has_dual_level
from cunorm.torch._modules import GroupNorm, LayerNorm, RMSNorm
from cunorm.torch._replace.plan import Plan
from cunorm.torch._tensors import refusal

# The norms of torch.nn need no probe and run in all dtypes: our class.
TORCH_NORMS: dict[type[Module], type[RMSNorm | LayerNorm | GroupNorm]] = {
    torch.nn.RMSNorm: RMSNorm,
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.GroupNorm: GroupNorm,
}
_is_compiling = torch.compiler.is_dynamo_compiling  # False outside of what torch.compile follows
_MAX_WARNINGS = 16  # for a class


class Swapped(Module):
    """What the class of a replaced norm has of its own; it is a subclass of the module's class."""

    _cunorm_kind: type[Module]
    _cunorm_plan: Plan  # or, of a norm of torch.nn, None
    _cunorm_warned: set[str]
    _cunorm_calls: dict[tuple[object, bool], tuple[Callable[..., Tensor], float | None]]
    _cunorm_own: Callable[..., Any]


def torch_norm(kind: type[Module]) -> type[Module] | None:
    """Return the norm of torch.nn whose forward a class has or inherits, or None."""
    bases = (base for base in TORCH_NORMS if issubclass(kind, base))
    return next((base for base in bases if kind.forward is base.forward), None)


def swapped(kind: type[Module], plan: Plan | None) -> type[Module]:
    """Return the subclass of kind that runs cunorm; plan is None where the forward is torch's.

    Python itself lists the living subclasses of a class: a cache would keep kind alive.
    """
    for subclass in kind.__subclasses__():
        own = vars(subclass)
        if own.get("_cunorm_kind") is kind and own["_cunorm_plan"] == plan:
            return subclass
    members: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    members |= {"__reduce_ex__": _reduce, "__prepare_scriptable__": _scriptable}
    members |= {"_cunorm_kind": kind, "_cunorm_plan": plan, "_cunorm_warned": set()}
    members |= {"_cunorm_own": _own}
    base = torch_norm(kind)
    if plan is not None:
        calls = {(pair, gated): recipe.call(*pair) for pair, gated, recipe, _ in plan.matches}
        members |= {"forward": _forward, "_cunorm_calls": calls}
    elif base is not None:
        ours = TORCH_NORMS[base]
        members |= {name: getattr(ours, name) for name in ours.__annotations__}
        members["forward"] = _forward_of(base)
    return type(f"Cunorm{kind.__name__}", (kind,), members)


def _forward_of(base: type[Module]) -> Callable[..., object]:
    """Return the forward that runs our module in place of torch's, with torch's name of x."""
    run: Callable[..., Tensor] = TORCH_NORMS[base].forward

    def named_input(self: Swapped, input: Tensor) -> object:
        if _is_compiling() and _is_refused(self, input):
            return base.forward(self, input)
        try:
            return run(self, input)
        except Exception as error:
            return self._cunorm_own(error, (input,), {})

    def named_x(self: Swapped, x: Tensor) -> object:
        if _is_compiling() and _is_refused(self, x):
            return base.forward(self, x)
        try:
            return run(self, x)
        except Exception as error:
            return self._cunorm_own(error, (x,), {})

    forward = named_x if "x" in signature(base.forward).parameters else named_input
    forward.__qualname__ = f"{base.__name__}.forward"  # in errors about arguments
    return forward


def _is_refused(self: Module, *operands: object) -> bool:
    """Whether cunorm cannot run: torch.compile, which follows this, lets nobody catch errors."""
    return refusal(*operands, *self._parameters.values()) is not None


def _forward(self: Swapped, *args: Any, **named: Any) -> object:
    """Run the recipe for these dtypes; if there is none, the module's own forward."""
    plan = self._cunorm_plan
    x, gate = _operands(plan.arguments, args, named)
    parameters = [getattr(self, name) for name in plan.parameters]
    weight = parameters[0] if parameters else x
    pair = (getattr(x, "dtype", None), getattr(weight, "dtype", None))
    call = self._cunorm_calls.get((pair, gate is not None))
    if (
        call is None
        or x.dim() not in plan.axes
        or (gate is not None and (gate.dtype, gate.shape) != (x.dtype, x.shape))
        or (not plan.under_autocast and torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"))
        or (_is_compiling() and _is_refused(self, x, gate))
    ):
        return self._cunorm_kind.forward(self, *args, **named)
    function, offset = call
    if offset is not None:
        parameters[0] = parameters[0] + offset
    eps = getattr(self, plan.eps)
    try:
        if gate is None:
            return function(x, *parameters, eps=eps)
        return function(x, *parameters, eps=eps, gate=gate)
    except Exception as error:
        return self._cunorm_own(error, args, named)


def _own(
    self: Swapped, error: Exception, args: tuple[object, ...], named: dict[str, object]
) -> object:
    """Run the module's own forward where cunorm's operators cannot run; warn of each reason once.

    Where they can, the error is raised; and what fails in the own forward, too, needs no warning.
    """
    reason = _reason(error, (*args, *named.values(), *self._parameters.values()))
    if reason is None:
        raise error
    y = self._cunorm_kind.forward(self, *args, **named)
    _warn(type(self), f"a replaced norm runs its own forward: {reason}")
    return y


def _reason(error: Exception, operands: tuple[object, ...]) -> str | None:
    """Return why cunorm raised an error, None if for no reason in a call."""
    refused = refusal(*operands)
    if refused is None and has_dual_level():
        return "cunorm has no forward-mode derivatives"
    if refused is None and isinstance(error, (TypeError, ValueError)):
        return str(error)  # raised before anything runs
    return refused


def _warn(kind: type[Swapped], text: str) -> None:
    """Warn of what was not warned of; as texts have shapes, there may be any number of them."""
    warned = kind._cunorm_warned
    if text not in warned and len(warned) < _MAX_WARNINGS:
        warned.add(text)
        warnings.warn(f"{kind._cunorm_kind.__name__}: {text}", stacklevel=4)


def _scriptable(self: Any) -> Any:
    """Give the module its class back, as torch.jit.script puts what this returns into the model."""
    kind = type(self)
    self.__class__ = kind._cunorm_kind
    why = "torch.jit.script cannot compile cunorm's forward, so the norm has its own again"
    _warn(kind, f"{why}: call replace_norms afterwards")
    return self


def _operands(names: tuple[str, ...], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return x and gate, None where there is none, and neither if there is anything else."""
    if len(args) == 1 and not named:
        return args[0], None
    rest = names[len(args) :]
    if len(args) > len(names) or any(name not in rest for name in named):
        return None, None
    return (*args, *map(named.get, rest), None)[:2]


def _reduce(self: Swapped, protocol: SupportsIndex) -> tuple[object, ...]:
    """Pickle and copy a module by its original class and plan, as pickle finds no swapped class."""
    kind = type(self)
    reduced = kind._cunorm_kind.__reduce_ex__(self, protocol)  # type: ignore[call-arg]
    return (_new, (kind._cunorm_kind, kind._cunorm_plan), *reduced[2:])


def _new(kind: type[Module], plan: Plan | None) -> Module:
    subclass: Any = swapped(kind, plan)
    return subclass.__new__(subclass)
