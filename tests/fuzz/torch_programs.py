# SPDX-License-Identifier: MIT
"""Random networks of norms for PyTorch: what is drawn, and how cunorm or formulas run it.

A `Program` can be rebuilt from its repr. `Net` interprets it with cunorm.torch, or with formulas of
plain PyTorch in any dtype. Formulas in float64 are the oracle.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import cunorm.torch as ct
from tests.fuzz.torch_modules import CHANNELS, WIDTH, module_of
from tests.support.formulas import Formulas

SHAPE = (3, CHANNELS, WIDTH)
PARAMETERS = {
    **{"w": (WIDTH,), "c": (CHANNELS,), "t": (CHANNELS, WIDTH)},  # of rows, channels, planes
    # Of each sample: for all its rows, for each row, for all its elements, for its channels.
    **{"s": (3, 1, WIDTH), "m": SHAPE, "d": (3, 1, 1), "n": (3, CHANNELS)},
}
MODULATED = {"w": "wtsm", "t": "tm", "c": "cn"}  # the kinds that a parameter of a kind may have
FORMS = ("plain", "sliced", "stepped", "transposed", "expanded", "negated", "x")
JOINS = ("none", "tanh", "linear", "add", "scale")
GATES = {
    "identity": lambda z: z,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
}


class Step(NamedTuple):
    """A norm of the previous value, and how its result becomes the next value."""

    function: str
    made: str  # "function", or the name of a module
    operands: dict[str, str]  # names of leaves, or "stream", by argument
    options: dict[str, Any]
    join: str = "none"


class Program(NamedTuple):
    seed: int
    steps: tuple[Step, ...]
    way: str = "backward"
    wraps: tuple[str, ...] = ()
    forms: dict[str, str] = {}  # noqa: RUF012  # of leaves that are not plain; no code changes it
    frozen: tuple[str, ...] = ()  # leaves without gradient
    dtype: str = "float32"
    parameters: str = "float32"  # the dtype of parameters
    dy: str = "plain"
    uses_stream: bool = True

    def leaves(self) -> list[str]:
        """Return the names of all leaves: x, r and g have x's shape, others are parameters."""
        named = [name for step in self.steps for name in step.operands.values() if name != "stream"]
        linear = ["l"] if any(step.join == "linear" for step in self.steps) else []
        return list(dict.fromkeys(["x", *named, *linear]))

    def inputs(self) -> list[str]:
        return [name for name in self.leaves() if name in "xrg" and self.form(name) != "x"]

    def form(self, name: str) -> str:
        return self.forms.get(name, "plain")

    def wanted(self) -> list[str]:
        names = [name for name in self.leaves() if self.form(name) != "x"]
        return [name for name in names if name not in self.frozen] or ["x"]


# --- leaves and views of them ---------------------------------------------------------------------


def leaf(program: Program, name: str, salt: int = 0, batch: tuple[int, ...] = ()) -> Any:
    """Draw a leaf: magnitudes from 0.4 to 1.6, of either sign, so that no norm amplifies noise."""
    shape = (WIDTH, WIDTH) if name == "l" else PARAMETERS.get(name[0], SHAPE)
    *rest, last = shape
    sizes = {"sliced": (*rest, last + 2), "stepped": (*rest, 2 * last), "transposed": shape[::-1]}
    sizes["expanded"] = (1, *shape[1:])
    shape = sizes.get(program.form(name), shape)
    values = drawn((*batch, *shape), f"{program.seed} {name} {salt}")
    values = values / WIDTH**0.5 if name == "l" else values
    dtype = program.dtype if name in "xrgl" else program.parameters
    return values.to(getattr(torch, dtype))


def drawn(shape: Any, seed: str) -> Any:
    """Draw with NumPy, since vmap refuses PyTorch's random numbers."""
    rng = np.random.default_rng(Random(seed).getrandbits(40))
    numbers = rng.uniform(0.4, 1.6, shape) * rng.choice([-1, 1], shape)
    return torch.from_numpy(np.asarray(numbers))


def view(form: str, value: Any, shape: tuple[int, ...]) -> Any:
    if form == "sliced":
        return value[..., 1:-1]
    if form == "stepped":
        return value[..., ::2]
    if form == "transposed" and value.dim() > 1:
        return value.transpose(0, -1) if value.dim() == 2 else value.permute(2, 1, 0)
    if form == "expanded":
        return value.expand(shape)
    return torch.complex(value, value).conj().imag if form == "negated" else value


# --- the network ----------------------------------------------------------------------------------


