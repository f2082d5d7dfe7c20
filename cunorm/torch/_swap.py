# SPDX-License-Identifier: MIT
"""Subclasses of norm modules' classes whose forward is cunorm's: what a module's class becomes.

The module stays the object that it is, with its parameters, buffers, hooks and names; its class
alone is another one, a subclass of what it was. `torch.nn.utils.parametrize` does so too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from cunorm.torch._group_norm_module import GroupNorm
from cunorm.torch._modules import LayerNorm, RMSNorm
from cunorm.torch._probe import Plan
from cunorm.torch._recipes import Call

# torch's own norms are known: no probe is needed, and all dtypes run.
OWN: dict[Any, Any] = {
    torch.nn.RMSNorm: RMSNorm,
    torch.nn.LayerNorm: LayerNorm,
    torch.nn.GroupNorm: GroupNorm,
}


def torchs_own(kind: Any) -> Any:
    """Return the norm of torch's whose forward a class has, its own or inherited."""
    for own in OWN:
        if issubclass(kind, own) and kind.forward is own.forward:
            return own
    return None


@cache
def swapped(kind: Any, plan: Plan | None) -> Any:
    """Return the subclass that runs cunorm; plan is None where the forward is torch's own.

    The same for the same arguments, so that all modules of a kind have one class.
    """
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": _reduce,
        "_cunorm_kind": kind,
        "_cunorm_plan": plan,
    }
    own = torchs_own(kind)
    if plan is None and own is not None:
        ours = OWN[own]
        options = ("weight_offset", "round_before_weight", "activation")
        members |= {name: getattr(ours, name) for name in options if hasattr(ours, name)}
        members["forward"] = ours.forward
    elif plan is not None:
        members["forward"] = _forward
        members["_cunorm_calls"] = {pair: recipe.call(*pair) for pair, recipe in plan.recipes}
        members["_cunorm_gated"] = {pair: recipe.call(*pair) for pair, recipe in plan.gated}
    return type(f"Cunorm{kind.__name__}", (kind,), members)


def original(module: Any) -> type | None:
    """Return the class that a module had before it was swapped, None if it is not."""
    kind: type | None = vars(type(module)).get("_cunorm_kind")
    return kind


def _forward(self: Any, *args: Any, **named: Any) -> Any:
    """Make the call of these dtypes, or where there is none the module's own forward."""
    plan: Plan = self._cunorm_plan
    if len(args) == 1 and not named:
        (x,), gate = args, None
    else:
        x, gate = _operands(plan.arguments, args, named)
    if x is None or x.dim() not in plan.axes or _is_changed_by_autocast(plan, x):
        return self._cunorm_kind.forward(self, *args, **named)
    parameters = [getattr(self, name) for name in plan.parameters]
    weight = parameters[0] if parameters else None
    pair = (x.dtype, None if weight is None else weight.dtype)
    if gate is None:
        call: Call | None = self._cunorm_calls.get(pair)
        operands = {}
    else:
        alike = gate.dtype == x.dtype and gate.shape == x.shape
        call = self._cunorm_gated.get(pair) if alike else None
        operands = {"gate": gate}
    if call is None:
        return self._cunorm_kind.forward(self, *args, **named)
    if call.offset is not None:
        parameters[0] = parameters[0] + call.offset
    eps = getattr(self, plan.eps)
    return call.function(x, *parameters, eps=eps, **operands, **call.options)


def _is_changed_by_autocast(plan: Plan, x: Any) -> bool:
    return not plan.under_autocast and torch.is_autocast_enabled(x.device.type)


def _operands(
    names: tuple[str, ...], args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, Any]:
    """Return x and gate, None where there is none, and neither if there is anything else."""
    if len(args) + len(named) > len(names) or any(name not in names for name in named):
        return None, None
    x, gate = (*args, *(named.get(name) for name in names[len(args) :]), None)[:2]
    return x, gate


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle, copy and deepcopy by what the class was made of, as it has no name to be found by."""
    kind = type(self)
    _, _, *state = kind._cunorm_kind.__reduce_ex__(self, protocol)
    return (_new, (kind._cunorm_kind, kind._cunorm_plan), *state)


def _new(kind: Any, plan: Plan | None) -> Any:
    made = swapped(kind, plan)
    return made.__new__(made)
