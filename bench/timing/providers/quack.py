# SPDX-License-Identifier: MIT
"""QuACK's norms: kernels in the CuTe DSL for torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from bench.timing.cases import Call, Operands, Operator
from bench.timing.peers import Function
from bench.timing.providers.autograd import Autograd


class Quack(Autograd):
    """RMSNorm through autograd; LayerNorm through its two functions, which lack autograd."""

    name = "quack"
    distribution = "quack-kernels"

    def __init__(self) -> None:
        self._norms = import_module("quack.rmsnorm")  # the attribute quack.rmsnorm is a function

    def supports(self, operator: Operator, direction: str, dtype: str) -> bool:
        """Whether QuACK has the operator."""
        return operator.name in ("rms_norm", "rms_norm+offset", "add_rms_norm", "layer_norm")

    def function(self, operator: Operator, width: int) -> Function:
        """Return RMSNorm."""
        options: dict[str, Any] = {"eps": operator.eps}
        if offset := operator.options.get("weight_offset"):
            options["weight_offset"] = offset

        def call(x: Any, weight: Any, residual: Any = None) -> Any:
            prenorm = residual is not None  # prenorm also returns the new stream
            return self._norms.rmsnorm(x, weight, residual=residual, prenorm=prenorm, **options)

        return call

    def calls(self, operator: Operator, direction: str, sets: Sequence[Operands]) -> list[Call]:
        """Return the calls; LayerNorm takes float32 parameters with every dtype."""
        if operator.center:
            return [self._layer_norm(operator, direction, operands) for operands in sets]
        return super().calls(operator, direction, sets)

    def _layer_norm(self, operator: Operator, direction: str, operands: Operands) -> Call:
        x, weight, bias = operands["x"], operands["weight"].float(), operands["bias"].float()
        forward = self._norms.layernorm_fwd
        if direction == "forward":
            return lambda: forward(x, weight, bias, eps=operator.eps)
        _, rstd, mean = forward(
            x, weight, bias, eps=operator.eps, return_rstd=True, return_mean=True
        )
        backward = self._norms.layernorm_bwd  # older versions lack it
        return lambda: backward(x, weight, operands["dy"], rstd, mean, has_bias=True)
