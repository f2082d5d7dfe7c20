# SPDX-License-Identifier: MIT
"""A module of somebody else's on trial: what can be read off it, and what it makes of samples."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cunorm.torch._recipes import Recipe

# x's dtype and that of the parameters, or None if there are none.
Pair = tuple[torch.dtype, torch.dtype | None]

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
_GATE_NAMES = ("gate", "z", "g")
_WIDTH_WITHOUT_WEIGHT = 48
_GRADIENT_ERROR = 1e-3  # of the largest of a row: far over float32's, far below another formula's
_ELEMENTS = 1024  # in each third of a sample, and at least a row


class Unknown(Exception):
    """A module has no recipe; the message says why."""


@dataclass(frozen=True)
class Sample:
    """Operands and what the module made of them, seen as rows."""

    operands: tuple[Any, ...]
    y: Tensor
    axes: int  # that x had

    def distance(self, recipe: Recipe) -> float:
        """Return how far y is from what a recipe may give, in y's units in the last place."""
        x, weight, *_ = self.operands
        if self.y.dtype != recipe.y_dtype(x.dtype, None if weight is None else weight.dtype):
            return math.inf
        with torch.no_grad():
            low, high = recipe.bounds(*self.operands)
        y = self.y.detach().double()
        off = torch.maximum(low - y, y - high).clamp(min=0)
        exponent = torch.frexp(torch.maximum(low.abs(), high.abs())).exponent
        kind = torch.finfo(self.y.dtype)
        unit = torch.ldexp(torch.full_like(y, kind.eps), exponent - 1)
        worst = off / unit.clamp(min=kind.eps * kind.smallest_normal)
        return math.inf if worst.isnan().any() else float(worst.max())

    def has_gradients(self, recipe: Recipe) -> bool:
        """Whether y, of float32, has a recipe's gradients: no statistic is detached, for one."""
        leaves = [operand for operand in self.operands if isinstance(operand, Tensor)]
        wide = iter([leaf.detach().double().requires_grad_() for leaf in leaves])
        operands = [next(wide) if isinstance(a, Tensor) else a for a in self.operands]
        low, high = recipe.bounds(*operands)
        dy = torch.randn(self.y.shape, generator=_generator(1), dtype=self.y.dtype, device="cpu")
        try:
            found = torch.autograd.grad(self.y, leaves, dy)
        except RuntimeError:
            return False
        wide_leaves = [a for a in operands if isinstance(a, Tensor)]
        expected = torch.autograd.grad((low + high) / 2, wide_leaves, dy.double())
        return all(
            bool(((f - e).abs() <= _GRADIENT_ERROR * e.abs().amax(-1, keepdim=True)).all())
            for f, e in zip(found, expected, strict=True)
        )


