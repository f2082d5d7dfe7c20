# SPDX-License-Identifier: MIT
"""Trials: samples of a norm module's results, which are compared with formulas of recipes."""

import copy
import inspect
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from cunorm.torch._replace.layout import Layout
from cunorm.torch._replace.planned import AutocastOfCuda, Planned
from cunorm.torch._replace.recipe import Pair, Recipe

Mode = AbstractContextManager[object]
# These are x, weight, bias, eps and gate.
Operands = tuple[Tensor, Tensor | None, Tensor | None, float, Tensor | None]
_Note = tuple[str, Tensor, Tensor]  # a submodule's name, its input and its result

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
_GATE_NAMES = ("gate", "z", "g")
_WIDTH_WITHOUT_WEIGHT = 48
# This is relative to the largest gradient of a row. It is far above the errors of float32, and far
# below the differences between formulas.
_GRADIENT_ERROR = 1e-3
_LEAST = 1e-10  # the smallest size of numbers in a sample
_ELEMENTS = 1024  # elements in each third of a sample; a third has at least eight rows


class Unknown(Exception):
    """A module has no recipe; the message says why."""


class Sample(NamedTuple):
    """The operands and y of a module or of a recipe's call; x, gate and y have three axes."""

    pair: Pair
    operands: Operands
    y: Tensor
    mode: Mode  # the mode in which y was computed

    def distance(self, recipe: Recipe) -> float:
        """Return the distance of y from a recipe's bounds, in y's units in the last place."""
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
        """Return whether y has a recipe's gradients, which it lacks if statistics are detached."""
        low, high = recipe.bounds(*self.operands)
        leaves = [operand for operand in self.operands if isinstance(operand, Tensor)]
        generator = torch.Generator("cpu").manual_seed(1)
        dy = torch.randn(self.y.shape, generator=generator, dtype=torch.float32, device="cpu")
        dy = dy.to(self.y.dtype)
        try:
            with self.mode:
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
    """A copy of a module that runs on the CPU, with random parameters and without hooks."""

    def __init__(self, module: Module) -> None:
        self._children = [name for name, _ in module.named_children()]
        self.shapes, self.width, self.dtype = _parameters(module)
        self.parameters = (*self.shapes,)
        for name in self.parameters:  # cunorm reads the attribute, the trials set the parameter
            if getattr(module, name, None) is not module._parameters[name]:
                raise Unknown(f"its attribute {name} is not the parameter {name}")
        values = {name: getattr(module, name, None) for name in EPS_NAMES}
        numbers = {n: v for n, v in values.items() if type(v) is int or isinstance(v, float)}
        if not numbers:
            raise Unknown(self._more_than_a_norm() or _without_eps(type(module)))
        self.eps_name, self.eps = next((name, float(v)) for name, v in numbers.items())
        if 0 < self.eps < _LEAST**2:
            raise Unknown(f"its eps is {self.eps}, too small to find out how it is added")
        self.arguments, self.gated = _arguments(type(module).forward)
        width, sizes = self.width, [v for v in vars(module).values() if type(v) is int and v > 0]
        divisors = [size for size in sizes if width % size == 0]  # counts or sizes of groups
        self.groups = sorted({1, width, *divisors, *(width // one for one in divisors)})
        self.counts: set[int] = set()  # the numbers of axes of x with which forward has run
        self.after: tuple[str, ...] | None = None  # the submodules that run on the norm's result
        self._notes: list[_Note] = []
        self._module = copy.copy(module)
        # The copy shares all containers except these two with the module.
        self._module.__dict__["_parameters"] = dict(module._parameters)
        self._module.__dict__["_modules"] = {
            name: child and _noted(name, child, self._notes)
            for name, child in module._modules.items()
        }

    def sample(
        self,
        pair: Pair,
        gated: bool,
        layout: Layout,
        *,
        recipe: Recipe | None = None,
        training: bool = True,
        autocast: str | None = None,
    ) -> Sample:
        """Run forward, or a recipe's call; raise Unknown if it fails.

        `autocast` is the kind of device whose autocast is on.
        """
        x, *parameters, eps, gate = operands = self._operands(pair, gated, layout)
        rows = [layout.place(one).clone() for one in (x, gate) if one is not None]
        given = [one for one in parameters if one is not None]
        mode: Mode = nullcontext() if recipe is None else Planned()  # type: ignore[no-untyped-call]  # torch has no types
        as_cuda: Mode = AutocastOfCuda() if autocast == "cuda" else nullcontext()  # type: ignore[no-untyped-call]  # torch has no types
        try:
            with (
                torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None),
                torch.random.fork_rng(devices=[]),
                warnings.catch_warnings(),
                as_cuda,
                mode,
            ):
                warnings.simplefilter("ignore")
                if recipe is None:
                    y = self._run(rows, given, training)
                else:
                    x, gate, *_ = (*rows, None)
                    y = recipe.call_on(layout.first, *pair)(x, *given, eps=eps, gate=gate)
        except Unknown:
            raise
        except Exception as error:
            more = self._more_than_a_norm() if recipe is None else ""
            raise Unknown(more or _failure(error, rows[0])) from None
        if not isinstance(y, Tensor) or y.shape != rows[0].shape:
            raise Unknown("its forward returns no tensor of x's shape")
        return Sample(pair, operands, layout.rows(y, operands[0]), mode)

    def _run(self, rows: list[Tensor], parameters: list[Tensor], training: bool) -> Any:
        """Run forward, and note in `after` the submodules that run on the norm's result."""
        module: Any = self._module
        for name, one, shape in zip(self.parameters, parameters, self.shapes.values(), strict=True):
            module._parameters[name] = one.reshape(shape)
        module.__dict__["training"] = training
        self._notes.clear()
        y = type(module).forward(module, *rows)
        names = tuple(name for name, _, _ in self._notes)
        given = [x for _, x, _ in self._notes[1:]] + [y]
        is_chain = all(note[2] is x for note, x in zip(self._notes, given, strict=False))
        if not is_chain or self.after not in (None, names):
            raise Unknown(self._more_than_a_norm())
        self.after = names
        return y

    def _more_than_a_norm(self) -> str:
        names = self._children
        listed = ", ".join(names[:4]) + ", ..." * (len(names) > 4)
        return f"it has submodules: {listed}" if names else ""

    def _operands(self, pair: Pair, gated: bool, layout: Layout) -> Operands:
        """Draw operands; in a third of the rows, squares are near eps."""
        generator = torch.Generator("cpu").manual_seed(0)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
        count = 8 * max(1, _ELEMENTS // (8 * self.width))
        shape = (3, count + 8 * (count == self.width), self.width)  # the middle is not the width
        # In float16, smaller numbers are few; in float32, x**-3 in a gradient must be finite.
        least = 1e-5 if pair[0] == torch.float16 or not self.eps else _LEAST
        scale = min(max(math.sqrt(abs(self.eps)), least), 30.0)
        scales = torch.tensor([1.0, 30.0, scale], dtype=torch.float64, device="cpu")
        rows = [(draw(shape) + 0.5) * scales[:, None, None]]
        parameters = [draw(self.width).to(pair[1]).requires_grad_() for _ in self.parameters]
        rows += [draw(shape)] if gated else []
        if layout.axes == 2:  # each row is a sample
            rows = [one.flatten(0, 1)[:, None] for one in rows]
        x, gate, *_ = (*(one.to(pair[0]).requires_grad_() for one in rows), None)
        weight, bias, *_ = (*parameters, None, None)
        return x, weight, bias, self.eps, gate


class _Noted(Module):
    """A submodule's stand-in, which returns its input, and notes that it was called."""

    _cunorm_notes: tuple[str, list[_Note]]
    __call__ = Module.__call__  # not that of the submodule's class

    def forward(self, x: Tensor) -> Tensor:
        y = x.view_as(x)
        name, notes = self._cunorm_notes
        notes.append((name, x, y))
        return y


def _noted(name: str, child: Module, notes: list[_Note]) -> Module:
    """Return a stand-in that has the class and the attributes of a submodule, but no hooks."""
    try:
        kind: Any = type(type(child).__name__, (_Noted, type(child)), {})
        noted: Module = kind.__new__(kind)
        noted.__dict__.update(
            vars(child) | {n: v for n, v in vars(Module()).items() if "hooks" in n}
        )
    except Exception:  # its class refuses subclasses, for example
        noted = _Noted()
    noted.__dict__.pop("forward", None)
    noted.__dict__["_cunorm_notes"] = (name, notes)
    return noted


def _failure(error: Exception, x: Tensor) -> str:
    line = str(error).strip().split("\n")[0]
    what = f"with an x of shape {tuple(x.shape)}: {type(error).__name__}: {line}"
    return f"its forward fails on the CPU, {what}"


def _without_eps(kind: type[Module]) -> str:
    if "normalize" in getattr(getattr(kind.forward, "__code__", None), "co_names", ()):
        bound = "a lower bound of the norm, not added to the mean square"
        return f"it calls normalize, whose eps is {bound}"
    return f"it has no eps: no number {', '.join(EPS_NAMES)}"


def _width(module: Module) -> int:
    """Return the width of a norm without parameters."""
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, tuple) and len(shape) > 1:
        raise Unknown(f"its normalized_shape is {tuple(shape)}, more than one axis")
    channels = getattr(module, "num_channels", None)
    return shape[0] if isinstance(shape, tuple) and shape else channels or _WIDTH_WITHOUT_WEIGHT


def _parameters(module: Module) -> tuple[dict[str, torch.Size], int, torch.dtype]:
    """Return weight and bias's shapes by their names, and the width and dtype of both."""
    if any(buffer is not None for buffer in module._buffers.values()):
        raise Unknown("it has buffers")
    given = {name: p for name, p in module._parameters.items() if p is not None}
    if not given:
        return {}, _width(module), torch.float32
    (shape, dtype), *others = dict.fromkeys((p.shape, p.dtype) for p in given.values())
    width = math.prod(shape)
    if len(given) > 2 or others or width not in shape:  # other axes have one element
        listed = ", ".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in given.items())
        raise Unknown(f"its parameters are not weight and bias of a row: {listed}")
    if width < 2:
        raise Unknown(f"its width is {width}, at which no formula can be told from another")
    return {name: p.shape for name, p in given.items()}, width, dtype


def _arguments(forward: Callable[..., object]) -> tuple[tuple[str, ...], list[bool]]:
    """Return forward's names for x and gate, and for each kind of call whether it has a gate."""
    _self, *given = inspect.signature(forward).parameters.values()
    positional = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    gated = len(positional) > 1 and positional[1].name in _GATE_NAMES
    names = tuple(p.name for p in positional[: 2 if gated else 1])
    named = [p for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in named if p.default is p.empty]
    if not required or set(required) - set(names):
        raise Unknown(f"its forward takes {', '.join(p.name for p in given)}")
    return names, [False] * (len(required) == 1) + [True] * gated
