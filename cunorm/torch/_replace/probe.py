# SPDX-License-Identifier: MIT
"""The search for the formula of a norm module: trials are compared with the bounds of recipes."""

from collections.abc import Iterable
from contextlib import suppress

import torch
from torch.nn import Module
from torch.nn.utils import parametrize

from cunorm._arrays.torch import TORCH_DTYPES
from cunorm._core.validate import describe_type
from cunorm.torch._replace.recipe import Match, Pair, Plan, Recipe, formulas, listed, variants
from cunorm.torch._replace.trial import Trial, Unknown
from cunorm.torch._tensors import has_plain_memory

_HALF = (torch.bfloat16, torch.float16)
_SAME = tuple((dtype, dtype) for dtype in (torch.float32, *_HALF, torch.float64))
_MIXED = tuple(pair for half in _HALF for pair in ((half, torch.float32), (torch.float32, half)))
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
_SIMPLE = (int, float, str, bool, type(None), torch.dtype)
_REDUCERS = ("__reduce__", "__reduce_ex__")
_AXES = (2, 3, 4, 5)  # the numbers of axes of x that are tried
Plans = dict[object, Plan | str]  # by `_key`: a plan, or the reason why there is none


def check_plain(module: Module) -> None:
    """Raise Unknown if a module is of a kind that is never replaced, such as a ScriptModule."""
    if isinstance(module, torch.jit.ScriptModule):
        raise Unknown("it is a ScriptModule")
    if "forward" in vars(module):
        raise Unknown("its forward was set on the instance, as hooks of accelerate do")
    if parametrize.is_parametrized(module):
        raise Unknown("it is parametrized")
    if type(module).__call__ is not torch.nn.Module.__call__:
        raise Unknown("its class has a __call__ of its own")
    if any(getattr(type(module), name) is not getattr(object, name) for name in _REDUCERS):
        raise Unknown("its class has its own form of copies and pickles")
    for name, parameter in module._parameters.items():
        if parameter is not None and not has_plain_memory(type(parameter)):
            raise Unknown(f"{name} is {describe_type(type(parameter))}, not a plain Parameter")
        if parameter is not None and parameter.dtype not in TORCH_DTYPES.values():
            raise Unknown(f"{name} is {parameter.dtype}")


def find_plan(module: Module, exact: bool, plans: Plans) -> Plan:
    """Return a module's plan, with a recipe at least for its parameters' dtype, or raise Unknown.

    `plans` keeps the results: modules with equal keys (see `_key`) are probed only once.
    """
    key = _key(module)
    if key not in plans:
        try:
            plans[key] = _find_plan(module, exact)
        except Unknown as reason:
            plans[key] = str(reason)
    plan = plans[key]
    if isinstance(plan, str):
        raise Unknown(plan)
    return plan


def _key(module: Module) -> object:
    """Return a key of all that a probe depends on, or a unique key if a value is not simple."""
    values = {n: value for n, value in vars(module).items() if n not in _MODULE_ATTRIBUTES}
    if not _is_simple((*values.values(),)):
        return object()
    tensors = [
        (name, None if tensor is None else (tensor.shape, tensor.dtype))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    ]
    return type(module), repr((values, tensors, [*module._modules]))  # repr, because 1 equals True


def _is_simple(value: object) -> bool:
    if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
        return all(map(_is_simple, value))
    return type(value) in _SIMPLE  # other values may have equal reprs


@torch.inference_mode(False)
@torch.enable_grad()
def _find_plan(module: Module, exact: bool) -> Plan:
    trial = Trial(module)
    matches: list[Match] = []
    others: list[str] = []
    axes = frozenset(_AXES)
    for gated in trial.gated:
        which_calls = (" with a gate" if gated else " without a gate") * (len(trial.gated) > 1)
        try:
            recipe, agreeing_axes = _in_float32(trial, gated)
            found, rest = _match(trial, gated, recipe, agreeing_axes, 0.0 if exact else 1.0)
            matches += found
            others += [f"for {listed(rest)}{which_calls}"] if rest else []
            axes &= agreeing_axes
        except Unknown:
            if gated == trial.gated[-1] and not matches:
                raise
            others.append(which_calls.strip())
    missing = [str(count) for count in _AXES if count not in axes]
    others += [f"for an x of {' or '.join(missing)} axes"] if missing else []
    under_autocast = not trial.calls_torch and _agree_under_autocast(trial, matches)
    others += [] if under_autocast else ["under autocast"]
    operands = trial.eps_name, trial.parameters, trial.arguments
    return Plan(*operands, tuple(matches), axes, under_autocast, tuple(others))


