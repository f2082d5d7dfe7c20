# SPDX-License-Identifier: MIT
"""`replace_norms` and `restore_norms`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize

from cunorm.torch._replace.probe import probe
from cunorm.torch._replace.report import LeftNorm, ReplacedNorm, Replacement
from cunorm.torch._replace.swap import TORCH_NORMS, swapped, torch_norm
from cunorm.torch._replace.trial import Unknown, eps_name

_OURS = tuple(ours for ours, _ in TORCH_NORMS.values())
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def replace_norms(model: Any, *, exact: bool = False) -> Replacement:
    """Let cunorm run the norms of a model, in place.

    Each norm stays the same object, with its name, parameters, hooks and state; its class becomes
    a subclass whose forward calls cunorm. So optimizers, tied weights, ``state_dict``,
    ``isinstance``, ``copy.deepcopy``, ``pickle`` and ``torch.compile`` work on. `restore_norms`
    undoes it.

    It replaces the RMSNorm, LayerNorm and GroupNorm of `torch.nn`, and every module with a formula
    of cunorm's: those of Llama, Qwen, Mistral, Gemma, T5, OLMo, Mamba-2 and most others of
    ``transformers``. It finds the formula not by the name but by a probe: it runs a copy of the
    module on the CPU, on random rows with random parameters, in every pair of dtypes, and compares
    the results with cunorm's. It probes modules that have an attribute eps and no parameters but
    one or two of one axis.

    Parameters
    ----------
    model : torch.nn.Module
        Of any kind, on any device; it may be a norm itself.
    exact : bool, optional
        Whether to leave a module where cunorm's results are one unit in the last place off, as
        cunorm rounds once less.

    Returns
    -------
    Replacement
        The modules replaced and what they run, and those that may be norms and were left, with the
        reason. It prints as a summary.

    Raises
    ------
    TypeError
        If model is no module of PyTorch.

    Notes
    -----
    Rounding. In half precision y has the bits of the module's own forward, wherever float32
    arithmetic decides on them: the formulas round at the same places, so that y differs, by one
    unit in the last place, only where a number before a rounding is within 2**-20 of a tie,
    relatively to the largest of its row. In float32 both are some units in the last place of that
    largest from the exact result: the probe allows 16, and with a weight offset or a bias counts
    those of the terms of a sum that cancels. For float64, cunorm computes in float64 where many
    modules compute in float32; then they agree to float32's precision. Where they agree only to
    one unit in the last place, as for norms that round once more, the report says so, and `exact`
    refuses it.

    A replaced module runs its own forward where no agreement was found: in other pairs of dtypes,
    for another number of axes (2 to 5 are tried), with further arguments, or under
    ``torch.autocast`` where that changes the dtypes. The probe finds the formula of the module as
    it is then: it does not follow one that changes with another attribute than eps, or with the
    size of numbers, as with a clamp.

    It leaves modules whose instance has its own forward (as accelerate's hooks make), parametrized
    and scripted ones, and parameters that are not plain tensors (DTensor, quantized).

    Examples
    --------
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
    replaced, left = [], []
    for name, module in _modules("replace_norms", model):
        kind = type(module).__name__
        try:
            runs = _replace(module, exact)
        except Unknown as reason:
            if _is_called_norm(module):
                left.append(LeftNorm(name, kind, str(reason)))
        else:
            if runs is not None:
                replaced.append(ReplacedNorm(name, kind, runs))
    return Replacement(tuple(replaced), tuple(left))


def restore_norms(model: Any) -> int:
    """Give the norms that `replace_norms` replaced their classes back.

    Parameters
    ----------
    model : torch.nn.Module
        One that was given to `replace_norms`, or a part or a copy of it. Modules of `cunorm.torch`
        that were made as such stay what they are.

    Returns
    -------
    int
        How many modules were restored.

    Raises
    ------
    TypeError
        If model is no module of PyTorch.
    ValueError
        If a replaced module's class or forward has been changed since, as by
        ``torch.nn.utils.parametrize`` and accelerate's hooks. Nothing is restored then.

    Examples
    --------
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


def _modules(function: str, model: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{function}: model is a {type(model).__name__}, expected a torch.nn.Module"
        )
    return iter(list(model.named_modules()))


def _replace(module: Any, exact: bool) -> str | None:
    """Replace a norm and return what it runs; return None for a module that is no norm.

    Raises Unknown if it may be one and is left.
    """
    kind = type(module)
    if hasattr(kind, "_cunorm_kind") or isinstance(module, _OURS):
        raise Unknown("it runs cunorm already")
    base, is_torchs = torch_norm(kind), kind.__module__.startswith("torch.nn.modules.")
    may_be_norm = base or _is_called_norm(module) or (eps_name(module) and not is_torchs)
    if not may_be_norm:
        return None
    _check_plain(module)
    if base is not None:
        names = ("weight",) if base is torch.nn.RMSNorm else ("weight", "bias")
        if set(module._parameters) != set(names):
            listed = ", ".join(module._parameters)
            raise Unknown(f"its parameters are {listed}, not {' and '.join(names)}")
        module.__class__ = swapped(kind, None)
        return TORCH_NORMS[base][1].format(module)
    if is_torchs:
        raise Unknown("of torch.nn, only RMSNorm, LayerNorm and GroupNorm are replaced")
    plan = probe(module, exact=exact)
    module.__class__ = swapped(kind, plan)
    dtypes = (parameter.dtype for parameter in module.parameters())
    return plan.describe(getattr(module, plan.eps), next(dtypes, torch.float32))


def _is_called_norm(module: Any) -> bool:
    """Return whether the report lists a module that is left: not one made of norms and others."""
    name = type(module).__name__
    if next(module.children(), None) is None:
        return "norm" in name.lower() or isinstance(module, tuple(TORCH_NORMS))
    return name.endswith("Norm")


def _check_plain(module: Any) -> None:
    """Raise Unknown if a module's class does not decide alone on how it runs."""
    if "forward" in vars(module):
        raise Unknown("its forward was set on the instance, as hooks of accelerate do")
    if parametrize.is_parametrized(module):
        raise Unknown("it is parametrized")
    if isinstance(module, torch.jit.ScriptModule):
        raise Unknown("it is a ScriptModule")
    if type(module).__call__ is not torch.nn.Module.__call__:
        raise Unknown("its class has a __call__ of its own")
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) is not torch.nn.Parameter:
            raise Unknown(f"{name} is a {type(parameter).__name__}, not a plain Parameter")
        if parameter is not None and parameter.dtype not in _DTYPES:
            raise Unknown(f"{name} is {parameter.dtype}")
