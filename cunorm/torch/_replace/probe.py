# SPDX-License-Identifier: MIT
"""The search for the formula of a norm module: trials are compared with the bounds of recipes."""

import math
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch.nn import Module
from torch.nn.utils import parametrize

from cunorm._arrays.torch import TORCH_DTYPES
from cunorm._core.validate import describe_type
from cunorm.torch._replace.after import activation_of
from cunorm.torch._replace.layout import LAYOUTS, Layout
from cunorm.torch._replace.recipe import Match, Pair, Plan, Recipe, formulas, listed, variants
from cunorm.torch._replace.settings import key_of, simple_settings
from cunorm.torch._replace.trial import Sample, Trial, Unknown
from cunorm.torch._tensors import has_plain_memory

_HALF = (torch.bfloat16, torch.float16)
_SAME = tuple((dtype, dtype) for dtype in (torch.float32, *_HALF, torch.float64))
_MIXED = tuple(pair for half in _HALF for pair in ((half, torch.float32), (torch.float32, half)))
_REDUCERS = ("__reduce__", "__reduce_ex__")
Plans = dict[object, Plan | str]  # by `key_of`: a plan, or the reason why there is none


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

    `plans` keeps the results: modules with equal keys (see `key_of`) are probed only once.
    """
    key = key_of(module)
    if key not in plans:
        try:
            plans[key] = _find_plan(module, exact)
        except Unknown as reason:
            plans[key] = str(reason)
    plan = plans[key]
    if isinstance(plan, str):
        raise Unknown(plan)
    return plan


@torch.inference_mode(False)
@torch.enable_grad()
def _find_plan(module: Module, exact: bool) -> Plan:
    trial = Trial(module)
    matches: list[Match] = []
    others: list[str] = []
    axes: dict[int, bool] = {}
    for gated in trial.gated:
        which_calls = (" with a gate" if gated else " without a gate") * (len(trial.gated) > 1)
        try:
            recipe, layouts = _in_float32(trial, gated)
            found, rest = _match(trial, gated, recipe, layouts, 0.0 if exact else 1.0)
            agreeing = {layout.axes: layout.first for layout in layouts}
            axes = dict(axes.items() & agreeing.items()) if matches else agreeing
            matches += found
            others += [f"for {listed(rest)}{which_calls}"] if rest else []
        except Unknown:
            if gated == trial.gated[-1] and not matches:
                raise
            others.append(which_calls.strip())
    *missing, last = [str(count) for count in sorted(trial.counts - {*axes})] or [""]
    counts = " or ".join([", ".join(missing), last] if missing else [last])
    others += [f"for an x of {counts} axes"] if last else []
    autocast = {
        device: _wide_under_autocast(trial, matches, axes, device)
        for device in ("cpu", "cuda")[: 1 if _reads_device(type(module)) else 2]
    }
    known = {device: wide for device, wide in autocast.items() if wide is not None}
    where = " on a GPU" if "cpu" in known else " on a CPU" if known else ""
    others += [] if len(known) == 2 else [f"under autocast{where}"]
    operands = trial.eps_name, trial.shapes, trial.arguments
    after = trial.after or ()
    is_group = matches[0].recipe.positions
    modules = [getattr(module, name) for name in after]
    activation = activation_of(modules, exact) if is_group else None
    settings = simple_settings(module, trial.eps_name)
    return Plan(*operands, (*matches,), axes, known, after, activation, (*others,), settings)


def _reads_device(kind: type[Module]) -> bool:
    """Return whether a forward may treat a GPU otherwise, as Apex's norms do under autocast."""
    forwards = [vars(base).get("forward") for base in kind.__mro__]
    codes = [getattr(forward, "__code__", None) for forward in forwards]
    return any(code and {"is_cuda", "device"} & {*code.co_names} for code in codes)