class Trial:
    """A copy of a module to run: on the CPU, with other parameters, without its hooks.

    Attributes
    ----------
    eps_name, parameters, arguments : str, tuple of str and tuple of str
        As in `cunorm.torch._probe.Plan`.
    dtype : dtype
        That of the module's parameters, float32 if it has none.
    width : int
        The length of a row.
    groups : list of int
        Into how many groups its attributes may say that a row falls.
    calls_torch : bool
        Whether it has called a norm of torch's.
    """

    def __init__(self, module: Any) -> None:
        self.parameters, self.width, self.dtype = _parameters(module)
        name = eps_name(module)
        if name is None:
            raise Unknown(f"it has no eps: no attribute {', '.join(_EPS_NAMES)}")
        self.eps_name = name
        self.eps = float(getattr(module, self.eps_name))
        self.arguments, self._required = _arguments(type(module).forward)
        self.groups = _groups(module, self.width)
        self.calls_torch = False
        self._module = copy.copy(module)
        # The copy shares all containers with the module. Hooks are not run, parameters are its own.
        self._module.__dict__["_parameters"] = dict(module._parameters)

    def takes(self, gated: bool) -> bool:
        """Whether forward may be called with a gate, or without."""
        return len(self.arguments) > 1 if gated else self._required == 1

    def samples(self, pair: Pair, gated: bool, *, everywhere: bool = False) -> Iterator[Sample]:
        """Yield x of three axes and y; and if asked `everywhere`, of others and in evaluation.

        Raises Unknown if the first does not run. Of the others, those that do not are left out.
        """
        rows = 3, max(1, _ELEMENTS // self.width)
        rows = (rows[0], rows[1] + (rows[1] == self.width))  # no other axis may pass for the last
        operands = self._operands(pair, gated, (*rows, self.width))
        yield Sample(operands, self._run(operands, rows, training=True), len(rows) + 1)
        shapes = ((math.prod(rows),), rows, (1, *rows), (1, 1, *rows))
        for shape in shapes if everywhere else ():
            try:
                y = self._run(operands, shape, training=False)
                yield Sample(operands, y, len(shape) + 1)
            except Unknown:
                continue

    def _operands(self, pair: Pair, gated: bool, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Return x, weight, bias, eps and gate; in a third of the rows squares are near eps."""
        generator = _generator(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

        scale = min(max(math.sqrt(abs(self.eps)), 1e-5), 30.0)
        scales = torch.tensor([1.0, 30.0, scale], dtype=torch.float64, device="cpu")
        x = ((draw(*shape) + 0.5) * scales[:, None, None]).to(pair[0])
        parameters = [draw(self.width).to(pair[1]) for _ in self.parameters]
        weight, bias = (*parameters, None, None)[:2]
        gate = draw(*shape).to(pair[0]) if gated else None
        for operand in (x, weight, bias, gate):
            if operand is not None:
                operand.requires_grad_(pair[0] is torch.float32)
        return x, weight, bias, self.eps, gate

    def _run(self, operands: tuple[Any, ...], rows: tuple[int, ...], *, training: bool) -> Tensor:
        """Return what forward makes of x with these axes before the last, in the shape of x."""
        x, *parameters, _, gate = operands
        module, shape = self._module, (*rows, self.width)
        for name, parameter in zip(self.parameters, parameters, strict=False):
            module._parameters[name] = parameter
        module.__dict__["training"] = training
        arguments = [operand.reshape(shape).clone() for operand in (x, gate) if operand is not None]
        watch = _Watch()
        try:
            with _undisturbed(), watch:
                y = type(module).forward(module, *arguments)
        except Exception as error:
            said = str(error).strip().split("\n")[0]
            raise Unknown(f"its forward fails on the CPU: {type(error).__name__}: {said}") from None
        self.calls_torch |= watch.seen
        if not isinstance(y, Tensor) or y.shape != shape:
            raise Unknown("its forward returns no tensor of x's shape")
        return y.reshape(x.shape)


def _generator(seed: int) -> Any:
    return torch.Generator("cpu").manual_seed(seed)


class _Watch(TorchFunctionMode):
    """See whether one of torch's own norms is called."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run func."""
        self.seen |= getattr(func, "__name__", "") in ("layer_norm", "rms_norm", "group_norm")
        return func(*args, **(kwargs or {}))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Run somebody's forward without autocast, warnings or random numbers used."""
    with (
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _parameters(module: Any) -> tuple[tuple[str, ...], int, torch.dtype]:
    """Return the names of weight and bias, their width and their dtype."""
    if next(module.children(), None) is not None:
        raise Unknown("it has submodules")
    if any(buffer is not None for buffer in module._buffers.values()):
        raise Unknown("it has buffers")
    given = {name: p for name, p in module._parameters.items() if p is not None}
    if not given:
        return (), _WIDTH_WITHOUT_WEIGHT, torch.float32
    shapes = {tuple(p.shape) for p in given.values()}
    dtypes = {p.dtype for p in given.values()}
    (shape, *_), (dtype, *_) = shapes, dtypes
    if len(given) > 2 or len(shapes) > 1 or len(dtypes) > 1 or len(shape) != 1:
        listed = ", ".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in given.items())
        raise Unknown(f"its parameters are not weight and bias of a row: {listed}")
    if shape[0] < 2:
        raise Unknown(f"its width is {shape[0]}, at which no formula can be told from another")
    return tuple(given), shape[0], dtype


def eps_name(module: Any) -> str | None:
    """Return the attribute of a module that is eps."""
    for name in _EPS_NAMES:
        if isinstance(getattr(module, name, None), float):
            return name
    return None


def _arguments(forward: Any) -> tuple[tuple[str, ...], int]:
    """Return what forward calls x and gate, and how many of them it requires."""
    _self, *given = inspect.signature(forward).parameters.values()
    positional = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    gated = len(positional) > 1 and positional[1].name in _GATE_NAMES
    names = tuple(p.name for p in positional[: 2 if gated else 1])
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in given if p.default is p.empty and p.kind not in starred]
    if not required or set(required) - set(names):
        raise Unknown(f"its forward takes {', '.join(p.name for p in given)}")
    return names, len(required)


def _groups(module: Any, width: int) -> list[int]:
    """Return 1 and what an int among the attributes may mean, as n_groups or as group_size."""
    counts = {1}
    for value in vars(module).values():
        if type(value) is int and value > 0 and width % value == 0:
            counts |= {value, width // value}
    return sorted(counts - {width})
