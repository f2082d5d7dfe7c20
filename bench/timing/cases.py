# SPDX-License-Identifier: MIT
"""The operators of the timings: operands, cunorm's calls, and the results that are expected."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from cunorm import reference

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# Relative to a result's largest value. Only gross errors exceed these; the tests have exact bounds.
TOLERANCE = {"float32": 2.0**-18, "float16": 2.0**-9, "bfloat16": 2.0**-6}

# The largest x that is checked against the oracle. It has few rows, because torch's layer norm on a
# CPU sums gradients of bfloat16 parameters in bfloat16: with thousands of rows these sums are wrong
# by a tenth.
CHECKED_ROWS = 64
CHECKED_ELEMENTS = 1 << 19
DRAWN_ELEMENTS = 1 << 20  # the most elements of x that are drawn, but at least a row or sample

# (rows, width), or modulated (samples, rows, width); of a group norm (samples, channels, height,
# width)
Shape = tuple[int, ...]
Operands = dict[str, Any]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Operator:
    """A public function with options, named by its plain form: rms_norm, not rms_norm_forward."""

    name: str  # the name of the function and, after a plus, of the option
    parameters: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # of forward and backward
    eps: float = 1e-5
    memory: str = ""  # for a group norm, the order of its axes in memory: NHWC or NCHW
    modulated: bool = False  # whether each sample has its own weight and bias

    @property
    def function(self) -> str:
        """The name of the plain form."""
        return self.name.partition("+")[0]

    @property
    def label(self) -> str:
        """The name and, for a group norm, the order of its axes in memory."""
        return f"{self.name} {self.memory}".rstrip()

    @property
    def axes(self) -> int:
        """The number of axes of x: 2 for rows, 3 for samples of rows, 4 for images."""
        return 4 if self.of_channels else 2 + self.modulated

    @property
    def has_residual(self) -> bool:
        """Whether the operator first adds x to the residual stream."""
        return self.name.startswith("add_")

    @property
    def base(self) -> str:
        """The function's name without `add_`, to which `_forward` and `_backward` are appended."""
        return self.function.removeprefix("add_")

    @property
    def center(self) -> bool:
        """Whether the norm subtracts the mean; if so, the backward takes the mean."""
        return self.base in ("layer_norm", "group_norm") or bool(self.options.get("center"))

    @property
    def gate_position(self) -> str | None:
        """The position of the gate, None without one; its activation is silu."""
        return self.options.get("gate_position")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The operands of the forward by position, in the order of the call."""
        return ("x", *(("residual",) if self.has_residual else ()), *self.parameters)

    @property
    def leaves(self) -> tuple[str, ...]:
        """The operands that have gradients."""
        return (*self.inputs, *(("gate",) if self.gate_position else ()))

    @property
    def of_channels(self) -> bool:
        """Whether it is a group norm, with statistics of groups of channels."""
        return self.base == "group_norm"

    def outputs(self, direction: str) -> tuple[str, ...]:
        """Return the names of a direction's results, gradients in the order of `leaves`."""
        if direction == "forward":
            return ("y", "residual") if self.has_residual else ("y",)
        return tuple("dresidual" if name == "residual" else f"d{name}" for name in self.leaves)

    def parameter_shape(self, shape: Shape) -> Shape:
        """Return the shape of weight and of bias for an x of a shape."""
        if not self.modulated:
            return shape[1:2]
        return shape[:2] if self.of_channels else (shape[0], 1, shape[2])

    def groups(self, width: int) -> int:
        """Return the number of groups of a row or of channels: a divisor of `width`."""
        return math.gcd(width, self.options.get("groups", 1))

    def ungated(self) -> Operator:
        """Return the same operator without its gate."""
        options = {name: value for name, value in self.options.items() if name != "gate_position"}
        return replace(self, name=self.function, options=options)


