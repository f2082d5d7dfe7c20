# SPDX-License-Identifier: MIT
"""The classes of replaced norms; `forward` calls cunorm, or as a fallback the own forward."""

import warnings
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn import Module

from cunorm.torch._functions import rms_norm
from cunorm.torch._module_options import NO_GROUPS, autocast_dtype, options_of
from cunorm.torch._modules import GroupNorm, LayerNorm, RMSNorm
from cunorm.torch._replace.after import is_seen
from cunorm.torch._replace.fuse import Fusion, rewritten
from cunorm.torch._replace.recipe import Plan
from cunorm.torch._replace.settings import typed
from cunorm.torch._tensors import refusal

# cunorm's class for each norm of torch.nn. These norms need no probe.
TORCH_NORMS: dict[type[Module], type[RMSNorm | LayerNorm | GroupNorm]] = {
    torch.nn.RMSNorm: RMSNorm,
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.GroupNorm: GroupNorm,
}
# What runs for each: only options that torch has, as others may be attributes that torch ignores.
_RUN: dict[type[Module], Callable[..., Tensor]] = {
    torch.nn.RMSNorm: lambda norm, x: rms_norm(
        x, norm.weight, **options_of(norm, x), dtype=autocast_dtype(x)
    ),
    torch.nn.LayerNorm: LayerNorm.forward,
    torch.nn.GroupNorm: lambda norm, x: GroupNorm._activated(norm, x, None),
}
_is_compiling = torch.compiler.is_dynamo_compiling  # False outside of code that dynamo traces
_MAX_WARNINGS = 16  # the most warnings for a class


