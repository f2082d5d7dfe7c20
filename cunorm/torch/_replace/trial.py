# SPDX-License-Identifier: MIT
"""Trials: samples of a norm module's results, to compare with the formulas of recipes."""

import copy
import inspect
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from cunorm.torch._replace.recipe import Pair, Recipe

Mode = AbstractContextManager[object]
# x, weight, bias, eps and gate
Operands = tuple[Tensor, Tensor | None, Tensor | None, float, Tensor | None]

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
_GATE_NAMES = ("gate", "z", "g")
NORM_FUNCTIONS = ("layer_norm", "rms_norm", "group_norm")
_WIDTH_WITHOUT_WEIGHT = 48
_GRADIENT_ERROR = 1e-3  # of the largest of a row: far over float32's, far below another formula's
_ELEMENTS = 1024  # in each third of a sample, and at least a row
_USUAL: Mode = nullcontext()


class Unknown(Exception):
    """A module has no recipe; the message says why."""


class Sample(NamedTuple):
    """Operands of a module and its result, as rows of three axes."""

    pair: Pair
    operands: Operands
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

    def has_gradients(self, recipe: Recipe, mode: Mode = _USUAL) -> bool:
        """Return whether y has a recipe's gradients: so no statistic is detached."""
        low, high = recipe.bounds(*self.operands)
        leaves = [operand for operand in self.operands if isinstance(operand, Tensor)]
        generator = torch.Generator("cpu").manual_seed(1)
        dy = torch.randn(self.y.shape, generator=generator, dtype=torch.float32, device="cpu")
        dy = dy.to(self.y.dtype)
        try:
            with mode:
                actual = torch.autograd.grad(self.y, leaves, dy)
        except RuntimeError:
            return False
        expected = torch.autograd.grad((low + high) / 2, leaves, dy.double())
        units = max(torch.finfo(dtype).eps for dtype in (self.y.dtype, *self.pair))
        allowed = max(_GRADIENT_ERROR, 4 * units)
        return all(
            bool(((a == e) | ((a - e).abs() <= allowed * e.abs().amax(-1, keepdim=True))).all())
            for a, e in zip(actual, expected, strict=True)
        )


class Trial:
    """A copy of a module to run: on the CPU, with random parameters, without its hooks."""

    def __init__(self, module: Module) -> None:
        self.parameters, self.width, self.dtype = _parameters(module)
        name = eps_name(module)
        if name is None:
            raise Unknown(f"it has no eps: no number {', '.join(EPS_NAMES)}")
        self.eps_name, self.eps = name, float(getattr(module, name))
        self.arguments, self.gated = _arguments(type(module).forward)
        self.groups = _groups(module, self.width)
        self.calls_torch = False  # whether it has called a norm of torch's
        self._mode = _USUAL
        self._module = copy.copy(module)  # which shares all containers but this one:
        self._module.__dict__["_parameters"] = dict(module._parameters)

    def swap(self, kind: type[Module], mode: Mode) -> None:
        """From now on sample what a swapped class runs, in a mode; where it cannot, fail."""

        def fail(error: Exception, *_: object) -> NoReturn:
            raise error

        self._module.__class__ = kind
        self._module.__dict__["_cunorm_own"] = fail
        self._mode = mode

    def sample(
        self,
        pair: Pair,
        gated: bool,
        axes: int = 3,
        *,
        training: bool = True,
        autocast: bool = False,
    ) -> Sample:
        """Run forward on an x of 2 to 5 axes, with the same rows; raise Unknown if it fails."""
        operands = self._operands(pair, gated)
        x, weight, bias, _, gate = operands
        module = self._module
        shape = x.flatten(0, 1).shape if axes == 2 else (1,) * (axes - 3) + x.shape
        given: Any = (weight, bias)  # which need not be Parameters
        module._parameters.update(zip(self.parameters, given, strict=False))
        module.__dict__["training"] = training
        arguments = [operand.reshape(shape).clone() for operand in (x, gate) if operand is not None]
        try:
            with (
                torch.autocast("cpu", torch.bfloat16, enabled=autocast),
                torch.random.fork_rng(devices=[]),
                warnings.catch_warnings(),
                _Watch() as watch,
                self._mode,
            ):
                warnings.simplefilter("ignore")
                y = type(module).forward(module, *arguments)
        except Exception as error:
            line = str(error).strip().split("\n")[0]
            what = f"on the CPU, with rows {tuple(shape)}: {type(error).__name__}: {line}"
            raise Unknown(f"its forward fails {what}") from None
        self.calls_torch |= watch.seen
        if not isinstance(y, Tensor) or y.shape != shape:
            raise Unknown("its forward returns no tensor of x's shape")
        return Sample(pair, operands, y.reshape(x.shape))

    def _operands(self, pair: Pair, gated: bool) -> Operands:
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
        for operand in (x, *parameters, gate):
            if operand is not None:
                operand.requires_grad_()
        weight, bias, *_ = (*parameters, None, None)
        return x, weight, bias, self.eps, gate


class _Watch(TorchFunctionMode):
    """See whether one of torch's own norms is called."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= getattr(func, "__name__", "") in NORM_FUNCTIONS
        return func(*args, **(kwargs or {}))


def _parameters(module: Module) -> tuple[tuple[str, ...], int, torch.dtype]:
    """Return the names of weight and bias, their width and their dtype."""
    if children := [name for name, _ in module.named_children()]:
        raise Unknown(
            f"it has submodules: {', '.join(children[:4])}{', ...' * (len(children) > 4)}"
        )
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


def eps_name(module: Module) -> str | None:
    """Return the name of the attribute that is eps, a float or an int."""
    values = {name: getattr(module, name, None) for name in EPS_NAMES}
    return next((n for n, v in values.items() if type(v) is int or isinstance(v, float)), None)


def _arguments(forward: Callable[..., object]) -> tuple[tuple[str, ...], list[bool]]:
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


def _groups(module: Module, width: int) -> list[int]:
    """Return 1 and the divisors of width among int attributes, as counts of groups or sizes."""
    divisors = [v for v in vars(module).values() if type(v) is int and v > 0 and width % v == 0]
    return sorted({1, *divisors, *(width // divisor for divisor in divisors)} - {width})
