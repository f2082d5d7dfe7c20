# SPDX-License-Identifier: MIT
"""Let cunorm run the norms of a PyTorch model that is there already, and undo it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize

from cunorm.torch._group_norm_module import GroupNorm
from cunorm.torch._modules import LayerNorm, RMSNorm
from cunorm.torch._probe import Plan, Unknown, probe
from cunorm.torch._report import LeftNorm, ReplacedNorm, Replacement
from cunorm.torch._swap import OWN, original, swapped, torchs_own
from cunorm.torch._trial import eps_name

_OURS = (RMSNorm, LayerNorm, GroupNorm)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# What a probe does not see, and what it depends on by its value.
_COMMON = frozenset(vars(torch.nn.Module()))
_SIMPLE = (int, float, str, bool, type(None), torch.dtype)

# What probes found, by all that they depend on. A reason is kept as well.
_found: dict[Any, Plan | str] = {}


def replace_norms(model: Any, *, exact: bool = False) -> Replacement:
    """Let cunorm run the norms of a model, in place.

    Each norm stays the object that it is, with its name, parameters, hooks and state; its class
    becomes a subclass of what it was, whose forward calls cunorm. So optimizers, tied weights,
    ``state_dict``, ``isinstance``, ``copy.deepcopy``, ``pickle`` and ``torch.compile`` work on.
    `restore_norms` undoes it.

    Replaced are the RMSNorm, LayerNorm and GroupNorm of `torch.nn`, and whatever module has a
    formula of cunorm's: those of Llama, Qwen, Mistral, Gemma, T5, OLMo, Mamba-2 and most others of
    ``transformers``. The formula is not read off a name but found: a copy of the module runs on the
    CPU, on random rows with random parameters, in every pair of dtypes, and what comes out is
    compared with what cunorm has. It is looked for in modules that have an attribute eps and no
    parameters but one or two of one axis.

    Parameters
    ----------
    model : torch.nn.Module
        Of any kind, on any device; it may be a norm itself.
    exact : bool, optional
        Whether a module is left where cunorm gives not the numbers that it gives itself but some
        one unit in the last place off, as it rounds once less.

    Returns
    -------
    Replacement
        What was replaced and by what, and which modules that may be norms were left and why. It
        prints as a summary.

    Raises
    ------
    TypeError
        If model is no module of PyTorch.

    Notes
    -----
    Agreement. In half precision y has the bits that the module's own forward gives, wherever
    float32 arithmetic decides on them: the formulas round at the same places, so that y differs,
    by one unit in the last place, only where a number before a rounding is within 2**-20 of a tie,
    relatively to the largest of its row. In float32 both are some units in the last place of that
    largest from the exact result: the probe allows 16, and with a weight offset or a bias counts
    those of the terms of a sum that cancels. For float64, cunorm computes in float64 where many
    modules compute in float32; then they agree to float32's precision. Where an agreement is but to
    one unit in the last place, as of norms that round once more, what the module runs says so, and
    `exact` refuses it.

    What has not been found to agree runs the module's own forward, in a replaced module too: other
    pairs of dtypes, another number of axes (2 to 5 are tried), further arguments, or
    ``torch.autocast`` where that changes the dtypes. What is found is a formula, as the module is
    then: one that changes with another attribute than eps, or with the size of numbers, as a clamp
    makes it, is not followed.

    Left alone are modules with a forward of their own instance (as accelerate's hooks make),
    parametrized or scripted ones, and parameters that are not plain tensors (DTensor, quantized).

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
        kind = type(module)
        try:
            told = _replace(module, exact)
        except Unknown as reason:
            if _is_called_norm(module):
                left.append(LeftNorm(name, kind.__name__, str(reason)))
        else:
            if told is not None:
                replaced.append(ReplacedNorm(name, kind.__name__, told))
    return Replacement(tuple(replaced), tuple(left))


def restore_norms(model: Any) -> int:
    """Give the norms that `replace_norms` replaced the classes back that they had.

    Parameters
    ----------
    model : torch.nn.Module
        One that was given to `replace_norms`, or is a part or a copy of it. Modules of
        `cunorm.torch` that were made as such stay what they are.

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
    found = []
    for name, module in _modules("restore_norms", model):
        if not hasattr(type(module), "_cunorm_kind"):
            continue
        kind = original(module)
        if kind is None or "forward" in vars(module):
            now = "a forward of its instance" if kind else f"the class {type(module).__name__}"
            raise ValueError(
                f"restore_norms: {name or 'model'} has got {now} since it was replaced, expected "
                "that to be undone first (remove_parametrizations, remove_hook_from_module)"
            )
        found.append((module, kind))
    for module, kind in found:
        module.__class__ = kind
    return len(found)


def _modules(function: str, model: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{function}: model is a {type(model).__name__}, expected a torch.nn.Module"
        )
    return iter(list(model.named_modules()))


def _replace(module: Any, exact: bool) -> str | None:
    """Replace a norm and say what it runs; None for what is none; Unknown with the reason."""
    kind: Any = type(module)
    if hasattr(kind, "_cunorm_kind") or isinstance(module, _OURS):
        raise Unknown("it runs cunorm already")
    own = torchs_own(kind)
    if own is None and not _may_be_norm(module):
        return None
    _check_plain(module)
    if own is not None:
        _check_parameters(module, ("weight", "bias")[: 1 if own is torch.nn.RMSNorm else 2])
        module.__class__ = swapped(kind, None)
        return _told_own(module, own)
    plan = _plan(module, exact)
    module.__class__ = swapped(kind, plan)
    dtypes = [parameter.dtype for parameter in module.parameters()]
    return plan.told(getattr(module, plan.eps), dtypes[0] if dtypes else torch.float32)


def _told_own(module: Any, own: Any) -> str:
    if own is torch.nn.GroupNorm:
        return f"group_norm({module.num_groups}, eps={module.eps})"
    return f"{'rms' if own is torch.nn.RMSNorm else 'layer'}_norm(eps={module.eps})"


def _may_be_norm(module: Any) -> bool:
    """Whether a module that has not torch's forward is to be looked at."""
    return _is_called_norm(module) or (eps_name(module) is not None and not _is_torchs(module))


def _is_called_norm(module: Any) -> bool:
    """Whether to report a module that is left: not what consists of norms and others."""
    name = type(module).__name__
    if next(module.children(), None) is None:
        return "norm" in name.lower() or isinstance(module, tuple(OWN))
    return name.endswith("Norm")


def _is_torchs(module: Any) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")


def _check_plain(module: Any) -> None:
    """Raise Unknown if another class would not be what decides on how a module runs."""
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


def _check_parameters(module: Any, names: tuple[str, ...]) -> None:
    if set(module._parameters) != set(names):
        listed = ", ".join(module._parameters)
        raise Unknown(f"its parameters are {listed}, not {' and '.join(names)}")


def _plan(module: Any, exact: bool) -> Plan:
    """Return what a probe of this module, or of one that is equal to it in all it sees, found."""
    if _is_torchs(module):
        raise Unknown("of torch.nn, only RMSNorm, LayerNorm and GroupNorm are replaced")
    key = _facts(module, exact)
    found = _found.get(key) if key is not None else None
    if found is None:
        try:
            found = probe(module, exact=exact)
        except Unknown as reason:
            found = str(reason)
        if key is not None:
            _found[key] = found
    if isinstance(found, str):
        raise Unknown(found)
    return found


def _facts(module: Any, exact: bool) -> Any:
    """Return what a probe depends on, None if that is more than numbers, names and shapes."""
    kind = type(module)
    own = {name: _simple(v) for name, v in vars(module).items() if name not in _COMMON}
    if None in own.values():
        return None
    tensors = tuple(
        (name, None if tensor is None else (tensor.shape, tensor.dtype))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    )
    return (kind, kind.forward, exact, tensors, tuple(module._modules), *own.items())


def _simple(value: Any) -> Any:
    """Return a value with its type, as 1 is True for a dict; None if it is not simple."""
    if isinstance(value, tuple):
        items = tuple(_simple(item) for item in value)
        return None if None in items else items
    return (type(value), value) if type(value) in _SIMPLE else None
