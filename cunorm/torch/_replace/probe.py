# SPDX-License-Identifier: MIT
"""Find the formula of a norm module of another library by running it.

A copy of the module with random parameters runs on random rows on the CPU, in each pair of dtypes.
The results are compared with the bounds of every `Recipe`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from cunorm._core.memo import on_clear
from cunorm.torch._replace.recipes import Recipe, float32_recipes, variants
from cunorm.torch._replace.trial import Pair, Trial, Unknown

_HALF = (torch.bfloat16, torch.float16)
_SAME = (torch.float32, *_HALF, torch.float64)
_MIXED = tuple(pair for half in _HALF for pair in ((half, torch.float32), (torch.float32, half)))

_ATTRIBUTES_OF_ALL_MODULES = frozenset(vars(torch.nn.Module()))
_SIMPLE = (int, float, str, bool, type(None), torch.dtype)
_MOST_PLANS = 256

# A plan, or the reason why there is none, by all that a probe depends on. Keys refer to classes
# weakly, so that none is kept alive: that of a dead class equals no other, and is dropped in turn.
_plans: dict[Any, Plan | str] = {}
on_clear(_plans.clear)

# The dtypes of a call, whether it has a gate, which then has x's dtype, and the recipe.
Match = tuple[Pair, bool, Recipe]


@dataclass(frozen=True)
class Plan:
    """How to run a module: its operands, and its recipes.

    Calls that have no recipe here run the module's own forward.
    """

    eps: str  # the attribute that is eps
    parameters: tuple[str, ...]  # the names of weight and bias, if there are any
    arguments: tuple[str, ...]  # forward's names for x and, if it takes one, gate
    recipes: tuple[Match, ...]
    inexact: frozenset[Pair]  # the dtypes where y is up to one unit in the last place off
    axes: frozenset[int]  # how many x may have
    under_autocast: bool  # whether it holds there too: torch's own norms change the dtype

    def describe(self, eps: float, dtype: torch.dtype) -> str:
        """Return what runs in a dtype, and where it is another recipe or is inexact."""
        lines: list[str] = []
        for gated in (False, True):
            recipes = {pair: recipe for pair, g, recipe in self.recipes if g == gated}
            usual = [recipe for pair, recipe in recipes.items() if set(pair) <= {dtype, None}]
            for recipe in dict.fromkeys([*usual, *recipes.values()]):
                pairs = [pair for pair, other in recipes.items() if other == recipe]
                off = _listed(pair for pair in pairs if pair in self.inexact)
                lines.append(
                    recipe.describe(eps)
                    + ("" if recipe in usual else f" for {_listed(pairs)}")
                    + (f" within a unit in the last place in {off}" if off else "")
                )
        return "; ".join(lines)


def _listed(pairs: Iterable[Pair]) -> str:
    """Return pairs as text: x's dtype, and weight's where it is another."""
    names = ("/".join(dict.fromkeys(_short(d) for d in pair if d is not None)) for pair in pairs)
    return ", ".join(names)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def probe(module: Any, *, exact: bool) -> Plan:
    """Return how to run a module, in its parameters' dtype at least.

    Raises Unknown if no recipe fits. With `exact`, one unit in the last place is too much. Modules
    of one class that differ in no number, name or shape are probed once.
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
    attributes = vars(module).items()
    values = {n: _typed(v) for n, v in attributes if n not in _ATTRIBUTES_OF_ALL_MODULES}
    if None in values.values() or not isinstance(forward, FunctionType):
        return None
    tensors = tuple(
        (name, None if tensor is None else (tensor.shape, tensor.dtype))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    )
    classes = weakref.ref(kind), weakref.ref(forward)
    return (*classes, exact, tensors, tuple(module._modules), *values.items())


def _typed(value: Any) -> Any:
    """Return a simple value with its type, as 1 is True for a dict; None if it is not simple."""
    if isinstance(value, tuple):
        items = tuple(_typed(item) for item in value)
        return None if None in items else items
    return (type(value), value) if type(value) in _SIMPLE else None


@torch.inference_mode(False)
@torch.enable_grad()
def _probe(module: Any, exact: bool) -> Plan:
    trial = Trial(module)
    recipes: list[Match] = []
    inexact: set[Pair] = set()
    axes: list[frozenset[int]] = []
    reasons: list[Unknown] = []
    for gated in trial.gated:
        try:
            recipe, its_axes = _in_float32(trial, gated)
            matches = _match(trial, gated, recipe, 0.0 if exact else 1.0)
        except Unknown as reason:
            reasons.append(reason)
            continue
        axes.append(its_axes)
        recipes += [(pair, gated, recipe) for pair, recipe, _ in matches]
        inexact |= {pair for pair, _, distance in matches if distance > 0}
    if not axes:
        raise reasons[-1]
    return Plan(
        trial.eps_name,
        trial.parameters,
        trial.arguments,
        tuple(recipes),
        frozenset(inexact),
        frozenset.intersection(*axes),
        under_autocast=not trial.calls_torch,
    )


def _in_float32(trial: Trial, gated: bool) -> tuple[Recipe, frozenset[int]]:
    """Return the recipe that agrees in float32, as its variants do, and the numbers of axes."""
    pair = trial.pair(torch.float32)
    samples, axes = [trial.sample(pair, gated)], {3}
    for count in (2, 3, 4, 5):
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
        raise Unknown(f"it gives the results of {best}, but not its gradients")
    return best, frozenset(axes)


def _match(
    trial: Trial, gated: bool, recipe: Recipe, allowed: float
) -> list[tuple[Pair, Recipe, float]]:
    """Return the variant for each pair of dtypes that has one, and its distance."""
    candidates = list(variants(recipe, bool(trial.parameters)))
    distances = {}
    for pair in (*map(trial.pair, _SAME), *(_MIXED if trial.parameters else ())):
        with suppress(Unknown):  # LayerNorm fails on a float32 x with a weight of half precision
            sample = trial.sample(pair, gated)
            distances[pair] = {recipe: sample.distance(recipe) for recipe in candidates}
    main = trial.pair(trial.dtype)
    if main not in distances:
        raise Unknown(f"its forward does not run in {_short(trial.dtype)}")
    # Where several agree, as all do in float32, take the one that agrees in the most pairs.
    candidates.sort(key=lambda recipe: -sum(each[recipe] == 0 for each in distances.values()))
    matches = []
    for pair, each in distances.items():
        best = min(candidates, key=each.__getitem__)
        if each[best] <= allowed:
            matches.append((pair, best, each[best]))
        elif pair == main:
            raise _far(trial.dtype, best, each[best])
    return matches


def _far(dtype: torch.dtype, recipe: Recipe, distance: float) -> Unknown:
    off = f"{distance:.3g} units in the last place off" if distance < 1e9 else "of another kind"
    where = f"its results in {_short(dtype)}"
    return Unknown(f"{where} are no recipe's: those of the nearest, {recipe}, are {off}")
