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
# Half a step of float8_e4m3fn, relative to the number that is rounded.
_HALF_STEP = 2.0**-4

# (rows, width), or modulated (samples, rows, width); of images (samples, channels, height, width)
Shape = tuple[int, ...]
DIRECTIONS = ("forward", "backward")
LAYOUTS = {"NHWC": "channels_last", "NCHW": "channels_first"}  # as `warmup` names them
Operands = dict[str, Any]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Operator:
    """A public function with options, named by its plain form: rms_norm, not rms_norm_forward."""

    name: str  # the name of the function and, after a plus, of the option
    parameters: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # of forward and backward
    eps: float = 1e-5
    memory: str = ""  # of images, the order of their axes in memory: NHWC or NCHW
    modulated: bool = False  # whether each sample has its own weight and bias
    quantized: bool = False  # whether y is float8_e4m3fn with a scale; there is no backward

    @property
    def plain(self) -> str:
        """The name without options."""
        return self.name.partition("+")[0]

    @property
    def function(self) -> str:
        """The name of the plain form."""
        return f"{self.base}_quantized" if self.quantized else self.plain

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of the plain form and, if there is a backward, of the forms for training."""
        of_training = () if self.quantized else (f"{self.base}_forward", f"{self.base}_backward")
        return (self.function, *of_training)

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions that it has."""
        return DIRECTIONS[:1] if self.quantized else DIRECTIONS

    @property
    def label(self) -> str:
        """The name and, for images, the order of their axes in memory."""
        return f"{self.name} {self.memory}".rstrip()

    @property
    def axes(self) -> int:
        """The number of axes of x: 2 for rows, 3 for samples of rows, 4 for images."""
        return 4 if self.of_images else 2 + self.modulated

    @property
    def has_residual(self) -> bool:
        """Whether the operator first adds x to the residual stream."""
        return self.name.startswith("add_")

    @property
    def base(self) -> str:
        """The function's name without `add_`, to which `_forward` and `_backward` are appended."""
        return self.plain.removeprefix("add_")

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

    @property
    def of_images(self) -> bool:
        """Whether x has samples, channels, height and width."""
        return bool(self.memory)

    def outputs(self, direction: str) -> tuple[str, ...]:
        """Return the names of a direction's results, gradients in the order of `leaves`."""
        if direction == "forward":
            results = ("q", "scale") if self.quantized else ("y",)
            return (*results, *(("residual",) if self.has_residual else ()))
        return tuple("dresidual" if name == "residual" else f"d{name}" for name in self.leaves)

    def parameter_shape(self, shape: Shape) -> Shape:
        """Return the shape of weight and of bias for an x of a shape."""
        if not self.modulated:
            return shape[1:2]
        return shape[:2] if self.of_channels else (shape[0], 1, shape[2])

    def groups(self, width: int) -> int:
        """Return the number of groups of a row or of channels: a divisor of `width`."""
        return math.gcd(width, self.options.get("groups", 1))

    @property
    def scales_rows(self) -> bool:
        """Whether it finds a scale for each row."""
        return self.quantized and self.options.keys().isdisjoint(("block", "scale"))

    def block(self, width: int) -> int:
        """Return the columns of a row that share a scale, if it is not given."""
        return min(width, self.options.get("block", width))

    def takes(self, shape: Shape) -> bool:
        """Return whether x may have a shape; rows with blocks consist of groups of 4 columns."""
        return len(shape) == self.axes and not ("block" in self.options and shape[-1] % 4)

    def tolerance(self, dtype: str) -> float:
        """Return the largest error of a correct result, relative to the largest value."""
        return TOLERANCE[dtype] + (_HALF_STEP if self.quantized else 0)

    def ungated(self) -> Operator:
        """Return the same operator without its gate."""
        options = {name: value for name, value in self.options.items() if name != "gate_position"}
        return replace(self, name=self.plain, options=options)


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
# A row is the channels of a position.
IMAGES = tuple(
    Operator("layer_norm+channels", _BOTH, {"axis": (1,)}, memory=memory)
    for memory in ("NHWC", "NCHW")
)
# With a scale for each row or each block of columns, or a scale that is given.
QUANTIZED = tuple(
    Operator(name, ("weight",), {"dtype": "float8_e4m3fn", **options}, quantized=True)
    for name, options in (
        *(("rms_norm+fp8", {}), ("add_rms_norm+fp8", {})),
        *(("rms_norm+fp8_blocks", {"block": 128}), ("rms_norm+fp8_given", {"scale": 0.05})),
    )
)
TIMED = (*OPERATORS, *MODULATED, *IMAGES, *QUANTIZED)


