# SPDX-License-Identifier: MIT
"""Recipes, which are the formulas of norm modules; and plans, which have a module's recipes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cunorm.torch._functions import group_norm, layer_norm, normalize, rms_norm
from cunorm.torch._replace.after import Activation
from cunorm.torch._replace.settings import Settings

Pair = tuple[torch.dtype, torch.dtype]  # of x and the parameters; x's twice if there are none
Bounds = tuple[Tensor, Tensor]

# The slack of a bound, relative to a row's largest number or the magnitudes in a product or sum: 16
# roundings of float32. A sum of squares, in torch's or cunorm's order, is off by up to 4 at width
# 16384.
_SLACK = 2.0**-20
_GATES = ("silu", "sigmoid", "gelu", "relu")


@dataclass(frozen=True)
class Recipe:
    """A row norm, or a group norm; the fields from groups to gate_position are their options."""

    center: bool = False  # True is a layer norm or a group norm
    has_bias: bool = False
    positions: bool = False  # statistics are over all positions of a sample: a group norm
    groups: int = 1
    weight_offset: float = 0.0
    round_before_weight: bool = False
    gate_activation: str | None = None  # None if there is no gate
    gate_position: str = "post"
    dtype: str | None = None  # y's: "x's", "float32" (float64 if x is), None (default)
    rounds_factor: bool = False  # weight + weight_offset is rounded to weight's dtype

    def describe(self, eps: float | None = None, **more: object) -> str:
        """Return the call as text, with the options that differ from their defaults."""
        options = ({} if eps is None else {"eps": eps}) | self._options() | more
        if self.gate_activation:
            options.pop("gate_position", None)
            options["gate"] = f"{options.pop('gate_activation')} {self.gate_position}"
        if self.dtype:
            options["dtype"] = self.dtype
        groups = [str(options.pop("groups", 1))] if self.positions else []
        listed = ", ".join(groups + [f"{name}={value}" for name, value in options.items()])
        rounded = ", weight + weight_offset rounded" if self.rounds_factor else ""
        return f"{self._function().__name__}({listed}){rounded}"

    def call(self, *pair: torch.dtype) -> Callable[..., Tensor]:
        """Return a function of x, the parameters, eps and gate for operands of these dtypes."""
        function, options = self._function(), self._options()
        if self.dtype:
            options["dtype"] = self.y_dtype(*pair)
        if self.positions:
            groups = options.pop("groups", 1)
            return lambda x, *parameters, gate=None, **named: function(
                x, groups, *parameters, **options, **named
            )
        if not self.rounds_factor:
            return partial(function, **options)
        offset = options.pop("weight_offset")
        return lambda x, weight, *bias, **named: function(
            x, weight + offset, *bias, **options, **named
        )

    def call_on(self, first: bool, *pair: torch.dtype) -> Callable[..., Tensor]:
        """Return `call`, for an x whose rows are axis 1 if `first`; group norms have only such."""
        call = self.call(*pair)
        return partial(call, axis=(1,)) if first and not self.positions else call

    def wide(self) -> "Recipe":
        """Return the recipe whose y is float32, which rounds nothing to x's dtype."""
        return replace(self, round_before_weight=False, dtype="float32")

    def _function(self) -> Callable[..., Tensor]:
        uncentered = normalize if self.has_bias else rms_norm  # bias is positional
        centered = group_norm if self.positions else layer_norm
        return centered if self.center else uncentered

    def _options(self) -> dict[str, Any]:
        values = ((field, getattr(self, field.name)) for field in fields(self)[3:-2])
        return {field.name: value for field, value in values if value != field.default}

    def y_dtype(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        if self.dtype == "float32":
            return torch.promote_types(x, torch.float32)
        return torch.promote_types(x, weight) if self.round_before_weight and not self.dtype else x

    def bounds(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, gate: Tensor | None
    ) -> Bounds:
        """Return the bounds of y before its rounding, for any order of float32 operations."""
        g = None if gate is None else getattr(functional, str(self.gate_activation))(gate.double())
        pre = self.gate_position == "pre"
        rows = x.double() if g is None or not pre else x.double() * g
        rows = rows.unflatten(-1, (self.groups, -1))  # samples, positions, groups, elements
        axes = (1, 3) if self.positions else (3,)
        if self.center:
            rows = rows - rows.mean(axes, keepdim=True)
        rows = rows * torch.rsqrt(rows.square().mean(axes, keepdim=True) + eps)
        slack = _SLACK * rows.abs().amax(axes, keepdim=True)
        low, high = (rows - slack).flatten(-2), (rows + slack).flatten(-2)
        if self.round_before_weight:
            low, high = _rounded(low, x.dtype), _rounded(high, x.dtype)
        if weight is not None:
            terms = weight.double().abs() + self.weight_offset  # |a| + |b| of a sum that may cancel
            factor = (weight if self.rounds_factor else weight.double()) + self.weight_offset
            low, high = _times(low, high, factor.double(), terms)
        if bias is not None:
            slack = _SLACK * (torch.maximum(low.abs(), high.abs()) + bias.double().abs())
            low, high = low + bias.double() - slack, high + bias.double() + slack
        if g is not None and not pre:
            low, high = _times(low, high, g, g.abs())
        return low, high


def _rounded(end: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a bound, but keep its gradient: kernels' gradients ignore this rounding."""
    return end + (end.to(dtype).double() - end).detach()


def _times(low: Tensor, high: Tensor, factor: Tensor, terms: Tensor) -> Bounds:
    """Return the bounds of a rounded product; `terms` is |factor|, or |a| + |b| if it is a + b."""
    ends = low * factor, high * factor
    slack = _SLACK * torch.maximum(low.abs(), high.abs()) * terms
    return torch.minimum(*ends) - slack, torch.maximum(*ends) + slack


# (round_before_weight, y's dtype); of pairs that agree equally often, the first is taken.
_ROUNDINGS: tuple[tuple[bool, str | None], ...] = (
    (False, None),  # rounds once, at the end: torch.nn, Gemma, OLMo 2
    (True, None),  # rounds before weight: Llama, Qwen, T5 in half precision
    (True, "x's"),  # rounds before weight and at the end
    (False, "float32"),  # never rounds: T5 with a float32 weight
)


def formulas(parameter_count: int, groups: Sequence[int], gated: bool) -> Iterator[Recipe]:
    """Yield the recipes that differ in float32, without variants that differ only in rounding.

    The last of the numbers of groups, the width, is tried only for group norms.
    """
    gates = product(_GATES, ("post", "pre")) if gated else ((None, "post"),)
    offsets = (0.0, 1.0) if parameter_count else (0.0,)
    has_bias, centers = parameter_count > 1, (False, True)
    for (gate, position), center, offset, g in product(gates, centers, offsets, groups[:-1]):
        yield Recipe(center, has_bias, False, g, offset, False, gate, position)
    yield from (Recipe(True, has_bias, True, g) for g in groups if not gated)


def variants(recipe: Recipe, has_weight: bool) -> Iterator[Recipe]:
    """Yield the recipes that equal this one in float32, but round elsewhere in half precision."""
    factors = (False, True) if recipe.weight_offset else (False,)
    for rounds, (before, dtype) in product(factors, _ROUNDINGS):
        if not before or (has_weight and not recipe.positions):
            yield replace(recipe, round_before_weight=before, dtype=dtype, rounds_factor=rounds)


class Match(NamedTuple):
    """The recipe of calls with these dtypes and, if `gated`, with a gate of x's dtype."""

    pair: Pair
    gated: bool
    recipe: Recipe
    exact: bool  # if False, y may differ by one unit in the last place


@dataclass(frozen=True)
class Plan:
    """The operands and recipes of a module. Calls without a recipe run the module's own forward."""

    eps: str  # the attribute's name
    shapes: dict[str, torch.Size]  # those of weight and bias by their names, if it has them
    arguments: tuple[str, ...]  # forward's names for x and, if it takes one, for the gate
    matches: tuple[Match, ...]
    axes: dict[int, bool]  # by the numbers of axes that x may have: whether a row is axis 1
    autocast: dict[str, bool]  # by kind of device: whether autocast makes y float32
    after: tuple[str, ...] = ()  # the submodules that run on the norm's result
    activation: Activation | None = None  # of a group norm: what these submodules compute
    others: tuple[str, ...] = ()  # the tried calls that run the module's own forward, as text
    settings: Settings = ()  # the other attributes of the module; other values were not tried

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of weight and bias."""
        return (*self.shapes,)

    def calls(self) -> dict[object, Callable[..., Tensor]]:
        """Return the calls by device of autocast (or None), dtypes, has a gate, a row is axis 1."""
        found: dict[object, Callable[..., Tensor]] = {}
        for device, wide in ((None, False), *self.autocast.items()):
            for (pair, gated, recipe, _), first in product(self.matches, {*self.axes.values()}):
                found[device, pair, gated, first] = (recipe.wide() if wide else recipe).call_on(
                    first, *pair
                )
        return found

    def describe(self, eps: float, dtype: torch.dtype) -> str:
        """Return, as text, a dtype's recipe, the other recipes with their dtypes, and `others`."""
        usual = [match.recipe for match in self.matches if match.pair == (dtype, dtype)]
        recipes = dict.fromkeys([*usual, *(match.recipe for match in self.matches)])
        lines: list[str] = []
        for recipe in sorted(recipes, key=lambda recipe: recipe.gate_activation is not None):
            pairs = {match.pair: match.exact for match in self.matches if match.recipe == recipe}
            off = listed(pair for pair, exact in pairs.items() if not exact)
            lines.append(
                recipe.describe(eps, **self._more(recipe))
                + ("" if recipe in usual else f" for {listed(pairs)}")
                + (f" within a unit in the last place in {off}" if off else "")
            )
        if self.after and self.activation is None:
            lines[-1] += f", then {', '.join(self.after)}"
        firsts = [str(count) for count, first in sorted(self.axes.items()) if first]
        if firsts and not (self._more(usual[0]) or usual[0].positions):
            lines.append(f"axis=(1,) for an x of {' or '.join(firsts)} axes")
        others = [f"its own forward {', '.join(self.others)}"] if self.others else []
        return "; ".join(lines + others)

    def _more(self, recipe: Recipe) -> dict[str, object]:
        if recipe.positions:
            return {"activation": self.activation.name} if self.activation else {}
        has_last = any(not first and count > 2 for count, first in self.axes.items())
        return {"axis": (1,)} if any(self.axes.values()) and not has_last else {}


def listed(pairs: Iterable[Pair]) -> str:
    names = [[str(dtype).removeprefix("torch.") for dtype in pair] for pair in pairs]
    return ", ".join("/".join(dict.fromkeys(pair)) for pair in names)
