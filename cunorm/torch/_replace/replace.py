# SPDX-License-Identifier: MIT
"""Swap the class of a norm for one whose forward calls cunorm, and back; the report of it.

The module stays the same object. `torch.nn.utils.parametrize` works in the same way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cunorm._core.validate import flag, of_type
from cunorm.torch._modules import GroupNorm, LayerNorm, RMSNorm
from cunorm.torch._replace.probe import Plan, check_plain, probe
from cunorm.torch._replace.trial import Unknown, eps_name

# The norms of torch.nn need no probe and run in all dtypes: our class, and the call as text.
_TORCH_NORMS: dict[Any, tuple[Any, str]] = {
    torch.nn.RMSNorm: (RMSNorm, "rms_norm(eps={0.eps})"),
    torch.nn.LayerNorm: (LayerNorm, "layer_norm(eps={0.eps})"),
    torch.nn.GroupNorm: (GroupNorm, "group_norm({0.num_groups}, eps={0.eps})"),
}


class ReplacedNorm(NamedTuple):
    """A module that runs cunorm: its name, "" for the model itself, its class, and what it runs."""

    name: str
    kind: str
    runs: str


class LeftNorm(NamedTuple):
    """A module that may be a norm and was left: its name, its class, and the reason."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Replacement:
    """What `replace_norms` did. Printed, it is a summary by class, with repeated layers as one.

    ``replaced`` are the modules that run cunorm, ``left`` those of a class called norm that do not,
    both in the order of ``model.named_modules()``, by first names.

    >>> import torch
    >>> import cunorm.torch
    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.BatchNorm1d(4))
    >>> done = cunorm.torch.replace_norms(model)
    >>> print(done)
    1 norm replaced
      LayerNorm: layer_norm(eps=1e-05)
        0
    1 module left
      BatchNorm1d: of torch.nn, only RMSNorm, LayerNorm and GroupNorm are replaced
        1
    >>> done.replaced[0].runs
    'layer_norm(eps=1e-05)'
    """

    replaced: tuple[ReplacedNorm, ...]
    left: tuple[LeftNorm, ...]

    def __str__(self) -> str:
        lines: list[str] = []
        parts = [(self.replaced, "norm", "replaced"), (self.left, "module", "left")]
        for norms, noun, verb in parts if self.left else parts[:1]:
            lines.append(f"{len(norms)} {noun}{'s' * (len(norms) != 1)} {verb}")
            names: dict[str, list[str]] = {}
            for name, kind, text in norms:
                names.setdefault(f"  {kind}: {text}", []).append(name)
            for line, those in names.items():
                lines += [line, *_merged(those)]
        return "\n".join(lines)


def _merged(names: list[str]) -> Iterator[str]:
    """Yield lines with the names, those that differ only in numbers as one with their count."""
    patterns: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        parts = name.split(".")
        patterns.setdefault(tuple("*" if p.isdigit() else p for p in parts), []).append(parts)
    for group in patterns.values():
        columns = [set(column) for column in zip(*group, strict=True)]
        joined = ".".join(column.pop() if len(column) == 1 else "*" for column in columns)
        count = f" ({len(group)})" if len(group) > 1 else ""
        yield f"    {joined or '(the model itself)'}{count}"