def forward(module: ModuleType, operator: Operator, operands: Operands) -> Call:
    """Return the call of the plain form; `module` is cunorm or cunorm.reference."""
    if operator.quantized:
        return _with_residual_by_keyword(module, operator.function, operator, operands)
    streams = [operands[name] for name in operator.inputs if name not in operator.parameters]
    function = getattr(module, operator.function)
    positional, options = _arguments(operator, operands)
    return partial(function, *streams, *positional, eps=operator.eps, **options)


def training_forward(module: ModuleType, operator: Operator, operands: Operands) -> Call:
    """Return the call of the `_forward` form, which also returns statistics."""
    return _with_residual_by_keyword(module, f"{operator.base}_forward", operator, operands)


def _with_residual_by_keyword(
    module: ModuleType, function: str, operator: Operator, operands: Operands
) -> Call:
    positional, options = _arguments(operator, operands)
    if operator.has_residual:
        options["residual"] = operands["residual"]
    call = getattr(module, function)
    return partial(call, operands["x"], *positional, eps=operator.eps, **options)


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
    if operator.of_images and not operator.of_channels:
        rows *= math.prod(shape[2:])
    parameter = math.prod(operator.parameter_shape(shape))
    arrays = 4 if operator.has_residual else 2 if is_forward else 3
    if operator.gate_position:
        arrays += 1 if is_forward else 2  # gate, and dgate
    row_sized = arrays * math.prod(shape) * itemsize
    if operator.quantized:
        row_sized -= math.prod(shape) * (itemsize - 1)  # q has a byte for each element
        row_sized += 4 * _scales(operator, shape)
    parameters = len(operator.parameters)
    if is_forward:
        return row_sized + parameters * parameter * itemsize
    statistics = (2 if operator.center else 1) * rows * operator.groups(shape[1]) * 4
    weight_and_gradients = (1 + parameters if parameters else 0) * parameter * itemsize
    return row_sized + statistics + weight_and_gradients


def _scales(operator: Operator, shape: Shape) -> int:
    """Return the number of scales that a call finds."""
    rows, width = shape
    return 0 if "scale" in operator.options else rows * -(-width // operator.block(width))


def oracle(operator: Operator, direction: str, host: Operands) -> dict[str, Any]:
    """Return the expected results of a call by name, from the float64 reference.

    A quantised norm has the results of the norm, as `dequantized` returns them.
    """
    if operator.quantized:
        norm = replace(operator, name=operator.plain, options={}, quantized=False)
        return oracle(norm, direction, host)
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


def dequantized(operator: Operator, results: dict[str, Any]) -> dict[str, Any]:
    """Return results on the host, with y if the operator has q and scale instead."""
    if not operator.quantized:
        return results
    q, scale = results["q"], results["scale"]
    y = reference.dequantize(q, scale, block=operator.options.get("block"))
    return results | {"y": y}


def worst_error(results: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest error of any result, relative to its largest expected value."""
    worst = 0.0
    for name, want in expected.items():
        want = np.asarray(want).astype(np.float64)
        error = np.abs(np.asarray(results[name]).astype(np.float64) - want).max()
        relative = error / np.abs(want).max()
        worst = max(worst, relative if relative == relative else math.inf)
    return worst
