# SPDX-License-Identifier: MIT
"""Swap the classes of norms for those that run cunorm, and back; the report of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import Module

from cunorm._core.validate import describe_type, flag
from cunorm.torch._modules import GroupNorm, LayerNorm, RMSNorm
from cunorm.torch._replace.candidates import may_normalise, name_of
from cunorm.torch._replace.probe import check_plain, probe
from cunorm.torch._replace.swap import TORCH_NORMS, swapped, torch_norm
from cunorm.torch._replace.trial import Unknown

_CALLS = {  # of the norms of torch.nn, as text
    torch.nn.RMSNorm: "rms_norm(eps={0.eps})",
    torch.nn.LayerNorm: "layer_norm(eps={0.eps})",
    torch.nn.GroupNorm: "group_norm({0.num_groups}, eps={0.eps})",
}


class ReplacedNorm(NamedTuple):
    """A module that runs cunorm: its name, "" for the model itself, its class, and what it runs.

    That ends with the calls, of those that were tried, in which the module runs its own forward.
    """

    name: str
    kind: str
    runs: str


class LeftNorm(NamedTuple):
    """A module that may normalise and was left: its name, its class, and the reason."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Replacement:
    """What `replace_norms` did. Printed, it is a summary by class, with repeated layers as one.

    ``replaced`` are the modules that run cunorm, ``left`` those that do not and may normalise: that
    are called norm, have an eps, or call a norm of torch's in their forward. Both are in the order
    of ``model.named_modules()``, by first names.

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


def replace_norms(model: Module, *, exact: bool = False) -> Replacement:
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
    and compares the results with cunorm's formulas. Then it makes the very call that the module
    will make, forward and backward, in float64 in place of the kernels.

    In half precision y has the bits of the module's own forward but where a number before a
    rounding is within 2**-20 of a tie, relatively to the largest of its row: there it is one unit
    in the last place off. The report names norms that round once more, where a unit is common;
    exact=True leaves those. In float32 the probe allows 16 roundings of the largest of the row, and
    of the terms of a sum with a weight offset or a bias. For float64 cunorm computes in float64,
    many modules in float32.

    A replaced module runs its own forward in pairs of dtypes in which it does not agree, for a
    number of axes in which it does not (2 to 5 are tried), with further arguments, and under
    ``torch.autocast`` where that changes the results; the report says where. Where cunorm cannot
    run, as on nested tensors, complex numbers, other devices and in forward-mode differentiation,
    it runs its own forward, too. A UserWarning names each reason once for a class, but not under
    ``torch.compile``. ``torch.jit.script`` restores the norms, as it reads their sources. A formula
    that changes later, with another attribute than eps or with the size of numbers, as with a
    clamp, is not followed. Modules whose instance has its own forward (as accelerate's hooks make),
    parametrized and scripted ones, those whose class raises an error, and parameters that are more
    than their memory (DTensor, quantized) are left.

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
        kind = name_of(module)
        try:
            if (runs := _replace(module, exact)) is not None:
                replaced.append(ReplacedNorm(name, kind, runs))
        except Unknown as reason:
            left.append(LeftNorm(name, kind, str(reason)))
        except Exception as error:  # of its own property, __copy__, __init_subclass__ and so on
            left.append(LeftNorm(name, kind, f"its class raises {type(error).__name__}: {error}"))
    return Replacement(tuple(replaced), tuple(left))


def restore_norms(model: Module) -> int:
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


def _modules(function: str, model: object) -> list[tuple[str, Module]]:
    if not isinstance(model, Module):
        got = describe_type(type(model))
        raise TypeError(f"{function}: model is {got}, expected a torch.nn.Module")
    return list(model.named_modules())


def _replace(module: Module, exact: bool) -> str | None:
    """Replace a norm and return what it runs, or None for a module that is no norm.

    Raises Unknown for one that may be a norm and is left.
    """
    kind = type(module)
    if hasattr(kind, "_cunorm_kind"):
        raise Unknown("it runs cunorm already: restore_norms undoes that")
    if isinstance(module, (RMSNorm, LayerNorm, GroupNorm)):
        raise Unknown("it runs cunorm already")
    base = torch_norm(kind)
    if base is None and not may_normalise(module):
        return None
    check_plain(module)
    if base is not None:
        names = ("weight",) if base is torch.nn.RMSNorm else ("weight", "bias")
        if set(module._parameters) != set(names):
            listed = ", ".join(module._parameters)
            raise Unknown(f"its parameters are {listed}, not {' and '.join(names)}")
        for name in getattr(TORCH_NORMS[base], "_cunorm_options", ()):
            if hasattr(module, name):
                raise Unknown(f"it has an attribute {name} of its own")
        runs = _CALLS[base].format(module)
        module.__class__ = swapped(kind, None)
        return runs
    if kind.__module__.startswith("torch.nn.modules."):
        raise Unknown("of torch.nn, only RMSNorm, LayerNorm and GroupNorm are replaced")
    if isinstance(module, torch.nn.GroupNorm):
        what = "only the class's own forward is replaced, this one has another"
        raise Unknown(f"of torch.nn.GroupNorm {what}")
    plan = probe(module, exact=exact)
    dtypes = (parameter.dtype for parameter in module.parameters())
    runs = plan.describe(getattr(module, plan.eps), next(dtypes, torch.float32))
    module.__class__ = swapped(kind, plan)
    return runs