_BOTH = ("weight", "bias")
_GENERIC = {"c": 1.0, "center": True}
_OF_CHANNELS = {"groups": 32, "channel_axis": 1}
OPERATORS = (
    Operator("rms_norm", ("weight",)),
    Operator("layer_norm", _BOTH),
    Operator("rms_norm+post_gate", ("weight",), {"gate_position": "post"}),
    Operator("rms_norm+pre_gate", ("weight",), {"gate_position": "pre"}),
    Operator("l2_norm", eps=1e-12),
    Operator("normalize", _BOTH, _GENERIC),
    Operator("add_rms_norm", ("weight",)),
    Operator("add_layer_norm", _BOTH),
    Operator("add_normalize", _BOTH, _GENERIC),
    Operator("rms_norm+groups", ("weight",), {"groups": 24}),
    Operator("rms_norm+offset", ("weight",), {"weight_offset": 1.0}),
    Operator("rms_norm+rounded", ("weight",), {"round_before_weight": True}),
    Operator("group_norm+silu", _BOTH, _OF_CHANNELS | {"activation": "silu"}, memory="NHWC"),
    Operator("group_norm+silu", _BOTH, _OF_CHANNELS | {"activation": "silu"}, memory="NCHW"),
    Operator("group_norm", _BOTH, _OF_CHANNELS, memory="NHWC"),
    Operator("group_norm", _BOTH, _OF_CHANNELS, memory="NCHW"),
)
_SILU = _OF_CHANNELS | {"activation": "silu"}
MODULATED = (
    Operator("layer_norm+modulated", _BOTH, {"weight_offset": 1.0}, modulated=True),
    Operator("group_norm+silu+modulated", _BOTH, _SILU, memory="NHWC", modulated=True),
    Operator("group_norm+silu+modulated", _BOTH, _SILU, memory="NCHW", modulated=True),
)
TIMED = (*OPERATORS, *MODULATED)


def host_operands(operator: Operator, dtype: str, shape: Shape, seed: int = 0) -> Operands:
    """Draw the operands of forward and backward on the host, all of one dtype.

    The means of x and weight are not 0, and dy is correlated with x. So no term of a formula is
    close to 0, and the check finds a provider that omits a term.
    """
    rng = np.random.default_rng(seed)
    row_sized = ["x", "dy", *(("residual", "d_residual") if operator.has_residual else ())]
    row_sized += ["gate"] if operator.gate_position else []
    of_parameter = operator.parameter_shape(shape)
    shapes = dict.fromkeys(row_sized, shape) | dict.fromkeys(operator.parameters, of_parameter)
    values = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    values["x"] = 1.5 * values["x"] + 0.75
    values["dy"] += values["x"] / 2
    if "weight" in values:
        values["weight"] = 1 + values["weight"] / 2
    operands = {name: value.astype(DTYPES[dtype]) for name, value in values.items()}
    if operator.memory == "NHWC":
        for name in row_sized:
            operands[name] = np.moveaxis(np.moveaxis(operands[name], 1, -1).copy(), -1, 1)
    return operands


