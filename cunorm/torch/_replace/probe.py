# SPDX-License-Identifier: MIT
"""Find the formula of a norm module: run trials and compare them with the bounds of recipes."""

import inspect
import weakref
from contextlib import suppress
from dataclasses import replace
from types import FunctionType

import torch
from torch.nn import Module
from torch.nn.utils import parametrize

from cunorm._arrays.torch import TORCH_DTYPES
from cunorm._core.memo import on_clear
from cunorm._core.validate import describe_type
from cunorm.torch._replace.plan import Match, Plan, listed, short
from cunorm.torch._replace.planned import Planned
from cunorm.torch._replace.recipe import Pair, Recipe, float32_recipes, variants
from cunorm.torch._replace.swap import swapped
from cunorm.torch._replace.trial import Trial, Unknown
from cunorm.torch._tensors import has_plain_memory

_HALF = (torch.bfloat16, torch.float16)
_SAME = tuple((dtype, dtype) for dtype in (torch.float32, *_HALF, torch.float64))
_MIXED = tuple(pair for half in _HALF for pair in ((half, torch.float32), (torch.float32, half)))
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))
_SIMPLE = (int, float, str, bool, type(None), torch.dtype)
_REDUCERS = ("__reduce__", "__reduce_ex__")
_AXES = (2, 3, 4, 5)  # how many of x are tried
_MAX_PLANS = 256

# A plan, or the reason why there is none, by all that a probe depends on. Keys refer to classes
# weakly: the key of a dead class equals no other, and is dropped in turn.
_plans: dict[object, Plan | str] = {}
on_clear(_plans.clear)


def check_plain(module: Module) -> None:
    """Raise Unknown if a module's class does not decide alone on how it runs."""
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


def probe(module: Module, *, exact: bool) -> Plan:
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
            if len(_plans) >= _MAX_PLANS:
                _plans.pop(next(iter(_plans), None), None)
            _plans[key] = plan
    if isinstance(plan, str):
        raise Unknown(plan)
    return plan


def _key(module: Module, exact: bool) -> tuple[object, ...] | None:
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


def _is_simple(value: object) -> bool:
    if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
        return all(map(_is_simple, value))
    return type(value) in _SIMPLE  # another class may have a text of its own


@torch.inference_mode(False)
@torch.enable_grad()
def _probe(module: Module, exact: bool) -> Plan:
    trial = Trial(module)
    matches: list[Match] = []
    others: list[str] = []
    axes = frozenset(_AXES)
    for gated in trial.gated:
        which_calls = (" with a gate" if gated else " without a gate") * (len(trial.gated) > 1)
        try:
            recipe, agreeing_axes = _in_float32(trial, gated)
            found, rest = _match(trial, gated, recipe, 0.0 if exact else 1.0)
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
    plan = Plan(*operands, tuple(matches), axes, under_autocast, tuple(others))
    return _confirmed(trial, type(module), plan)


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
        for recipe in float32_recipes(len(trial.parameters), trial.groups, gated)
    }
    best = min(distances, key=distances.__getitem__)
    if distances[best] > 0:
        raise _far(torch.float32, best, distances[best])
    if not samples[0].has_gradients(best):
        raise Unknown(f"it gives the results of {best.describe()}, but not its gradients")
    return best, frozenset(axes)


def _match(
    trial: Trial, gated: bool, recipe: Recipe, allowed: float
) -> tuple[list[Match], list[Pair]]:
    """Return the variant for each pair of dtypes that has one within a distance, and other pairs.

    Pairs in which the module does not run are in neither.
    """
    candidates = list(variants(recipe, bool(trial.parameters)))
    distances = {}
    for pair in (*_SAME, *(_MIXED if trial.parameters else ())):
        with suppress(Unknown):  # LayerNorm fails on a float32 x with a weight of half precision
            sample = trial.sample(pair, gated)
            distances[pair] = {recipe: sample.distance(recipe) for recipe in candidates}
    main = (trial.dtype, trial.dtype)
    if main not in distances:
        raise Unknown(f"its forward does not run in {short(trial.dtype)}")
    # Where several agree, as all do in float32, take the one that agrees in the most pairs.
    candidates.sort(key=lambda recipe: -sum(each[recipe] == 0 for each in distances.values()))
    matches = []
    for pair, each in distances.items():
        best = min(candidates, key=each.__getitem__)
        if each[best] <= allowed:
            matches.append(Match(pair, gated, best, each[best] == 0))
        elif pair == main:
            raise _far(trial.dtype, best, each[best])
    agreeing = [match.pair for match in matches]
    return matches, [pair for pair in distances if pair not in agreeing]


def _agree_under_autocast(trial: Trial, matches: list[Match]) -> bool:
    """Return whether the module's results are the same under autocast, here that of the CPU."""
    try:
        for pair, gated, *_ in matches:
            usual, other = (trial.sample(pair, gated, autocast=on).y for on in (False, True))
            if usual.dtype != other.dtype or not torch.equal(usual, other):
                return False
    except Unknown:
        return False
    return True


def _confirmed(trial: Trial, kind: type[Module], plan: Plan) -> Plan:
    """Return a plan after running its calls as the swapped class will, forward and backward.

    A pair of dtypes in which cunorm's results are not the module's is a fault of cunorm's; the
    module's own forward runs there then.
    """
    planned = Planned()
    trial.swap(swapped(kind, plan), planned)
    main, confirmed = (trial.dtype, trial.dtype), []
    for match in plan.matches:
        try:
            for count in sorted(plan.axes) if match.pair == main else [3]:
                before = planned.calls
                sample = trial.sample(match.pair, match.gated, count)
                if planned.calls == before:
                    raise Unknown("its own forward ran")
                if sample.distance(match.recipe) or not sample.has_gradients(match.recipe, planned):
                    raise Unknown("other results")
            confirmed.append(match)
        except Unknown as error:
            if match.pair == main:
                raise Unknown(f"cunorm's {match.recipe.describe()} fails: {error}") from None
    lost = [match.pair for match in plan.matches if match not in confirmed]
    others = (*plan.others, f"for {listed(lost)}") if lost else plan.others
    return replace(plan, matches=tuple(confirmed), others=others) if lost else plan


def _far(dtype: torch.dtype, recipe: Recipe, distance: float) -> Unknown:
    off = f"{distance:.3g} units in the last place off" if distance < 1e9 else "of another kind"
    nearest = f"those of the nearest, {recipe.describe()}, are {off}"
    return Unknown(f"its results in {short(dtype)} are no recipe's: {nearest}")
