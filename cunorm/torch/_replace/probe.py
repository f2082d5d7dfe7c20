# SPDX-License-Identifier: MIT
"""Find the formula of a norm module: run trials and compare them with the bounds of recipes."""

import inspect
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize

from cunorm._arrays.torch import TORCH_DTYPES
from cunorm._core.memo import on_clear
from cunorm._core.validate import of_type
from cunorm.torch._replace.trial import Pair, Recipe, Trial, Unknown, float32_recipes, variants

_HALF = (torch.bfloat16, torch.float16)
_SAME = tuple((dtype, dtype) for dtype in (torch.float32, *_HALF, torch.float64))
_MIXED = tuple(pair for half in _HALF for pair in ((half, torch.float32), (torch.float32, half)))
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
_SIMPLE = (int, float, str, bool, type(None), torch.dtype)
_REDUCERS = ("__reduce__", "__reduce_ex__")
_AXES = (2, 3, 4, 5)  # how many of x are tried
_MOST_PLANS = 256

# A plan, or the reason why there is none, by all that a probe depends on. Keys refer to classes
# weakly: the key of a dead class equals no other, and is dropped in turn.
_plans: dict[Any, "Plan | str"] = {}
on_clear(_plans.clear)


class Match(NamedTuple):
    """The recipe of calls with these dtypes, with or without a gate, which has x's dtype."""

    pair: Pair
    gated: bool
    recipe: Recipe
    exact: bool  # else y is up to one unit in the last place off


@dataclass(frozen=True)
class Plan:
    """How to run a module: its operands, and its recipes. Other calls run its own forward."""

    eps: str  # the attribute that is eps
    parameters: tuple[str, ...]  # the names of weight and bias, if there are any
    arguments: tuple[str, ...]  # forward's names for x and, if it takes one, gate
    matches: tuple[Match, ...]
    axes: frozenset[int]  # how many x may have
    under_autocast: bool  # whether it holds there too: torch's own norms change the dtype

    def describe(self, eps: float, dtype: torch.dtype) -> str:
        """Return what runs in a dtype, and where it is another recipe or is inexact."""
        lines: list[str] = []
        for gated in (False, True):
            matches = [match for match in self.matches if match.gated == gated]
            usual = [match.recipe for match in matches if match.pair == (dtype, dtype)]
            for recipe in dict.fromkeys([*usual, *(match.recipe for match in matches)]):
                pairs = {match.pair: match.exact for match in matches if match.recipe == recipe}
                off = _listed(pair for pair, exact in pairs.items() if not exact)
                lines.append(
                    recipe.describe(eps)
                    + ("" if recipe in usual else f" for {_listed(pairs)}")
                    + (f" within a unit in the last place in {off}" if off else "")
                )
        return "; ".join(lines)


def _listed(pairs: Iterable[Pair]) -> str:
    return ", ".join("/".join(dict.fromkeys(map(_short, pair))) for pair in pairs)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_plain(module: Any) -> None:
    """Raise Unknown if a module's class does not decide alone on how it runs."""
    if "forward" in vars(module):
        raise Unknown("its forward was set on the instance, as hooks of accelerate do")
    if parametrize.is_parametrized(module):
        raise Unknown("it is parametrized")
    if isinstance(module, torch.jit.ScriptModule):
        raise Unknown("it is a ScriptModule")
    if type(module).__call__ is not torch.nn.Module.__call__:
        raise Unknown("its class has a __call__ of its own")
    if any(getattr(type(module), name) is not getattr(object, name) for name in _REDUCERS):
        raise Unknown("its class has its own form of copies and pickles")
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) is not torch.nn.Parameter:
            raise Unknown(f"{name} is {of_type(type(parameter))}, not a plain Parameter")
        if parameter is not None and parameter.dtype not in TORCH_DTYPES.values():
            raise Unknown(f"{name} is {parameter.dtype}")


def probe(module: Any, *, exact: bool) -> Plan:
    """Return how to run a module, in its parameters' dtype at least, or raise Unknown.

    Modules of one class that differ in no number, name or shape are probed once.
    """
    key = _key(module, exact)
    plan = _plans.get(key)
    if plan is None:
        try:
            plan = _probe(module, exact)
        except Unknown as reason:
            plan = str(reason)
        if key is not None:
            if len(_plans) >= _MOST_PLANS:
                _plans.pop(next(iter(_plans), None), None)
            _plans[key] = plan
    if isinstance(plan, str):
        raise Unknown(plan)
    return plan