def drawn(operator: Operator, dtype: str, shape: Shape) -> tuple[Operands, int]:
    """Draw the operands of some rows or samples, and return how often to repeat them."""
    rows, *row = shape
    few = math.gcd(rows, max(1, DRAWN_ELEMENTS // math.prod(row)))
    return host_operands(operator, dtype, (few, *row)), rows // few


def checked_shape(shape: Shape, fewest: int = 1) -> Shape:
    """Return the shape of x on which providers are checked before they are timed on `shape`.

    It has fewer rows or samples, but not less than `fewest` if there are so many, and, if a sample
    alone is too large, fewer rows or less height.
    """
    first, *others = shape
    most = min(CHECKED_ROWS, CHECKED_ELEMENTS // math.prod(others))
    first = min(first, max(fewest, most))
    if len(shape) == 3:
        others[0] = min(others[0], CHECKED_ROWS)
    if len(shape) == 4:
        channels, height, width = others
        others[1] = max(1, min(height, CHECKED_ELEMENTS // (channels * width)))
    return (first, *others)


def forward(module: ModuleType, operator: Operator, operands: Operands) -> Call:
    """Return the call of the plain form; `module` is cunorm or cunorm.reference."""
    streams = [operands[name] for name in operator.inputs if name not in operator.parameters]
    function = getattr(module, operator.function)
    positional, options = _arguments(operator, operands)
    return partial(function, *streams, *positional, eps=operator.eps, **options)


def training_forward(module: ModuleType, operator: Operator, operands: Operands) -> Call:
    """Return the call of the `_forward` form, which also returns statistics."""
    positional, options = _arguments(operator, operands)
    if operator.has_residual:
        options["residual"] = operands["residual"]
    function = getattr(module, f"{operator.base}_forward")
    return partial(function, operands["x"], *positional, eps=operator.eps, **options)


def backward(module: ModuleType, operator: Operator, operands: Operands, saved: Any) -> Call:
    """Return the call of the `_backward` form, given the result of `training_forward`."""
    stream = saved.residual if operator.has_residual else operands["x"]
    positional, options = _arguments(operator, operands)
    options["rstd"] = saved.rstd
    if operator.center:
        options["mean"] = saved.mean
    if operator.has_residual:
        options["d_residual"] = operands["d_residual"]
    function = getattr(module, f"{operator.base}_backward")
    return partial(function, operands["dy"], stream, *positional, **options)


def _arguments(operator: Operator, operands: Operands) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of forward and backward: positional ones after x, and keywords."""
    positional = [operands[name] for name in operator.parameters]
    options = dict(operator.options)
    if "groups" in options:
        options["groups"] = operator.groups(operands["x"].shape[1])
    if operator.of_channels:
        positional.insert(0, options.pop("groups"))
    if operator.gate_position:
        options["gate"] = operands["gate"]
    return positional, options


def bytes_moved(operator: Operator, direction: str, shape: Shape, itemsize: int) -> int:
    """Count the bytes that a call must move: arrays as large as x, parameters, statistics."""
    is_forward, rows = direction == "forward", shape[0] * (shape[1] if len(shape) == 3 else 1)
    parameter = math.prod(operator.parameter_shape(shape))
    arrays = 4 if operator.has_residual else 2 if is_forward else 3
    if operator.gate_position:
        arrays += 1 if is_forward else 2  # gate, and dgate
    row_sized = arrays * math.prod(shape) * itemsize
    parameters = len(operator.parameters)
    if is_forward:
        return row_sized + parameters * parameter * itemsize
    statistics = (2 if operator.center else 1) * rows * operator.groups(shape[1]) * 4
    weight_and_gradients = (1 + parameters if parameters else 0) * parameter * itemsize
    return row_sized + statistics + weight_and_gradients


def oracle(operator: Operator, direction: str, host: Operands) -> dict[str, Any]:
    """Return the expected results of a call by name, from the float64 reference."""
    if direction == "forward":
        result = forward(reference, operator, host)()
    else:
        saved = training_forward(reference, operator, host)()
        result = backward(reference, operator, host, saved)()
    named = fields(result)
    return {name: named[name] for name in operator.outputs(direction)}


def fields(result: Any) -> dict[str, Any]:
    """Return the arrays of a result of cunorm by name; a single array is y."""
    return dict(result._asdict()) if hasattr(result, "_asdict") else {"y": result}


def worst_error(results: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest error of any result, relative to its largest expected value."""
    worst = 0.0
    for name, want in expected.items():
        want = np.asarray(want).astype(np.float64)
        error = np.abs(np.asarray(results[name]).astype(np.float64) - want).max()
        relative = error / np.abs(want).max()
        worst = max(worst, relative if relative == relative else math.inf)
    return worst
