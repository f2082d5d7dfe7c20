# SPDX-License-Identifier: MIT
"""The public functions that let cunorm run the norms of a PyTorch model, and that undo this."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from cunorm._core.validate import describe_type, flag
from cunorm.torch._modules import GroupNorm, LayerNorm, RMSNorm
from cunorm.torch._replace.fuse import Fusion, fusion_of
from cunorm.torch._replace.planned import NORM_FUNCTIONS
from cunorm.torch._replace.probe import Plans, check_plain, find_plan
from cunorm.torch._replace.swap import (
    TORCH_NORMS,
    FusedBlock,
    Swapped,
    is_group_norm,
    swapped,
    torch_norm,
)
from cunorm.torch._replace.trial import EPS_NAMES, Unknown

_CALLS = {  # what replaces torch.nn's norms, as text
    torch.nn.RMSNorm: "rms_norm(eps={eps})",
    torch.nn.LayerNorm: "layer_norm(eps={eps})",
    torch.nn.GroupNorm: "group_norm({0.num_groups}, eps={eps})",
}


class ReplacedNorm(NamedTuple):
    """A module that runs cunorm: its name ("" for the model itself), its class, and what it runs.

    The probe tries calls; ``runs`` ends with those tried calls that run the module's own forward.
    """

    name: str
    kind: str
    runs: str


class LeftNorm(NamedTuple):
    """A module that may be a norm but was left: its name, its class, and the reason."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Replacement:
    """The result of `replace_norms`.

    Its text is a summary by class and by what runs; names that differ only in numbers share a line.

    ``replaced`` has the modules that run cunorm. ``left`` has the other modules that may be norms:
    their class's name contains "norm", they have an eps, or their forward calls a norm of torch's.
    Both are in the order of ``model.named_modules()``; a shared module has its first name.
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
    """Yield lines with names; names that differ only in numbers share a line with their count."""
    patterns: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        parts = name.split(".")
        patterns.setdefault(tuple("*" if p.isdigit() else p for p in parts), []).append(parts)
    for group in patterns.values():
        columns = [set(column) for column in zip(*group, strict=True)]
        joined = ".".join(column.pop() if len(column) == 1 else "*" for column in columns)
        count = f" ({len(group)})" if len(group) > 1 else ""
        yield f"    {joined or '(the model itself)'}{count}"


def replace_norms(
    model: Module, *, exact: bool = False, fuse_activations: bool = False
) -> Replacement:
    """Let cunorm run the norms of a model, in place, and report which norms.

    The model is a module of any kind on any device, or a norm itself; any other type is a
    TypeError. Each norm stays the same object and keeps its name, parameters, hooks and state. Its
    class becomes a subclass whose forward calls cunorm. `restore_norms` undoes this.

    The function replaces the RMSNorm, LayerNorm and GroupNorm of `torch.nn`, and every module with
    an eps that computes an RMS, layer or group norm: those of Llama, Qwen, Mistral, Gemma, T5,
    OLMo, Mamba-2 and most others in ``transformers``, and most of ``timm`` and ``diffusers``, also
    norms of axis 1. Other norms, such as L2 norms, stay, as do calls of functions such as
    ``torch.nn.functional.normalize``. To find the formula, a probe runs a copy on the CPU, on
    random rows and images with random parameters, in each dtype and in mixes of half precision and
    float32. It compares results and gradients with those of cunorm's formulas. Then it makes the
    replaced module's call of cunorm, with the float64 reference in place of the kernels.

    Submodules that a norm runs on its result, such as dropout and an activation, run after cunorm's
    norm. If those of a group norm compute one of its activations, that is part of the call. With
    fuse_activations=True, a replaced group norm and an activation that follow each other in the
    forward of a block become one call, too: the block's class becomes a subclass with a rewritten
    forward. The norm is then not rounded before the activation, which changes results in half
    precision: exact=True allows it only for relu.

    In half precision y has the bits of the module's own forward, except where a number before a
    rounding is within 2**-20 of a tie, relative to the largest number of its row. There y may
    differ by one unit in the last place. In float32 y's error is at most 2**-20 of the row's
    largest number; a sum with a weight offset or a bias adds at most 2**-20 of its terms. The y of
    a norm that rounds once more than cunorm's formula often differs by a unit: the report names
    such norms, and exact=True leaves them.

    A replaced module runs its own forward in calls that the probe did not try, in tried calls whose
    results differed (the report names these), and where cunorm cannot run (a UserWarning gives each
    reason once for a class). "Norms of a Hugging Face model" in the documentation has all these
    cases, and the reasons why modules are left.

    >>> import torch, cunorm.torch
    >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.RMSNorm(8, eps=1e-6))
    >>> done = cunorm.torch.replace_norms(model)
    >>> print(done)
    1 norm replaced
      RMSNorm: rms_norm(eps=1e-06)
        1
    1 module left
      BatchNorm1d: of torch.nn, only RMSNorm, LayerNorm and GroupNorm are replaced
        0
    >>> done.replaced[0].runs
    'rms_norm(eps=1e-06)'
    >>> type(model[1]).__name__, isinstance(model[1], torch.nn.RMSNorm)
    ('CunormRMSNorm', True)
    >>> cunorm.torch.restore_norms(model)
    1
    >>> type(model[1]) is torch.nn.RMSNorm
    True
    """
    flag("replace_norms", "exact", exact)
    flag("replace_norms", "fuse_activations", fuse_activations)
    replaced, left, plans = [], [], Plans()
    for name, module in _modules("replace_norms", model):
        kind = name_of(module)
        try:
            if (runs := _replace(module, exact, plans)) is not None:
                replaced.append(ReplacedNorm(name, kind, runs))
        except Unknown as reason:
            left.append(LeftNorm(name, kind, str(reason)))
        except Exception as error:  # from its own property, __copy__, __init_subclass__ and so on
            left.append(LeftNorm(name, kind, f"its class raises {type(error).__name__}: {error}"))
    if fuse_activations:
        fused = _fuse(model, exact, {one.name for one in replaced})
        replaced = [one._replace(runs=one.runs + fused.get(one.name, "")) for one in replaced]
    return Replacement(tuple(replaced), tuple(left))


def restore_norms(model: Module) -> int:
    """Undo `replace_norms`: restore the classes of replaced norms, and return their number.

    The model is one that `replace_norms` got, or a part or a copy of it; any other type is a
    TypeError. Modules that were made as `cunorm.torch.RMSNorm` and the like stay as they are. If
    ``torch.nn.utils.parametrize`` or accelerate's hooks have changed the class or forward of a
    replaced module, a ValueError is raised, and nothing is restored.
    """
    originals = []
    for name, module in _modules("restore_norms", model):
        if not isinstance(module, Swapped):
            continue
        kind = vars(type(module)).get("_cunorm_kind")  # the class's own, not a base class's
        if kind is None or "forward" in vars(module):
            now = "a forward of its instance" if kind else f"the class {type(module).__name__}"
            raise ValueError(
                f"restore_norms: {name or 'model'} has got {now} since it was replaced, expected "
                "that to be undone first (remove_parametrizations, remove_hook_from_module)"
            )
        originals.append((module, kind))
    count = sum(not isinstance(module, FusedBlock) for module, _ in originals)
    for module, kind in originals:
        module.__class__ = kind
    return count


def _modules(function: str, model: object) -> list[tuple[str, Module]]:
    if not isinstance(model, Module):
        got = describe_type(type(model))
        raise TypeError(f"{function}: model is {got}, expected a torch.nn.Module")
    return list(model.named_modules())


def _replace(module: Module, exact: bool, plans: Plans) -> str | None:
    """Replace a norm and return what it runs, None if it is no norm; raise Unknown to leave it."""
    kind = type(module)
    if isinstance(module, FusedBlock):
        return None
    if isinstance(module, Swapped):
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
        for name in TORCH_NORMS[base].__annotations__:
            if hasattr(module, name):
                raise Unknown(f"it has an attribute {name} of its own")
        eps = "machine epsilon" if module.eps is None else module.eps
        runs = _CALLS[base].format(module, eps=eps)
        module.__class__ = swapped(kind, None)
        return runs
    if kind.__module__.startswith("torch.nn.modules."):
        raise Unknown("of torch.nn, only RMSNorm, LayerNorm and GroupNorm are replaced")
    plan = find_plan(module, exact, plans)
    dtypes = (parameter.dtype for parameter in module.parameters(recurse=False))
    runs = plan.describe(getattr(module, plan.eps), next(dtypes, torch.float32))
    module.__class__ = swapped(kind, plan)
    return runs


def _fuse(model: Module, exact: bool, replaced: set[str]) -> dict[str, str]:
    """Fuse activations into replaced group norms: return by their names what the report adds."""
    names = {module: name for name, module in model.named_modules()}
    added: dict[str, str] = {}

    def is_replaced(module: Any) -> bool:
        return names.get(module) in replaced and is_group_norm(module)

    for block in names:
        fusion = fusion_of(block, is_replaced, exact)
        if fusion is None or not _becomes(block, fusion):
            continue
        for (norm, act), activation in fusion.activations.items():
            name = names[block._modules[norm]]  # type: ignore[index]  # a pair has modules
            added[name] = f"; fused with {act} as activation={activation.name}"
    return added


def _becomes(block: Module, fusion: Fusion) -> bool:
    """Give a block the class of a fusion; return False if it is of a kind that is left."""
    try:
        check_plain(block)
        kind = swapped(type(block), fusion)
        block.__class__ = kind
    except Exception:  # Unknown, or an error from its own property, __init_subclass__ and so on
        return False
    return issubclass(kind, FusedBlock)


def name_of(module: Module) -> str:
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    return (is_scripted and getattr(module, "original_name", None)) or type(module).__name__


def may_normalise(module: Module) -> bool:
    """Return whether a module is named like a norm, has an eps, or calls a norm of torch's."""
    if "norm" in name_of(module).lower():
        return True
    kind = type(module)
    if kind.__module__.startswith("torch.nn.modules."):
        return False
    # getattr() would also find the attributes of a module that this one wraps.
    own = (vars(module), module._parameters, module._buffers)
    has_eps = any(hasattr(kind, name) or any(name in names for names in own) for name in EPS_NAMES)
    code = getattr(kind.forward, "__code__", None)
    called = [name for name in code.co_names if name.endswith(NORM_FUNCTIONS)] if code else []
    # A name that is an attribute of the module is not torch's norm.
    return has_eps or not all(hasattr(module, name) for name in called)