def _in_float32(trial: Trial, gated: bool) -> tuple[Recipe, list[Layout]]:
    """Return the recipe that agrees in float32, and a layout of x for each number of axes."""
    pair = (torch.float32, torch.float32)
    samples: dict[int, dict[Layout, list[Sample]]] = {}
    failures: dict[Layout, Unknown] = {}
    for layout in LAYOUTS:
        try:
            found = [trial.sample(pair, gated, one, training=False) for one in layout.in_memory()]
            samples.setdefault(layout.axes, {})[layout] = found
            trial.counts.add(layout.axes)
        except Unknown as error:
            failures[layout] = error
    if not samples:
        usual = str(failures[Layout(3, False)]), str(failures[Layout(4, True)])
        raise Unknown("; ".join(dict.fromkeys(usual)))
    recipes = [*formulas(len(trial.parameters), trial.groups, gated)]
    layouts: dict[Recipe, list[Layout]] = {recipe: [] for recipe in recipes}
    for count, each in samples.items():
        if count == 2:  # a group norm without positions: its gradients are tiny if groups are
            recipes = [recipe for recipe in recipes if not recipe.positions] or recipes[:1]
            if recipes[0].positions:
                break
        nearest = {recipe: _nearest(recipe, each) for recipe in recipes}
        best = min(recipes, key=lambda recipe: nearest[recipe][0])
        if nearest[best][0] > 0:
            raise _far(pair, best, nearest[best][0])
        recipes = [recipe for recipe in recipes if nearest[recipe][0] == 0]
        for recipe in recipes:
            # If both axes agree, the module chooses the axis by x's shape, which a call may not.
            agreeing = nearest[recipe][1]
            layouts[recipe] += agreeing if len(agreeing) == 1 else []
    best = recipes[0]
    if not layouts[best]:
        raise Unknown("the axis of its rows depends on x's shape")
    for layout in layouts[best]:
        _check_training(trial, gated, best, layout, samples[layout.axes][layout])
    return best, layouts[best]


def _check_training(
    trial: Trial, gated: bool, recipe: Recipe, layout: Layout, samples: list[Sample]
) -> None:
    """Raise Unknown if training gives other results, or if it or evaluation gives other gradients.

    The samples are those of evaluation.
    """
    trained = [trial.sample(samples[0].pair, gated, one) for one in layout.in_memory()]
    if distance := max(sample.distance(recipe) for sample in trained):
        raise _far(samples[0].pair, recipe, distance)
    if not all(sample.has_gradients(recipe) for sample in (*trained, *samples)):
        raise Unknown(f"it gives the results of {recipe.describe()}, but not its gradients")


def _nearest(recipe: Recipe, samples: dict[Layout, list[Sample]]) -> tuple[float, list[Layout]]:
    """Return the layouts whose samples are nearest to a recipe, after their distance."""
    found = {
        layout: max(sample.distance(recipe) for sample in each)
        for layout, each in samples.items()
        if layout.first or not recipe.positions
    }
    distance = min(found.values(), default=math.inf)
    return distance, [layout for layout, each in found.items() if each == distance]


def _match(
    trial: Trial, gated: bool, recipe: Recipe, layouts: list[Layout], allowed: float
) -> tuple[list[Match], list[Pair]]:
    """Return the variant that is near enough for each pair of dtypes, and the pairs without one.

    Pairs in which the module does not run are in neither list.
    """
    candidates = list(variants(recipe, bool(trial.parameters)))
    distances = {}
    for pair in (*_SAME, *(_MIXED if trial.parameters else ())):
        with suppress(Unknown):  # LayerNorm fails on a float32 x with a weight of half precision
            samples = [trial.sample(pair, gated, one) for one in layouts[0].in_memory()]
            distances[pair] = {
                recipe: max(sample.distance(recipe) for sample in samples) for recipe in candidates
            }
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
            _check_call(trial, match, layouts if pair == main else layouts[:1])
            matches.append(match)
        except Unknown:
            if pair == main:
                raise
            rest.append(pair)
    return matches, rest


def _wide_under_autocast(
    trial: Trial, matches: list[Match], axes: dict[int, bool], device: str
) -> bool | None:
    """Return whether autocast makes y float32, and None if it changes y otherwise."""
    layout = Layout(*next(iter(axes.items()), (3, False)))
    same = wide = True
    try:
        for match in matches:
            usual = trial.sample(*match[:2], layout)
            other = trial.sample(*match[:2], layout, autocast=device)
            same &= usual.y.dtype == other.y.dtype and usual.y.equal(other.y)
            wide &= other.distance(match.recipe.wide()) == 0
    except Unknown:
        return None
    return False if same else True if wide else None


def _check_call(trial: Trial, match: Match, layouts: Iterable[Layout]) -> None:
    """Raise Unknown if cunorm's call of a recipe fails or has other results."""
    try:
        for layout in layouts:
            sample = trial.sample(match.pair, match.gated, layout, recipe=match.recipe)
            if sample.distance(match.recipe) or not sample.has_gradients(match.recipe):
                raise Unknown("other results")
    except Unknown as error:
        raise Unknown(f"cunorm's {match.recipe.describe()} fails: {error}") from None


def _far(pair: Pair, recipe: Recipe, distance: float) -> Unknown:
    off = f"{distance:.3g} units in the last place off" if distance < 1e9 else "of another kind"
    nearest = f"those of the nearest, {recipe.describe()}, are {off}"
    return Unknown(f"its results in {listed([pair])} are no recipe's: {nearest}")
