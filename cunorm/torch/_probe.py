# SPDX-License-Identifier: MIT
"""What formula a norm module of somebody else's has: found by running it, not by its name.

A copy of the module with random parameters runs on random rows on the CPU, in each pair of dtypes,
and what comes out is compared with the bounds of every `Recipe`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cunorm.torch._recipes import Recipe, recipes, variants
from cunorm.torch._trial import Pair, Sample, Trial, Unknown

__all__ = ["Plan", "Unknown", "probe"]

_HALF = (torch.bfloat16, torch.float16)
_SAME = (torch.float32, *_HALF, torch.float64)
_MIXED = tuple(pair for half in _HALF for pair in ((half, torch.float32), (torch.float32, half)))

_Recipes = tuple[tuple[Pair, Recipe], ...]


@dataclass(frozen=True)
class Plan:
    """How to run a module: where its operands are, and the recipe for each pair of dtypes.

    Attributes
    ----------
    eps : str
        The attribute that is eps.
    parameters : tuple of str
        Those that are weight and bias, as far as there are any.
    arguments : tuple of str
        What the module's own forward calls x and, if it takes one, gate.
    recipes, gated : tuple of (Pair, Recipe)
        Without a gate, and with one of x's dtype. Other pairs run the module's own forward.
    inexact : tuple of Pair
        Where the recipe is within one unit in the last place, and not the same but for ties.
    axes : frozenset of int
        How many x may have; with others the module's own forward runs.
    under_autocast : bool
        Whether all this holds under ``torch.autocast``: torch's own norms then change their dtype.
    """

    eps: str
    parameters: tuple[str, ...]
    arguments: tuple[str, ...]
    recipes: _Recipes = ()
    gated: _Recipes = ()
    inexact: tuple[Pair, ...] = ()
    axes: frozenset[int] = frozenset()
    under_autocast: bool = True

    def told(self, eps: float, dtype: torch.dtype) -> str:
        """Return what runs in a dtype, and where it is another or is inexact."""
        lines: list[str] = []
        for found in (self.recipes, self.gated):
            usual = _usual(found, dtype)
            kinds = dict.fromkeys([usual, *(recipe for _, recipe in found)] if usual else [])
            for recipe in kinds:
                pairs = [pair for pair, other in found if other == recipe]
                off = _listed(pair for pair in pairs if pair in self.inexact)
                lines.append(
                    recipe.told(eps)
                    + (f" for {_listed(pairs)}" if recipe != usual else "")
                    + (f" within a unit in the last place in {off}" if off else "")
                )
        return "; ".join(lines)


def _usual(recipes: _Recipes, dtype: torch.dtype) -> Recipe | None:
    found = [recipe for pair, recipe in recipes if set(pair) <= {dtype, None}]
    return found[0] if found else None


def _listed(pairs: Iterable[Pair]) -> str:
    """Return pairs as text: x's dtype, and weight's where it is another."""
    names = ["/".join(dict.fromkeys(_short(d) for d in pair if d is not None)) for pair in pairs]
    return ", ".join(names)


@torch.inference_mode(False)
@torch.enable_grad()
def probe(module: Any, *, exact: bool = False) -> Plan:
    """Return how to run a module, in its parameters' dtype at least.

    Raises Unknown if that is no recipe. With `exact`, one unit in the last place is too much.
    """
    trial = Trial(module)
    found: dict[bool, _Recipes] = {False: (), True: ()}
    inexact: dict[Pair, None] = {}
    unknown = None
    axes: list[frozenset[int]] = []
    for gated in filter(trial.takes, found):
        try:
            recipe, its_axes = _in_float32(trial, gated)
            matched = _match(trial, gated, recipe, 0.0 if exact else 1.0)
        except Unknown as reason:
            unknown = reason
        else:
            axes.append(its_axes)
            found[gated] = tuple((pair, recipe) for pair, recipe, _ in matched)
            inexact |= {pair: None for pair, _, distance in matched if distance > 0}
    if unknown is not None and not any(found.values()):
        raise unknown
    return Plan(
        trial.eps_name,
        trial.parameters,
        trial.arguments,
        found[False],
        found[True],
        tuple(inexact),
        frozenset.intersection(*axes),
        under_autocast=not trial.calls_torch,
    )


def _match(
    trial: Trial, gated: bool, recipe: Recipe, allowed: float
) -> list[tuple[Pair, Recipe, float]]:
    """Return the recipe of each pair of dtypes that has one, and how far off it is."""
    alike = list(variants(recipe, bool(trial.parameters)))
    samples = dict(_one_for_each_pair(trial, gated))
    own = (trial.dtype, trial.dtype if trial.parameters else None)
    if own not in samples:
        raise Unknown(f"its forward does not run in {_short(trial.dtype)}")
    table = {p: {recipe: s.distance(recipe) for recipe in alike} for p, s in samples.items()}
    # Where several agree, as all do in float32, that which does so in the most pairs.
    alike.sort(key=lambda recipe: -sum(distances[recipe] == 0 for distances in table.values()))
    chosen = [
        (pair, recipe, distances[recipe])
        for pair, distances in table.items()
        for recipe in [min(alike, key=distances.__getitem__)]
    ]
    for pair, recipe, distance in chosen:
        if pair == own and distance > allowed:
            raise _far(trial.dtype, recipe, distance)
    return [found for found in chosen if found[-1] <= allowed]


def _in_float32(trial: Trial, gated: bool) -> tuple[Recipe, frozenset[int]]:
    """Return a recipe that agrees in float32, where variants do too, and for how many axes of x."""
    pair = (torch.float32, torch.float32 if trial.parameters else None)
    samples = list(trial.samples(pair, gated, everywhere=True))
    distances = {
        recipe: max(sample.distance(recipe) for sample in samples)
        for recipe in recipes(bool(trial.parameters), trial.groups, gated)
    }
    best = min(distances, key=distances.__getitem__)
    if distances[best] > 0:
        raise _far(torch.float32, best, distances[best])
    if not samples[0].has_gradients(best):
        raise Unknown(f"it gives the results of {best}, but not its gradients")
    return best, frozenset(sample.axes for sample in samples)


def _one_for_each_pair(trial: Trial, gated: bool) -> Iterator[tuple[Pair, Sample]]:
    same: list[Pair] = [(dtype, dtype if trial.parameters else None) for dtype in _SAME]
    for pair in (*same, *(_MIXED if trial.parameters else ())):
        try:
            yield pair, next(trial.samples(pair, gated))
        except Unknown:  # as LayerNorm does on a float32 x with a weight of half precision
            continue


def _far(dtype: torch.dtype, recipe: Recipe, distance: float) -> Unknown:
    off = f"{distance:.3g} units in the last place off" if distance < 1e9 else "of another kind"
    where = f"its results in {_short(dtype)}"
    return Unknown(f"{where} are no recipe's: those of the nearest, {recipe}, are {off}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
