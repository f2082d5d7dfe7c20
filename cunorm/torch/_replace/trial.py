# SPDX-License-Identifier: MIT
"""Trials: samples of a norm module's results, which are compared with formulas of recipes."""

import copy
import inspect
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from cunorm._arrays._torch_private import OperatorMode
from cunorm._core.plan import OpDef, spec_from_json
from cunorm.torch._formulas import row_formula
from cunorm.torch._pair import ROW
from cunorm.torch._replace.recipe import Pair, Recipe

Mode = AbstractContextManager[object]
# These are x, weight, bias, eps and gate.
Operands = tuple[Tensor, Tensor | None, Tensor | None, float, Tensor | None]

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")
_GATE_NAMES = ("gate", "z", "g")
NORM_FUNCTIONS = ("layer_norm", "rms_norm", "group_norm")
_WIDTH_WITHOUT_WEIGHT = 48
# This is relative to the largest gradient of a row. It is far above the errors of float32, and far
# below the differences between formulas.
_GRADIENT_ERROR = 1e-3
_ELEMENTS = 1024  # elements in each third of a sample; a third has at least one row


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
        self.parameters, self.width, self.dtype = _parameters(module)
        for name in self.parameters:  # cunorm reads the attribute, the trials set the parameter
            if getattr(module, name, None) is not module._parameters[name]:
                raise Unknown(f"its attribute {name} is not the parameter {name}")
        values = {name: getattr(module, name, None) for name in EPS_NAMES}
        numbers = {n: v for n, v in values.items() if type(v) is int or isinstance(v, float)}
        if not numbers:
            raise Unknown(f"it has no eps: no number {', '.join(EPS_NAMES)}")
        self.eps_name, self.eps = next((name, float(v)) for name, v in numbers.items())
        self.arguments, self.gated = _arguments(type(module).forward)
        width, sizes = self.width, [v for v in vars(module).values() if type(v) is int and v > 0]
        divisors = [size for size in sizes if width % size == 0]  # counts or sizes of groups
        self.groups = sorted({1, *divisors, *(width // one for one in divisors)} - {width})
        self.calls_torch = False  # whether the module has called a norm of torch's
        self._module = copy.copy(module)
        # The copy shares all containers except `_parameters` with the module.
        self._module.__dict__["_parameters"] = dict(module._parameters)

    def sample(
        self,
        pair: Pair,
        gated: bool,
        axes: int = 3,
        *,
        recipe: Recipe | None = None,
        training: bool = True,
        autocast: bool = False,
    ) -> Sample:
        """Run forward, or a recipe's call, on an x of 2 to 5 axes; raise Unknown if it fails."""
        x, weight, bias, eps, gate = operands = self._operands(pair, gated)
        shape = x.flatten(0, 1).shape if axes == 2 else (1,) * (axes - 3) + x.shape
        rows = [one.reshape(shape).clone() for one in (x, gate) if one is not None]
        parameters: Any = [one for one in (weight, bias) if one is not None]  # tensors
        module = self._module
        module._parameters.update(zip(self.parameters, parameters, strict=True))
        module.__dict__["training"] = training
        mode: Mode = nullcontext() if recipe is None else Planned()  # type: ignore[no-untyped-call]
        try:
            with (
                torch.autocast("cpu", torch.bfloat16, enabled=autocast),
                torch.random.fork_rng(devices=[]),
                warnings.catch_warnings(),
                _Watch() as watch,
                mode,
            ):
                warnings.simplefilter("ignore")
                if recipe is None:
                    y = type(module).forward(module, *rows)
                else:
                    x, gate, *_ = (*rows, None)
                    y = recipe.call(*pair)(x, *parameters, eps=eps, gate=gate)
        except Exception as error:
            line = str(error).strip().split("\n")[0]
            what = f"on the CPU, with rows {tuple(shape)}: {type(error).__name__}: {line}"
            raise Unknown(f"its forward fails {what}") from None
        self.calls_torch |= watch.seen
        if not isinstance(y, Tensor) or y.shape != shape:
            raise Unknown("its forward returns no tensor of x's shape")
        return Sample(pair, operands, y.reshape(operands[0].shape), mode)

    def _operands(self, pair: Pair, gated: bool) -> Operands:
        """Draw operands; in a third of the rows, squares are near eps."""
        generator = torch.Generator("cpu").manual_seed(0)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
        rows = max(1, _ELEMENTS // self.width)
        shape = (3, rows + (rows == self.width), self.width)  # the middle size is not the width
        scale = min(max(math.sqrt(abs(self.eps)), 1e-5), 30.0)
        scales = torch.tensor([1.0, 30.0, scale], dtype=torch.float64, device="cpu")
        x = ((draw(shape) + 0.5) * scales[:, None, None]).to(pair[0]).requires_grad_()
        parameters = [draw(self.width).to(pair[1]).requires_grad_() for _ in self.parameters]
        gate = draw(shape).to(pair[0]).requires_grad_() if gated else None
        weight, bias, *_ = (*parameters, None, None)
        return x, weight, bias, self.eps, gate


_ROW_OPERATORS: dict[object, OpDef[Any]] = {
    torch.ops.cunorm.row_norm_forward.default: ROW.forward,
    torch.ops.cunorm.row_norm_backward.default: ROW.backward,
}


class Planned(OperatorMode):
    """A mode in which the float64 oracle computes row norms in place of the kernels.

    The rest of a call is as usual. Kernels would take seconds to compile for each dtype.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        op = _ROW_OPERATORS.get(func)
        if op is None:
            return func(*args, **(kwargs or {}))
        *arrays, text = args
        spec: Any = spec_from_json(op.spec_type, text)
        # With meta tensors, the operator checks the call and returns outputs without memory.
        metas = func(*(None if array is None else array.to("meta") for array in arrays), text)
        outputs = [torch.empty_like(meta, dtype=torch.float64, device="cpu") for meta in metas]
        given = [None if array is None else array.detach().double().numpy() for array in arrays]
        is_absent = [meta.dtype == torch.bool for meta in metas]
        found = [None if no else y.numpy() for y, no in zip(outputs, is_absent, strict=True)]
        op.reference(spec if op is ROW.forward else replace(spec, x_dtype=None), (*given, *found))
        if op is ROW.forward:  # unlike the oracle, the formula rounds to x's dtype before weight
            operands = dict(zip(op.inputs, arrays, strict=True))
            x, _ = operands.pop("x"), operands.pop("residual")
            outputs[0] = row_formula(spec, x.dtype, x.double(), **operands)
        return tuple(y.to(meta.dtype) for y, meta in zip(outputs, metas, strict=True))


class _Watch(TorchFunctionMode):
    """A mode that notes whether a norm of torch's is called."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= getattr(func, "__name__", "") in NORM_FUNCTIONS
        return func(*args, **(kwargs or {}))


def _parameters(module: Module) -> tuple[tuple[str, ...], int, torch.dtype]:
    """Return the names of weight and bias, and the width and dtype of both."""
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