class Norm(nn.Module):
    """A step's norm, by a function or module of cunorm, a replaced module, or the formula."""

    def __init__(self, step: Step, by: str) -> None:
        super().__init__()
        self.step, self.by = step, by
        is_module = by == "cunorm" and step.made != "function"
        self.module = module_of(step.made, dict(step.options)) if is_module else None

    def forward(self, x: Any, operands: dict[str, Any]) -> tuple[Any, Any]:
        """Return y and the new stream, which may be None."""
        function, options = self.step.function, self.step.options
        if self.by != "cunorm":
            return formula(function, x, operands, dict(options), exact=self.by == "exact")
        if self.module is not None:
            rows = [operands[name] for name in ("residual", "gate") if name in operands]
            result = self.module(x, *rows)
        else:
            more = {"residual": None} if function.startswith("add_") else {}
            dtypes = {n: getattr(torch, v) for n, v in options.items() if n.endswith("dtype")}
            result = getattr(ct, function)(x, **more | operands, **options | dtypes)
        return tuple(result) if isinstance(result, tuple) else (result, None)


class Net(nn.Module):
    """A program as a module; its forward takes the program's inputs and returns a tuple."""

    def __init__(self, program: Program, by: str, leaves: dict[str, Any]) -> None:
        super().__init__()
        self.program, self.by = program, by
        names = [name for name in leaves if name not in program.inputs()]
        self.own = nn.ParameterDict({name: nn.Parameter(leaves[name]) for name in names})
        self.norms = nn.ModuleList(Norm(step, by) for step in program.steps)
        self.tie()
        if by == "cunorm":
            ct.replace_norms(self)
            for norm in self.norms:
                if "Cunorm" not in type(norm.module).__name__ and norm.module is not None:
                    assert hasattr(ct, norm.step.made), f"{norm.step.made} was not replaced"

    def tie(self) -> None:
        """Make modules use the parameters of the network."""
        for norm in self.norms:
            for argument, name in norm.step.operands.items() if norm.module else ():
                if name in self.own:
                    setattr(norm.module, argument, self.own[name])

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        program, given = self.program, dict(zip(self.program.inputs(), inputs, strict=True))

        def operand(name: str) -> Any:
            if (form := program.form(name)) == "x":
                return operand("x")
            value = given[name] if name in given else self.own[name]
            return view(form, value, SHAPE if name in given else PARAMETERS[name[0]])

        x = value = operand("x")
        stream = None
        for norm in self.norms:
            named = {
                argument: stream if name == "stream" else operand(name)
                for argument, name in norm.step.operands.items()
                if name != "stream" or stream is not None
            }
            y, new = norm(value, named)
            stream = stream if new is None else new
            value = self.join(norm.step.join, y, value, x)
        return (value, stream) if stream is not None and program.uses_stream else (value,)

    def join(self, join: str, y: Any, value: Any, x: Any) -> Any:
        if join == "tanh":
            return torch.tanh(y)
        if join == "linear":
            return functional.linear(y, self.own["l"].to(y.dtype))
        if join == "add":
            return y + value
        return y * 0.7 + x * 0.6 if join == "scale" else y


def formula(
    function: str, x: Any, operands: dict[str, Any], options: dict[str, Any], *, exact: bool
) -> tuple[Any, Any]:
    """Return y and the new stream by PyTorch's operations; with `exact`, all are in float64."""
    stream, y_dtype = None, x.dtype
    residual, stream_dtype = operands.get("residual"), options.pop("residual_dtype", None)
    gate = operands.get("gate") if options.get("gate_position") == "branch" else None
    if gate is not None:
        operands = {name: one for name, one in operands.items() if name != "gate"}
        gate = GATES[options.pop("gate_activation")](gate.to(_wide(x, residual, exact=exact)))
        del options["gate_position"]
    if function.startswith("add_"):
        s = _stream(x, residual, gate, stream_dtype, exact=exact)
        stream = x if s is x else s.view_as(s)  # so that a hook on the stream does not change y
        x, function = s, function[4:]
    wide = torch.promote_types(x.dtype, torch.promote_types(y_dtype, torch.float32))
    compute = torch.float64 if exact else wide
    given = {name: one.to(compute) for name, one in operands.items() if name != "residual"}
    y_dtype = getattr(torch, options.pop("dtype", str(y_dtype)[6:]))
    formulas = Formulas(GATES, lambda r: r if exact else r.to(y_dtype).to(compute))
    if function in ("group_norm", "instance_norm"):
        options = {"channel_axis": 1} | options  # the default of cunorm.torch
    y = getattr(formulas, function)(x.to(compute), **given, **options)
    if options.get("round_before_weight") and "weight" in given:
        y_dtype = torch.promote_types(y_dtype, operands["weight"].dtype)
    return y.to(compute if exact else y_dtype), stream


def _wide(x: Any, residual: Any, *, exact: bool) -> Any:
    """Return the dtype in which x is added to the residual."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return torch.float64 if exact else torch.promote_types(dtype, torch.float32)


def _stream(x: Any, residual: Any, gate: Any, name: str | None, *, exact: bool) -> Any:
    dtype = getattr(torch, name) if name else x.dtype if residual is None else residual.dtype
    if residual is None and gate is None:
        return x if exact else x.to(dtype)
    s = x.to(_wide(x, residual, exact=exact))
    s = s if gate is None else s * gate
    s = s if residual is None else s + residual
    return s if exact else s.to(dtype)