def _key(module: Any, exact: bool) -> Any:
    """Return what a probe depends on, None if that is more than numbers, names and shapes."""
    kind = type(module)
    forward = inspect.getattr_static(kind, "forward")  # its closure may have the class, for super()
    values = {n: value for n, value in vars(module).items() if n not in _MODULE_ATTRIBUTES}
    if not _is_simple((*values.values(),)) or not isinstance(forward, FunctionType):
        return None
    tensors = [
        (name, None if tensor is None else (tensor.shape, tensor.dtype))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    ]
    text = repr((exact, values, tensors, [*module._modules]))  # as 1 equals True
    return weakref.ref(kind), weakref.ref(forward), text


def _is_simple(value: Any) -> bool:
    is_tuple = type(value) in (tuple, torch.Size)  # another class may have a text of its own
    return all(map(_is_simple, value)) if is_tuple else type(value) in _SIMPLE


@torch.inference_mode(False)
@torch.enable_grad()
def _probe(module: Any, exact: bool) -> Plan:
    trial = Trial(module)
    matches: list[Match] = []
    axes = frozenset(_AXES)
    for gated in trial.gated:
        try:
            recipe, its_axes = _in_float32(trial, gated)
            matches += _match(trial, gated, recipe, 0.0 if exact else 1.0)
            axes &= its_axes
        except Unknown:
            if gated == trial.gated[-1] and not matches:
                raise
    operands = trial.eps_name, trial.parameters, trial.arguments
    return Plan(*operands, tuple(matches), axes, under_autocast=not trial.calls_torch)


def _in_float32(trial: Trial, gated: bool) -> tuple[Recipe, frozenset[int]]:
    """Return the recipe that agrees in float32, as its variants do, and the numbers of axes."""
    pair = (torch.float32, torch.float32)
    samples, axes = [trial.sample(pair, gated)], {3}
    for count in _AXES:
        with suppress(Unknown):
            samples.append(trial.sample(pair, gated, count, training=False))
            axes.add(count)
    distances = {
        recipe: max(sample.distance(recipe) for sample in samples)
        for recipe in float32_recipes(bool(trial.parameters), trial.groups, gated)
    }
    best = min(distances, key=distances.__getitem__)
    if distances[best] > 0:
        raise _far(torch.float32, best, distances[best])
    if not samples[0].has_gradients(best):
        raise Unknown(f"it gives the results of {best.describe()}, but not its gradients")
    return best, frozenset(axes)


def _match(trial: Trial, gated: bool, recipe: Recipe, allowed: float) -> list[Match]:
    """Return the variant for each pair of dtypes that has one within a distance."""
    candidates = list(variants(recipe, bool(trial.parameters)))
    distances = {}
    for pair in (*_SAME, *(_MIXED if trial.parameters else ())):
        with suppress(Unknown):  # LayerNorm fails on a float32 x with a weight of half precision
            sample = trial.sample(pair, gated)
            distances[pair] = {recipe: sample.distance(recipe) for recipe in candidates}
    main = (trial.dtype, trial.dtype)
    if main not in distances:
        raise Unknown(f"its forward does not run in {_short(trial.dtype)}")
    # Where several agree, as all do in float32, take the one that agrees in the most pairs.
    candidates.sort(key=lambda recipe: -sum(each[recipe] == 0 for each in distances.values()))
    matches = []
    for pair, each in distances.items():
        best = min(candidates, key=each.__getitem__)
        if each[best] <= allowed:
            matches.append(Match(pair, gated, best, each[best] == 0))
        elif pair == main:
            raise _far(trial.dtype, best, each[best])
    return matches


def _far(dtype: torch.dtype, recipe: Recipe, distance: float) -> Unknown:
    off = f"{distance:.3g} units in the last place off" if distance < 1e9 else "of another kind"
    where = f"its results in {_short(dtype)}"
    return Unknown(f"{where} are no recipe's: those of the nearest, {recipe.describe()}, are {off}")
