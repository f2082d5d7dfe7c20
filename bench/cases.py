# SPDX-License-Identifier: MIT
"""The operators as the timings call them: operands, cunorm's call, torch's, and a check.

Nothing here imports CuPy or torch: a caller hands in what puts a NumPy array on its device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

import cunorm
from cunorm import reference

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# Gross errors only, relative to the largest value of the result: the bounds proper are the tests'.
TOLERANCE = {"float32": 2.0**-18, "float16": 2.0**-9, "bfloat16": 2.0**-6}

Operands = dict[str, Any]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Operator:
    """An operator of the public API, by the name of its plain form."""

    name: str
    parameters: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # of the forward
    eps: float = 1e-5

    @property
    def has_residual(self) -> bool:
        """Whether it adds to the residual stream first."""
        return self.name.startswith("add_")

    @property
    def base(self) -> str:
        """The name to which `_forward` and `_backward` are put."""
        return self.name.removeprefix("add_")

    @property
    def center(self) -> bool:
        """Whether the mean is subtracted, so that backward takes it."""
        return self.base == "layer_norm" or bool(self.options.get("center"))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The operands of the forward, in the order of the call."""
        return ("x", *(("residual",) if self.has_residual else ()), *self.parameters)


_BOTH = ("weight", "bias")
_GENERIC = {"c": 1.0, "center": True}
OPERATORS = (
    Operator("rms_norm", ("weight",)),
    Operator("layer_norm", _BOTH),
    Operator("l2_norm", eps=1e-12),
    Operator("normalize", _BOTH, _GENERIC),
    Operator("add_rms_norm", ("weight",)),
    Operator("add_layer_norm", _BOTH),
    Operator("add_normalize", _BOTH, _GENERIC),
)


def host_operands(operator: Operator, dtype: str, rows: int, width: int, seed: int = 0) -> Operands:
    """Draw the operands of forward and backward on the host, all of one dtype."""
    rng = np.random.default_rng(seed)
    row_sized = ["x", "dy", *(("residual", "d_residual") if operator.has_residual else ())]
    shapes = dict.fromkeys(row_sized, (rows, width)) | dict.fromkeys(operator.parameters, (width,))
    return {
        name: rng.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])
        for name, shape in shapes.items()
    }


def forward(module: ModuleType, operator: Operator, operands: Operands) -> Call:
    """Return the call of the plain form; `module` is cunorm, or its reference for the oracle's."""
    inputs = [operands[name] for name in operator.inputs]
    return partial(getattr(module, operator.name), *inputs, eps=operator.eps, **operator.options)


def saved_forward(module: ModuleType, operator: Operator, operands: Operands) -> Any:
    """Call the `_forward` form, which keeps what the backward needs."""
    parameters = [operands[name] for name in operator.parameters]
    residual = {"residual": operands["residual"]} if operator.has_residual else {}
    call = getattr(module, f"{operator.base}_forward")
    return call(operands["x"], *parameters, eps=operator.eps, **residual, **operator.options)


def backward(module: ModuleType, operator: Operator, operands: Operands, saved: Any) -> Call:
    """Return the call of the `_backward` form with what `saved_forward` kept."""
    stream = saved.residual if operator.has_residual else operands["x"]
    options = dict(operator.options, rstd=saved.rstd)
    if operator.center:
        options["mean"] = saved.mean
    if operator.has_residual:
        options["d_residual"] = operands["d_residual"]
    parameters = [operands[name] for name in operator.parameters]
    function = getattr(module, f"{operator.base}_backward")
    return partial(function, operands["dy"], stream, *parameters, **options)


def bytes_moved(operator: Operator, direction: str, rows: int, width: int, itemsize: int) -> int:
    """Count what must be read and written: row-sized operands, float32 statistics, parameters."""
    arrays = 4 if operator.has_residual else 2 if direction == "forward" else 3
    row_sized = arrays * rows * width * itemsize
    parameters = len(operator.parameters)
    if direction == "forward":
        return row_sized + parameters * width * itemsize
    statistics = (2 if operator.center else 1) * rows * 4
    weight_and_gradients = (1 + parameters if parameters else 0) * width * itemsize
    return row_sized + statistics + weight_and_gradients


def torch_forward(torch: ModuleType, operator: Operator, tensors: Operands) -> Call:
    """Return the same call of torch.nn.functional; its results in the order of cunorm's."""
    x, residual = tensors["x"], tensors.get("residual")
    norm = _torch_norm(torch, operator, tensors)
    if residual is None:
        return partial(norm, x)

    def call() -> tuple[Any, Any]:
        stream = x + residual
        return norm(stream), stream

    return call


def _torch_norm(torch: ModuleType, operator: Operator, tensors: Operands) -> Callable[[Any], Any]:
    functional = torch.nn.functional
    weight, bias = (tensors.get(name) for name in _BOTH)
    row = tensors["x"].shape[-1:]
    if operator.base == "l2_norm":
        return partial(functional.normalize, dim=-1, eps=operator.eps)
    options = {"normalized_shape": row, "weight": weight, "eps": operator.eps}
    if operator.base == "rms_norm":
        return partial(functional.rms_norm, **options)
    if "c" in operator.options:
        options["weight"] = weight * (operator.options["c"] / math.sqrt(row[0]))
    return partial(functional.layer_norm, bias=bias, **options)


def torch_backward(torch: ModuleType, operator: Operator, tensors: Operands) -> Call:
    """Record torch's forward once; the call that is returned computes every gradient from it."""
    leaves = {name: tensors[name].detach().requires_grad_() for name in operator.inputs}
    outputs = torch_forward(torch, operator, leaves)()
    names = ("dy", "d_residual") if operator.has_residual else ("dy",)
    upstream = [tensors[name] for name in names]
    inputs = list(leaves.values())
    return lambda: torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)


def worst_error(results: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest error of any result, relative to the largest value of the one expected."""
    worst = 0.0
    for got, want in zip(results, expected, strict=True):
        if (got is None) != (want is None):
            return math.inf
        if want is not None:
            want = np.asarray(want).astype(np.float64)
            error = np.abs(np.asarray(got).astype(np.float64) - want).max() / np.abs(want).max()
            worst = max(worst, error if error == error else math.inf)
    return worst


def check(
    operator: Operator,
    dtype: str,
    shape: tuple[int, int],
    to_device: Callable[[Any], Any],
    to_host: Callable[[Any], Any],
) -> float:
    """Run forward and backward on a device and return the worst error against the oracle."""
    host = host_operands(operator, dtype, *shape)
    device = {name: to_device(array) for name, array in host.items()}

    def run(module: ModuleType, operands: Operands) -> list[Any]:
        saved = saved_forward(module, operator, operands)
        gradients = backward(module, operator, operands, saved)()
        y = forward(module, operator, operands)()
        results = [*((y.y, y.residual) if operator.has_residual else (y,)), saved.y, saved.rstd]
        if operator.has_residual:
            results += [saved.residual, gradients.dresidual]
        if operator.center:
            results.append(saved.mean)
        return [*results, gradients.dx, gradients.dweight, gradients.dbias]

    got = [None if array is None else to_host(array) for array in run(cunorm, device)]
    return worst_error(got, run(reference, host))