class Swapped(Module):
    """A base class of a replaced norm's class; the other base is the module's original class."""

    _cunorm_kind: type[Module]  # the module's original class
    _cunorm_plan: Any  # a Plan; None for a norm of torch.nn; a Fusion for a block
    _cunorm_calls: dict[object, Callable[..., Tensor]]  # by the keys of `Plan.calls`
    _cunorm_warned: set[str]

    def forward(self, *args: Any, **named: Any) -> object:
        """Run the recipe for these dtypes, or the module's own forward if there is no recipe."""
        plan = self._cunorm_plan
        changed = _changed(self, plan)
        if changed is not None:
            return self._cunorm_instead(f"its {changed} has changed since", args, named)
        x, gate = _operands(plan.arguments, args, named)
        parameters = [_row(getattr(self, name)) for name in plan.parameters]
        call = self._cunorm_call(x, gate, parameters)
        if (
            call is None
            # Dynamo cannot trace the `except` below.
            or (_is_compiling() and refusal(x, gate, *self._parameters.values()) is not None)
        ):
            return self._cunorm_kind.forward(self, *args, **named)
        after = [getattr(self, name) for name in plan.after]
        options: dict[str, Any] = {"eps": getattr(self, plan.eps), "gate": gate}
        if plan.activation is not None and plan.activation.is_of(*after):
            options["activation"], after = plan.activation.name, []
        try:
            y = call(x, *parameters, **options)
        except Exception as error:
            return self._cunorm_own(error, args, named)
        for module in after:
            y = module(y)
        return y

    def _cunorm_call(
        self, x: Any, gate: Any, parameters: list[Tensor]
    ) -> Callable[..., Tensor] | None:
        """Return the call of the recipe for these operands, or None if there is no recipe."""
        if not isinstance(x, Tensor):
            return None
        device = "cuda" if x.is_cuda else "cpu"
        autocast = device if torch.is_autocast_enabled(device) else None
        pair = (x.dtype, parameters[0].dtype if parameters else x.dtype)
        if gate is not None and (gate.dtype, gate.shape) != (x.dtype, x.shape):
            return None
        first = self._cunorm_plan.axes.get(x.dim())
        return self._cunorm_calls.get((autocast, pair, gate is not None, first))

    def _cunorm_activated(self, x: Any, activation: Any) -> Tensor | None:
        """Return a group norm's activation in one call, or None if cunorm cannot run it so."""
        if refusal(x, *self._parameters.values()) is not None:
            return None
        plan = self._cunorm_plan
        try:
            if plan is None:
                module: Any = self
                return GroupNorm._activated(module, x, activation)
            if _changed(self, plan) is not None:
                return None
            parameters = [_row(getattr(self, name)) for name in plan.parameters]
            call = self._cunorm_call(x, None, parameters)
            eps = getattr(self, plan.eps)
            return call and call(x, *parameters, eps=eps, activation=activation)
        except (TypeError, ValueError):  # the norm's forward runs, and warns or raises it again
            return None

    def _cunorm_own(self, error: Exception, args: tuple[Any, ...], named: dict[str, Any]) -> object:
        """Run the module's own forward if cunorm cannot run; warn once of each reason.

        Raise any other error. If the own forward fails too, do not warn.
        """
        reason = refusal(*args, *named.values(), *self._parameters.values())
        if reason is None and isinstance(error, (TypeError, ValueError)):
            reason = str(error)  # the error came before anything ran
        if reason is None:
            raise error
        return self._cunorm_instead(reason, args, named)

    def _cunorm_instead(self, why: str, args: tuple[Any, ...], named: dict[str, Any]) -> object:
        y = self._cunorm_kind.forward(self, *args, **named)
        if not _is_compiling():
            _warn(type(self), f"a replaced norm runs its own forward: {why}")
        return y

    def __prepare_scriptable__(self) -> Module:
        """Restore the class: torch.jit.script puts the module that this returns into the model."""
        kind = type(self)
        self.__class__ = kind._cunorm_kind  # type: ignore[assignment]
        why = "torch.jit.script cannot compile cunorm's forward, so the norm has its own again"
        _warn(kind, f"{why}: call replace_norms afterwards")
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Reduce to the original class and the plan, because pickle cannot find a swapped class."""
        kind, plan = self._cunorm_kind, self._cunorm_plan
        reduced = kind.__reduce_ex__(self, protocol)  # type: ignore[call-arg]
        return (_new, (kind, plan), *reduced[2:])


class FusedBlock(Swapped):
    """A base class of the class of a block whose forward calls `_cunorm_fused`."""

    def _cunorm_fused(self, norm: str, act: str, *given: Any) -> Any:
        """Run the submodules `norm` and then `act`, as one call of cunorm if that is the same."""
        modules: list[Any] = [getattr(self, norm), getattr(self, act)]
        activation = self._cunorm_plan.activations[norm, act]
        if (
            len(given) == 1
            and is_group_norm(modules[0])
            and activation.is_of(modules[1])
            and not is_seen(modules[0])
        ):
            y = modules[0]._cunorm_activated(*given, activation.name)
            if y is not None:
                return y
        return modules[1](modules[0](*given))


def is_group_norm(module: object) -> bool:
    """Return whether a module runs `group_norm` without an activation."""
    if not isinstance(module, Swapped):
        return False
    plan = module._cunorm_plan
    if plan is None:
        return isinstance(module, torch.nn.GroupNorm)
    return isinstance(plan, Plan) and plan.matches[0].recipe.positions and not plan.after


def _new(kind: type[Module], plan: Plan | Fusion | None) -> Module:
    subclass: Any = swapped(kind, plan)
    return subclass.__new__(subclass)


def torch_norm(kind: type[Module]) -> type[Module] | None:
    """Return the norm of torch.nn whose forward a class has or inherits, or None."""
    bases = (base for base in TORCH_NORMS if issubclass(kind, base))
    return next((base for base in bases if kind.forward is base.forward), None)


def swapped(kind: type[Module], plan: Plan | Fusion | None) -> type[Module]:
    """Return the subclass of kind that runs cunorm; plan is None if the forward is torch's.

    Python lists kind's living subclasses; a cache of them would keep kind alive.
    """
    for subclass in kind.__subclasses__():
        own = vars(subclass)
        is_same = own.get("_cunorm_kind") is kind and own["_cunorm_own_forward"] is kind.forward
        if is_same and own["_cunorm_plan"] == plan:
            return subclass
    members: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    members |= {"_cunorm_kind": kind, "_cunorm_plan": plan, "_cunorm_warned": set()}
    members["_cunorm_own_forward"] = kind.forward  # code outside of the class may set another one
    if isinstance(plan, Fusion):
        forward = rewritten(kind, lambda *pair: pair in plan.activations)
        members |= {"forward": forward, "__qualname__": kind.__qualname__}
        # Some libraries save the class's name; cunorm's would be unknown when they load a model.
        return type(kind.__name__, (FusedBlock, kind), members) if forward else kind
    if plan is not None:
        members["_cunorm_calls"] = plan.calls()
    else:
        base = torch_norm(kind)
        if base is None:  # the class got its own forward after pickling
            return kind
        members |= {"_cunorm_options": (), "_groups": NO_GROUPS}  # those that torch lacks
        members["forward"] = _forward_of(base)
    return type(f"Cunorm{kind.__name__}", (Swapped, kind), members)


def _forward_of(base: type[Module]) -> Callable[..., object]:
    """Return a forward that runs the one of cunorm's class; x has the name that torch gives it."""
    run = _RUN[base]
    names = tuple(signature(base.forward).parameters)

    @wraps(base.forward)
    def forward(self: Swapped, *args: Any, **named: Any) -> object:
        if (named and any(name not in names for name in named)) or (
            _is_compiling()
            and refusal(*args, *named.values(), *self._parameters.values()) is not None
        ):
            return base.forward(self, *args, **named)
        try:
            return run(self, *args, *named.values())
        except Exception as error:
            return self._cunorm_own(error, args, named)

    return forward


def _warn(kind: type[Swapped], text: str) -> None:
    """Warn once of each text, `_MAX_WARNINGS` times at most: texts may contain ever new shapes."""
    warned = kind._cunorm_warned
    if text not in warned and len(warned) < _MAX_WARNINGS:
        warned.add(text)
        warnings.warn(f"{kind._cunorm_kind.__name__}: {text}", stacklevel=4)


def _changed(module: Module, plan: Plan) -> str | None:
    """Return the name of an attribute that is not as in the trial, or None."""
    for name, shape in plan.shapes.items():
        if getattr(getattr(module, name, None), "shape", None) != shape:
            return name
    for name, parameter in module._parameters.items():
        if parameter is not None and name not in plan.shapes:
            return name
    attributes = module.__dict__
    for name, value in plan.settings:
        if typed(attributes.get(name)) != value:
            return name
    for name in plan.after:
        if not isinstance(getattr(module, name, None), Module):
            return name
    return None


def _row(parameter: Tensor) -> Tensor:
    """Return a parameter as a row: the others of its axes have one element."""
    return parameter if parameter.dim() == 1 else parameter.flatten()


def _operands(names: tuple[str, ...], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return x and gate, which may be None; both are None if there are other arguments."""
    if len(args) == 1 and not named:
        return args[0], None
    rest = names[len(args) :]
    if len(args) > len(names) or any(name not in rest for name in named):
        return None, None
    return (*args, *map(named.get, rest), None)[:2]
