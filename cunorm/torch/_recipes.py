# SPDX-License-Identifier: MIT
"""The formulas that a norm module of somebody else's may have, and how cunorm runs each.

A recipe is a row norm of cunorm's with its options. `call` says how the kernels run it; `bounds`
says in plain torch operations, in float64, between which numbers every result of it lies, whichever
float32 arithmetic it was computed in. By these `cunorm.torch._probe` finds a module's recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cunorm.torch._row_norm import layer_norm, rms_norm

# What float32 arithmetic may make of a normalised row or of a product, in units of their largest
# terms: 16 roundings. Sums of squares lose less, in torch's order and in ours (4 at width 16384).
_SLACK = 2.0**-20

_GATES = {
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
}


class Call(NamedTuple):
    """A function of cunorm.torch and its options, but for eps and operands.

    Attributes
    ----------
    function, options : function and dict
        `rms_norm` or `layer_norm`, and those of its options that are not the default.
    offset : float or None
        What is added to weight before, and rounded.
    """

    function: Any
    options: dict[str, Any]
    offset: float | None


@dataclass(frozen=True)
class Recipe:
    """One row norm, without its eps.

    Attributes
    ----------
    center : bool
        Whether it is a layer norm.
    weight_offset : float
        What is added to weight.
    rounds_factor : bool
        Whether weight + weight_offset is rounded to weight's dtype.
    round_before_weight : bool
        Whether the normalised row is rounded to x's dtype before it is multiplied.
    result : str
        y's dtype: that of "x", what x and weight are "promoted" to, or what x and "float32" are.
    groups, gate_activation, gate_position : int, str or None, and str
        As for `cunorm.rms_norm`; an activation of None is no gate.
    """

    center: bool = False
    weight_offset: float = 0.0
    rounds_factor: bool = False
    round_before_weight: bool = False
    result: str = "x"
    groups: int = 1
    gate_activation: str | None = None
    gate_position: str = "post"

    def __str__(self) -> str:
        """Return the call that it is, without eps."""
        return self.told()

    def told(self, eps: float | None = None) -> str:
        """Return the call that it is, with those options that are not the default."""
        usual = "promoted" if self.round_before_weight else "x"
        gate = f"{self.gate_activation} {self.gate_position}"
        told = {
            "eps": eps,
            "groups": self.groups if self.groups > 1 else None,
            "weight_offset": self.weight_offset or None,
            "round_before_weight": self.round_before_weight or None,
            "gate": gate if self.gate_activation else None,
            "dtype": {"x": "x's", usual: None}.get(self.result, self.result),
        }
        options = [f"{name}={value}" for name, value in told.items() if value is not None]
        name = "layer_norm" if self.center else "rms_norm"
        rounded = ", weight + weight_offset rounded" if self.rounds_factor else ""
        return f"{name}({', '.join(options)}){rounded}"

    def y_dtype(self, x: torch.dtype, weight: torch.dtype | None) -> torch.dtype:
        """Return the dtype of y, from those of x and weight."""
        if self.result == "float32":
            return torch.promote_types(x, torch.float32)
        if self.result == "promoted" and weight is not None:
            return torch.promote_types(x, weight)
        return x

    def call(self, x: torch.dtype, weight: torch.dtype | None) -> Call:
        """Return how to run this, with dtypes of x and weight, by the kernels."""
        usual = "promoted" if self.round_before_weight else "x"
        options: dict[str, Any] = {
            "groups": self.groups if self.groups > 1 else None,
            "weight_offset": None if self.rounds_factor else self.weight_offset or None,
            "round_before_weight": self.round_before_weight or None,
            "gate_activation": self.gate_activation,
            "gate_position": self.gate_position if self.gate_activation else None,
            "dtype": None if self.result == usual else self.y_dtype(x, weight),
        }
        given = {name: value for name, value in options.items() if value is not None}
        offset = self.weight_offset if self.rounds_factor else None
        return Call(layer_norm if self.center else rms_norm, given, offset)

    def bounds(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the least and the greatest number that each element of y may be, in float64."""
        g = None if gate is None else _GATES[self.gate_activation or ""](gate.double())
        pre = g is not None and self.gate_position == "pre"
        rows = (x.double() * g if pre else x.double()).unflatten(-1, (self.groups, -1))
        if self.center:
            rows = rows - rows.mean(-1, keepdim=True)
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        slack = _SLACK * rows.abs().amax(-1, keepdim=True)
        low, high = (rows - slack).flatten(-2), (rows + slack).flatten(-2)
        if self.round_before_weight:
            low, high = low.to(x.dtype).double(), high.to(x.dtype).double()
        if weight is not None:
            factor_type = weight.dtype if self.rounds_factor else torch.float64
            terms = weight.double().abs() + self.weight_offset  # of a sum that may cancel
            w = (weight.to(factor_type) + self.weight_offset).double()
            low, high = _times(low, high, w, terms)
        if bias is not None:
            slack = _SLACK * (torch.maximum(low.abs(), high.abs()) + bias.double().abs())
            low, high = low + bias.double() - slack, high + bias.double() + slack
        if g is not None and not pre:
            low, high = _times(low, high, g, g.abs())
        dtype = self.y_dtype(x.dtype, None if weight is None else weight.dtype)
        return low.to(dtype).double(), high.to(dtype).double()


def _times(low: Tensor, high: Tensor, factor: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds of a product with a factor that is a sum of such terms, and rounded."""
    ends = low * factor, high * factor
    slack = _SLACK * torch.maximum(low.abs(), high.abs()) * terms
    return torch.minimum(*ends) - slack, torch.maximum(*ends) + slack


# Where a norm rounds, the usual first: in float32 all are one, and the first that agrees is taken.
_ROUNDINGS: tuple[tuple[bool, str], ...] = (
    (False, "x"),  # once, at the end: torch.nn, Gemma, OLMo 2
    (True, "promoted"),  # before weight: Llama, Qwen, T5 in half precision
    (True, "x"),  # before weight, and at the end
    (False, "float32"),  # not at all: T5 with a float32 weight
)


def recipes(has_weight: bool, groups: Iterable[int], gated: bool) -> Iterator[Recipe]:
    """Yield the recipes that differ in float32: without the variants that round elsewhere."""
    gates = product(_GATES, ("post", "pre")) if gated else ((None, "post"),)
    offsets = (0.0, 1.0) if has_weight else (0.0,)
    for gate, center, offset, g in product(gates, (False, True), offsets, groups):
        activation, position = gate
        yield Recipe(center, offset, False, False, "x", g, activation, position)


def variants(recipe: Recipe, has_weight: bool) -> Iterator[Recipe]:
    """Yield the recipes that in float32 are this one, and in half precision round elsewhere."""
    for rounds_factor in (False, True) if recipe.weight_offset else (False,):
        for before, result in _ROUNDINGS:
            if has_weight or not before:
                yield replace(
                    recipe, rounds_factor=rounds_factor, round_before_weight=before, result=result
                )
