# SPDX-License-Identifier: MIT
"""Swap a norm module's class for a subclass whose forward calls cunorm.

The module stays the same object, with its parameters, buffers, hooks and names.
`torch.nn.utils.parametrize` works in the same way.
"""

from __future__ import annotations

from typing import Any

import torch

from cunorm.torch._centered_modules import GroupNorm, LayerNorm
from cunorm.torch._modules import RMSNorm
from cunorm.torch._replace.probe import Plan

# The norms of torch.nn need no probe and run in all dtypes: our class, and the call as text.
TORCH_NORMS: dict[Any, tuple[Any, str]] = {
    torch.nn.RMSNorm: (RMSNorm, "rms_norm(eps={0.eps})"),
    torch.nn.LayerNorm: (LayerNorm, "layer_norm(eps={0.eps})"),
    torch.nn.GroupNorm: (GroupNorm, "group_norm({0.num_groups}, eps={0.eps})"),
}


def torch_norm(kind: Any) -> Any:
    """Return the norm of torch.nn whose forward a class has or inherits, or None."""
    bases = (base for base in TORCH_NORMS if issubclass(kind, base))
    return next((base for base in bases if kind.forward is base.forward), None)


def swapped(kind: Any, plan: Plan | None) -> Any:
    """Return the subclass of kind that runs cunorm; plan is None where the forward is torch's.

    All modules of one class and plan get the same class while any of them lives. There is no cache
    to keep kind alive: Python itself lists the living subclasses of a class.
    """
    for subclass in kind.__subclasses__():
        members = vars(subclass)
        if members.get("_cunorm_kind") is kind and members["_cunorm_plan"] == plan:
            return subclass
    members = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce_ex__": _reduce}
    members |= {"_cunorm_kind": kind, "_cunorm_plan": plan}
    base = torch_norm(kind)
    if plan is not None:
        calls = {(pair, gated): recipe.call(*pair) for pair, gated, recipe in plan.recipes}
        members |= {"forward": _forward, "_cunorm_calls": calls}
    elif base is not None:
        ours, _ = TORCH_NORMS[base]
        members |= {name: getattr(ours, name) for name in (*ours.__annotations__, "forward")}
    return type(f"Cunorm{kind.__name__}", (kind,), members)


def _forward(self: Any, *args: Any, **named: Any) -> Any:
    """Run the recipe for these dtypes; if there is none, the module's own forward."""
    plan: Plan = self._cunorm_plan
    if len(args) == 1 and not named:
        (x,), gate = args, None
    else:
        x, gate = _operands(plan.arguments, args, named)
    if (
        x is None
        or x.dim() not in plan.axes
        or (gate is not None and (gate.dtype, gate.shape) != (x.dtype, x.shape))
        or (not plan.under_autocast and torch.is_autocast_enabled(x.device.type))
    ):
        return self._cunorm_kind.forward(self, *args, **named)
    parameters = [getattr(self, name) for name in plan.parameters]
    weight = parameters[0] if parameters else None
    pair = (x.dtype, None if weight is None else weight.dtype)
    call = self._cunorm_calls.get((pair, gate is not None))
    if call is None:
        return self._cunorm_kind.forward(self, *args, **named)
    function, offset = call
    if offset is not None:
        parameters[0] = parameters[0] + offset
    options = {"eps": getattr(self, plan.eps)} | ({} if gate is None else {"gate": gate})
    return function(x, *parameters, **options)


def _operands(names: tuple[str, ...], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return x and gate, None where there is none, and neither if there is anything else."""
    if len(args) + len(named) > len(names) or any(name not in names for name in named):
        return None, None
    return (*args, *(named.get(name) for name in names[len(args) :]), None)[:2]


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle and copy a module by its original class and plan, as pickle finds no swapped class."""
    kind = type(self)
    _, _, *state = kind._cunorm_kind.__reduce_ex__(self, protocol)
    return (_new, (kind._cunorm_kind, kind._cunorm_plan), *state)


def _new(kind: Any, plan: Plan | None) -> Any:
    subclass = swapped(kind, plan)
    return subclass.__new__(subclass)