def replace_norms(model: Any, *, exact: bool = False) -> Replacement:
    """Let cunorm run the norms of a model, in place, and report which.

    The model is a module of any kind, on any device, or a norm itself; all else is a TypeError.
    Each norm stays the same object; its class becomes a subclass whose forward calls cunorm. So its
    name, parameters, hooks and state, optimizers, tied weights, ``isinstance``, ``copy.deepcopy``,
    ``pickle`` and ``torch.compile`` work on. `restore_norms` undoes it.

    It replaces the RMSNorm, LayerNorm and GroupNorm of `torch.nn`, and every module with a formula
    of cunorm's: those of Llama, Qwen, Mistral, Gemma, T5, OLMo, Mamba-2 and most others of
    ``transformers``. A probe finds the formula of a module that has an attribute eps (or
    variance_epsilon, epsilon, norm_eps, layer_norm_eps) and no parameters but one or two of one
    axis: it runs a copy on the CPU, on random rows with random parameters, in every pair of dtypes,
    and compares the results with cunorm's.

    In half precision y has the bits of the module's own forward but where a number before a
    rounding is within 2**-20 of a tie, relatively to the largest of its row: there it is one unit
    in the last place off. The report names norms that round once more, where a unit is common;
    exact=True leaves those. In float32 the probe allows 16 roundings of the largest of the row, and
    of the terms of a sum with a weight offset or a bias. For float64 cunorm computes in float64,
    many modules in float32.

    A replaced module runs its own forward in pairs of dtypes in which it does not agree, for a
    number of axes in which it does not (2 to 5 are tried), with further arguments, and under
    ``torch.autocast`` where that changes the dtypes. A formula that changes later, with another
    attribute than eps or with the size of numbers, as with a clamp, is not followed. Modules whose
    instance has its own forward (as accelerate's hooks make), parametrized and scripted ones, and
    parameters that are not plain tensors (DTensor, quantized) are left.

    >>> import torch
    >>> import cunorm.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8, eps=1e-6))
    >>> print(cunorm.torch.replace_norms(model))
    1 norm replaced
      RMSNorm: rms_norm(eps=1e-06)
        1
    >>> type(model[1]).__name__, isinstance(model[1], torch.nn.RMSNorm)
    ('CunormRMSNorm', True)
    >>> cunorm.torch.restore_norms(model)
    1
    >>> type(model[1]) is torch.nn.RMSNorm
    True
    """
    flag("replace_norms", "exact", exact)
    replaced, left = [], []
    for name, module in _modules("replace_norms", model):
        kind = type(module).__name__
        try:
            if (runs := _replace(module, exact)) is not None:
                replaced.append(ReplacedNorm(name, kind, runs))
        except Unknown as reason:
            if _is_called_norm(module):
                left.append(LeftNorm(name, kind, str(reason)))
    return Replacement(tuple(replaced), tuple(left))


def restore_norms(model: Any) -> int:
    """Give the norms that `replace_norms` replaced their classes back; return how many.

    The model is one that was given to `replace_norms`, or a part or a copy of it; all else is a
    TypeError. Modules that were made as `cunorm.torch.RMSNorm` and the like stay as they are. A
    module whose class or forward was changed since, as by ``torch.nn.utils.parametrize`` and
    accelerate's hooks, is a ValueError, and nothing is restored.

    >>> import torch
    >>> import cunorm.torch
    >>> norm = torch.nn.LayerNorm(8)
    >>> _ = cunorm.torch.replace_norms(norm)
    >>> cunorm.torch.restore_norms(norm), type(norm)
    (1, <class 'torch.nn.modules.normalization.LayerNorm'>)
    """
    originals = []
    for name, module in _modules("restore_norms", model):
        if not hasattr(type(module), "_cunorm_kind"):
            continue
        kind = vars(type(module)).get("_cunorm_kind")  # not that of a base class
        if kind is None or "forward" in vars(module):
            now = "a forward of its instance" if kind else f"the class {type(module).__name__}"
            raise ValueError(
                f"restore_norms: {name or 'model'} has got {now} since it was replaced, expected "
                "that to be undone first (remove_parametrizations, remove_hook_from_module)"
            )
        originals.append((module, kind))
    for module, kind in originals:
        module.__class__ = kind
    return len(originals)


def _modules(function: str, model: Any) -> list[tuple[str, Any]]:
    if not isinstance(model, torch.nn.Module):
        got = of_type(type(model))
        raise TypeError(f"{function}: model is {got}, expected a torch.nn.Module")
    return list(model.named_modules())