def _in_float32(trial: Trial, gated: bool) -> tuple[Recipe, frozenset[int]]:
    """Return the recipe that agrees in float32, and the numbers of axes that the module takes."""
    pair = (torch.float32, torch.float32)
    samples, axes = [trial.sample(pair, gated)], {3}
    for count in _AXES:
        with suppress(Unknown):
            samples.append(trial.sample(pair, gated, count, training=False))
            axes.add(count)
    distances = {
        recipe: max(sample.distance(recipe) for sample in samples)
        for recipe in formulas(len(trial.parameters), trial.groups, gated)
    }
    best = min(distances, key=distances.__getitem__)
    if distances[best] > 0:
        raise _far(pair, best, distances[best])
    if not samples[0].has_gradients(best):
        raise Unknown(f"it gives the results of {best.describe()}, but not its gradients")
    return best, frozenset(axes)


def _match(
    trial: Trial, gated: bool, recipe: Recipe, axes: frozenset[int], allowed: float
) -> tuple[list[Match], list[Pair]]:
    """Return the variant that is near enough for each pair of dtypes, and the pairs without one.

    Pairs in which the module does not run are in neither list.
    """
    candidates = list(variants(recipe, bool(trial.parameters)))
    distances = {}
    for pair in (*_SAME, *(_MIXED if trial.parameters else ())):
        with suppress(Unknown):  # LayerNorm fails on a float32 x with a weight of half precision
            sample = trial.sample(pair, gated)
            distances[pair] = {recipe: sample.distance(recipe) for recipe in candidates}
    main = (trial.dtype, trial.dtype)
    if main not in distances:
        raise Unknown(f"its forward does not run in {listed([main])}")
    # If several agree, as all do in float32, take the candidate that agrees in the most pairs.
    candidates.sort(key=lambda recipe: -sum(each[recipe] == 0 for each in distances.values()))
    matches, rest = [], []
    for pair, each in distances.items():
        best = min(candidates, key=each.__getitem__)
        match = Match(pair, gated, best, each[best] == 0)
        try:
            if each[best] > allowed:
                raise _far(pair, best, each[best])
            _check_call(trial, match, axes if pair == main else {3})
            matches.append(match)
        except Unknown:
            if pair == main:
                raise
            rest.append(pair)
    return matches, rest


def _agree_under_autocast(trial: Trial, matches: list[Match]) -> bool:
    both = ([trial.sample(*m[:2], autocast=on).y for on in (False, True)] for m in matches)
    try:
        return all(usual.dtype == other.dtype and usual.equal(other) for usual, other in both)
    except Unknown:
        return False


def _check_call(trial: Trial, match: Match, axes: Iterable[int]) -> None:
    """Raise Unknown if cunorm's call of a recipe fails or has other results."""
    try:
        for count in axes:
            sample = trial.sample(match.pair, match.gated, count, recipe=match.recipe)
            if sample.distance(match.recipe) or not sample.has_gradients(match.recipe):
                raise Unknown("other results")
    except Unknown as error:
        raise Unknown(f"cunorm's {match.recipe.describe()} fails: {error}") from None


def _far(pair: Pair, recipe: Recipe, distance: float) -> Unknown:
    off = f"{distance:.3g} units in the last place off" if distance < 1e9 else "of another kind"
    nearest = f"those of the nearest, {recipe.describe()}, are {off}"
    return Unknown(f"its results in {listed([pair])} are no recipe's: {nearest}")
