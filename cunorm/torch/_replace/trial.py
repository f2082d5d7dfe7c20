# SPDX-License-Identifier: MIT
"""Recipes, the formulas that a norm module may have, and trials: samples to compare with them."""

import copy
import inspect
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cunorm.torch._functions import layer_norm, rms_norm

Pair = tuple[torch.dtype, torch.dtype]  # of x, and of the parameters, x's if there are none
Bounds = tuple[Tensor, Tensor]

# 16 roundings of the largest term of a normalised row or of a product. Sums of squares lose less,
# in torch's order and in ours (4 at width 16384).
_SLACK = 2.0**-20
_GATES = ("silu", "sigmoid", "gelu", "relu")
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
_GATE_NAMES = ("gate", "z", "g")
_TORCH_NORMS = ("layer_norm", "rms_norm", "group_norm")
_WIDTH_WITHOUT_WEIGHT = 48
_GRADIENT_ERROR = 1e-3  # of the largest of a row: far over float32's, far below another formula's
_ELEMENTS = 1024  # in each third of a sample, and at least a row


@dataclass(frozen=True)
class Recipe:
    """A row norm with its options, but for eps; from groups to gate_position, `rms_norm`'s."""

    center: bool = False  # whether it is a layer norm
    groups: int = 1
    weight_offset: float = 0.0
    round_before_weight: bool = False
    gate_activation: str | None = None  # None is no gate
    gate_position: str = "post"
    dtype: str | None = None  # y's: "x's", "float32" or wider, None for the norm's default
    rounds_factor: bool = False  # whether weight + weight_offset is rounded to weight's dtype

    def describe(self, eps: float | None = None) -> str:
        """Return the call as text, with the options that are not the default."""
        options = ({} if eps is None else {"eps": eps}) | self._options()
        if self.gate_activation:
            options.pop("gate_position", None)
            options["gate"] = f"{options.pop('gate_activation')} {self.gate_position}"
        if self.dtype:
            options["dtype"] = self.dtype
        listed = ", ".join(f"{name}={value}" for name, value in options.items())
        rounded = ", weight + weight_offset rounded" if self.rounds_factor else ""
        return f"{'layer' if self.center else 'rms'}_norm({listed}){rounded}"

    def call(self, x: torch.dtype, weight: torch.dtype) -> tuple[Any, float | None]:
        """Return the function for these dtypes, and what to add to weight before, with rounding."""
        options = self._options()
        offset = options.pop("weight_offset") if self.rounds_factor else None
        if self.dtype:
            options["dtype"] = self.y_dtype(x, weight)
        return partial(layer_norm if self.center else rms_norm, **options), offset

    def _options(self) -> dict[str, Any]:
        values = ((field, getattr(self, field.name)) for field in fields(self)[1:-2])
        return {field.name: value for field, value in values if value != field.default}

    def y_dtype(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        """Return the dtype of y; that of weight is x's where there is none."""
        if self.dtype == "float32":
            return torch.promote_types(x, torch.float32)
        return torch.promote_types(x, weight) if self.round_before_weight and not self.dtype else x

    def bounds(self, x: Tensor, weight: Any, bias: Any, eps: float, gate: Any) -> Bounds:
        """Return the bounds of y before its rounding, however float32 arithmetic computes it."""
        g = None if gate is None else getattr(functional, str(self.gate_activation))(gate.double())
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
            terms = weight.double().abs() + self.weight_offset  # of a sum that may cancel
            factor = (weight if self.rounds_factor else weight.double()) + self.weight_offset
            low, high = _times(low, high, factor.double(), terms)
        if bias is not None:
            slack = _SLACK * (torch.maximum(low.abs(), high.abs()) + bias.double().abs())
            low, high = low + bias.double() - slack, high + bias.double() + slack
        if g is not None and not pre:
            low, high = _times(low, high, g, g.abs())
        return low, high


def _times(low: Tensor, high: Tensor, factor: Tensor, terms: Tensor) -> Bounds:
    """Return the bounds of a rounded product with a factor, whose terms add up to `terms`."""
    ends = low * factor, high * factor
    slack = _SLACK * torch.maximum(low.abs(), high.abs()) * terms
    return torch.minimum(*ends) - slack, torch.maximum(*ends) + slack


# Whether a norm rounds before weight, and y's dtype. The first that agrees is taken: the usual.
_ROUNDINGS: tuple[tuple[bool, str | None], ...] = (
    (False, None),  # once, at the end: torch.nn, Gemma, OLMo 2
    (True, None),  # before weight: Llama, Qwen, T5 in half precision
    (True, "x's"),  # before weight, and at the end
    (False, "float32"),  # nowhere: T5 with a float32 weight
)


def float32_recipes(has_weight: bool, groups: Iterable[int], gated: bool) -> Iterator[Recipe]:
    """Yield the recipes that differ in float32: without the variants that round elsewhere."""
    gates = product(_GATES, ("post", "pre")) if gated else ((None, "post"),)
    offsets = (0.0, 1.0) if has_weight else (0.0,)
    for (activation, position), center, offset, g in product(gates, (False, True), offsets, groups):
        yield Recipe(center, g, offset, False, activation, position)


def variants(recipe: Recipe, has_weight: bool) -> Iterator[Recipe]:
    """Yield the recipes that are this one in float32 and round elsewhere in half precision."""
    factors = (False, True) if recipe.weight_offset else (False,)
    for rounds_factor, (before, dtype) in product(factors, _ROUNDINGS):
        if has_weight or not before:
            options: Any = {"round_before_weight": before, "rounds_factor": rounds_factor}
            yield replace(recipe, dtype=dtype, **options)


class Unknown(Exception):
    """A module has no recipe; the message says why."""


class Sample(NamedTuple):
    """Operands of a module and its result, as rows of three axes."""

    pair: Pair
    operands: tuple[Any, ...]  # x, weight, bias, eps and gate
    y: Tensor

    def distance(self, recipe: Recipe) -> float:
        """Return the distance of y from the bounds of a recipe, in y's units in the last place."""
        if self.y.dtype != recipe.y_dtype(*self.pair):
            return math.inf
        with torch.no_grad():
            low, high = (end.to(self.y.dtype).double() for end in recipe.bounds(*self.operands))
        y = self.y.detach().double()
        off = torch.maximum(low - y, y - high).clamp(min=0)
        exponent = torch.frexp(torch.maximum(low.abs(), high.abs())).exponent
        info = torch.finfo(self.y.dtype)
        unit = torch.ldexp(torch.full_like(y, info.eps), exponent - 1)
        worst = off / unit.clamp(min=info.eps * info.smallest_normal)
        return math.inf if worst.isnan().any() else float(worst.max())

    def has_gradients(self, recipe: Recipe) -> bool:
        """Return whether y, of float32, has a recipe's gradients: so no statistic is detached."""
        low, high = recipe.bounds(*self.operands)
        leaves = [operand for operand in self.operands if isinstance(operand, Tensor)]
        generator = torch.Generator("cpu").manual_seed(1)
        dy = torch.randn(self.y.shape, generator=generator, dtype=self.y.dtype, device="cpu")
        try:
            actual = torch.autograd.grad(self.y, leaves, dy)
        except RuntimeError:
            return False
        expected = torch.autograd.grad((low + high) / 2, leaves, dy.double())
        return all(
            bool(((a - e).abs() <= _GRADIENT_ERROR * e.abs().amax(-1, keepdim=True)).all())
            for a, e in zip(actual, expected, strict=True)
        )


class Trial:
    """A copy of a module to run: on the CPU, with random parameters, without its hooks."""

    def __init__(self, module: Any) -> None:
        self.parameters, self.width, self.dtype = _parameters(module)
        name = eps_name(module)
        if name is None:
            raise Unknown(f"it has no eps: no attribute {', '.join(_EPS_NAMES)}")
        self.eps_name, self.eps = name, float(getattr(module, name))
        self.arguments, self.gated = _arguments(type(module).forward)
        self.groups = _groups(module, self.width)
        self.calls_torch = False  # whether it has called a norm of torch's
        self._module = copy.copy(module)  # which shares all containers but this one:
        self._module.__dict__["_parameters"] = dict(module._parameters)

    def sample(self, pair: Pair, gated: bool, axes: int = 3, *, training: bool = True) -> Sample:
        """Run forward on an x of 2 to 5 axes, with the same rows; raise Unknown if it fails."""
        operands = self._operands(pair, gated)
        x, *parameters, _, gate = operands
        module = self._module
        shape = x.flatten(0, 1).shape if axes == 2 else (1,) * (axes - 3) + x.shape
        module._parameters.update(zip(self.parameters, parameters, strict=False))
        module.__dict__["training"] = training
        arguments = [operand.reshape(shape).clone() for operand in (x, gate) if operand is not None]
        try:
            with (
                torch.autocast("cpu", enabled=False),
                torch.random.fork_rng(devices=[]),
                warnings.catch_warnings(),
                _Watch() as watch,
            ):
                warnings.simplefilter("ignore")
                y = type(module).forward(module, *arguments)
        except Exception as error:
            line = str(error).strip().split("\n")[0]
            raise Unknown(f"its forward fails on the CPU: {type(error).__name__}: {line}") from None
        self.calls_torch |= watch.seen
        if not isinstance(y, Tensor) or y.shape != shape:
            raise Unknown("its forward returns no tensor of x's shape")
        return Sample(pair, operands, y.reshape(x.shape))

    def _operands(self, pair: Pair, gated: bool) -> tuple[Any, ...]:
        """Return x, weight, bias, eps and gate; in a third of the rows squares are near eps."""
        generator = torch.Generator("cpu").manual_seed(0)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
        rows = max(1, _ELEMENTS // self.width)
        shape = (3, rows + (rows == self.width), self.width)  # no other axis may pass for the last
        scale = min(max(math.sqrt(abs(self.eps)), 1e-5), 30.0)
        scales = torch.tensor([1.0, 30.0, scale], dtype=torch.float64, device="cpu")
        x = ((draw(shape) + 0.5) * scales[:, None, None]).to(pair[0])
        parameters = [draw(self.width).to(pair[1]) for _ in self.parameters]
        gate = draw(shape).to(pair[0]) if gated else None
        for operand in (x, *parameters, *([gate] if gated else [])):
            operand.requires_grad_(pair[0] is torch.float32)
        return x, *(*parameters, None, None)[:2], self.eps, gate


class _Watch(TorchFunctionMode):
    """See whether one of torch's own norms is called."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= getattr(func, "__name__", "") in _TORCH_NORMS
        return func(*args, **(kwargs or {}))


def _parameters(module: Any) -> tuple[tuple[str, ...], int, torch.dtype]:
    """Return the names of weight and bias, their width and their dtype."""
    if next(module.children(), None) is not None:
        raise Unknown("it has submodules")
    if any(buffer is not None for buffer in module._buffers.values()):
        raise Unknown("it has buffers")
    given = {name: p for name, p in module._parameters.items() if p is not None}
    if not given:
        return (), _WIDTH_WITHOUT_WEIGHT, torch.float32
    (shape, dtype), *others = {(tuple(p.shape), p.dtype) for p in given.values()}
    if len(given) > 2 or others or len(shape) != 1:
        listed = ", ".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in given.items())
        raise Unknown(f"its parameters are not weight and bias of a row: {listed}")
    if shape[0] < 2:
        raise Unknown(f"its width is {shape[0]}, at which no formula can be told from another")
    return tuple(given), shape[0], dtype


def eps_name(module: Any) -> str | None:
    return next((n for n in _EPS_NAMES if isinstance(getattr(module, n, None), float)), None)


def _arguments(forward: Any) -> tuple[tuple[str, ...], list[bool]]:
    """Return forward's names for x and gate, and whether calls have a gate: no, yes or both."""
    _self, *given = inspect.signature(forward).parameters.values()
    positional = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    gated = len(positional) > 1 and positional[1].name in _GATE_NAMES
    names = tuple(p.name for p in positional[: 2 if gated else 1])
    named = [p for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in named if p.default is p.empty]
    if not required or set(required) - set(names):
        raise Unknown(f"its forward takes {', '.join(p.name for p in given)}")
    return names, [False] * (len(required) == 1) + [True] * gated


def _groups(module: Any, width: int) -> list[int]:
    """Return 1 and the divisors of width among int attributes, as counts of groups or sizes."""
    divisors = [v for v in vars(module).values() if type(v) is int and v > 0 and width % v == 0]
    return sorted({1, *divisors, *(width // divisor for divisor in divisors)} - {width})