def _replace(module: Any, exact: bool) -> str | None:
    """Replace a norm and return what it runs, or None for a module that is no norm.

    Raises Unknown for one that may be a norm and is left.
    """
    kind = type(module)
    if hasattr(kind, "_cunorm_kind"):
        raise Unknown("it runs cunorm already: restore_norms undoes that")
    if isinstance(module, (RMSNorm, LayerNorm, GroupNorm)):
        raise Unknown("it runs cunorm already")
    base, is_torchs = _torch_norm(kind), kind.__module__.startswith("torch.nn.modules.")
    if not (base or _is_called_norm(module) or (eps_name(module) and not is_torchs)):
        return None
    check_plain(module)
    if base is not None:
        names = ("weight",) if base is torch.nn.RMSNorm else ("weight", "bias")
        if set(module._parameters) != set(names):
            listed = ", ".join(module._parameters)
            raise Unknown(f"its parameters are {listed}, not {' and '.join(names)}")
        for name in getattr(_TORCH_NORMS[base][0], "_cunorm_options", ()):
            if hasattr(module, name):
                raise Unknown(f"it has an attribute {name} of its own")
        module.__class__ = _swapped(kind, None)
        return _TORCH_NORMS[base][1].format(module)
    if is_torchs:
        raise Unknown("of torch.nn, only RMSNorm, LayerNorm and GroupNorm are replaced")
    plan = probe(module, exact=exact)
    module.__class__ = _swapped(kind, plan)
    dtypes = (parameter.dtype for parameter in module.parameters())
    return plan.describe(getattr(module, plan.eps), next(dtypes, torch.float32))


def _torch_norm(kind: Any) -> Any:
    """Return the norm of torch.nn whose forward a class has or inherits, or None."""
    bases = (base for base in _TORCH_NORMS if issubclass(kind, base))
    return next((base for base in bases if kind.forward is base.forward), None)


def _is_called_norm(module: Any) -> bool:
    """Return whether the report lists a module that is left: not one made of norms and others."""
    name = type(module).__name__
    if next(module.children(), None) is None:
        return "norm" in name.lower() or isinstance(module, tuple(_TORCH_NORMS))
    return name.endswith("Norm")


def _swapped(kind: Any, plan: Plan | None) -> Any:
    """Return the subclass of kind that runs cunorm; plan is None where the forward is torch's.

    Python itself lists the living subclasses of a class: a cache would keep kind alive.
    """
    for subclass in kind.__subclasses__():
        members = vars(subclass)
        if members.get("_cunorm_kind") is kind and members["_cunorm_plan"] == plan:
            return subclass
    members = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce_ex__": _reduce}
    members |= {"_cunorm_kind": kind, "_cunorm_plan": plan}
    base = _torch_norm(kind)
    if plan is not None:
        calls = {(pair, gated): recipe.call(*pair) for pair, gated, recipe, _ in plan.matches}
        members |= {"forward": _forward, "_cunorm_calls": calls}
    elif base is not None:
        ours, _ = _TORCH_NORMS[base]
        members |= {name: getattr(ours, name) for name in (*ours.__annotations__, "forward")}
    return type(f"Cunorm{kind.__name__}", (kind,), members)


def _forward(self: Any, *args: Any, **named: Any) -> Any:
    """Run the recipe for these dtypes; if there is none, the module's own forward."""
    plan: Plan = self._cunorm_plan
    x, gate = _operands(plan.arguments, args, named)
    parameters = [getattr(self, name) for name in plan.parameters]
    weight = parameters[0] if parameters else x
    pair = (getattr(x, "dtype", None), getattr(weight, "dtype", None))
    call = self._cunorm_calls.get((pair, gate is not None))
    if (
        call is None
        or x.dim() not in plan.axes
        or (gate is not None and (gate.dtype, gate.shape) != (x.dtype, x.shape))
        or (not plan.under_autocast and torch.is_autocast_enabled(x.device.type))
    ):
        return self._cunorm_kind.forward(self, *args, **named)
    function, offset = call
    if offset is not None:
        parameters[0] = parameters[0] + offset
    options = {"eps": getattr(self, plan.eps)} | ({} if gate is None else {"gate": gate})
    return function(x, *parameters, **options)


def _operands(names: tuple[str, ...], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return x and gate, None where there is none, and neither if there is anything else."""
    if len(args) == 1 and not named:
        return args[0], None
    rest = names[len(args) :]
    if len(args) > len(names) or any(name not in rest for name in named):
        return None, None
    return (*args, *map(named.get, rest), None)[:2]


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle and copy a module by its original class and plan, as pickle finds no swapped class."""
    kind = type(self)
    _, _, *state = kind._cunorm_kind.__reduce_ex__(self, protocol)
    return (_new, (kind._cunorm_kind, kind._cunorm_plan), *state)


def _new(kind: Any, plan: Plan | None) -> Any:
    subclass = _swapped(kind, plan)
    return subclass.__new__(subclass)
