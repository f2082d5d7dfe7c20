# SPDX-License-Identifier: MIT
"""Norms of Liger-Kernel and of flash-linear-attention (fla-core): Triton kernels for torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.timing.cases import Operator
from bench.timing.peers import Function
from bench.timing.providers.autograd import Autograd


class Liger(Autograd):
    """Liger-Kernel's autograd functions, which take their arguments by position."""

    name = "liger"
    distribution = "liger-kernel"

    def __init__(self) -> None:
        from liger_kernel import ops

        self._ops = ops

    def supports(self, operator: Operator, direction: str, dtype: str) -> bool:
        """Whether Liger-Kernel has the operator; its group norm is of channels-first images."""
        names = ("rms_norm", "rms_norm+offset", "layer_norm", "add_rms_norm")
        return operator.name in names or operator.label == "group_norm NCHW"

    def function(self, operator: Operator, width: int) -> Function:
        """Return the operator; the argument False keeps Liger from writing dx over dy."""
        ops, eps = self._ops, operator.eps
        offset = operator.options.get("weight_offset", 0.0)
        casting = "gemma"  # all arithmetic in float32
        if operator.of_channels:
            apply = ops.LigerGroupNormFunction.apply
            groups = operator.groups(width)
            return lambda x, weight, bias: apply(x, weight, bias, width, groups, eps)
        if operator.has_residual:
            add = ops.LigerFusedAddRMSNormFunction.apply
            return lambda x, residual, weight: add(x, residual, weight, eps, offset, casting, False)
        if operator.center:
            layer_norm = ops.LigerLayerNormFunction.apply
            return lambda x, weight, bias: layer_norm(x, weight, bias, eps)
        rms_norm = ops.LigerRMSNormFunction.apply
        return lambda x, weight: rms_norm(x, weight, eps, offset, casting, False)


class Fla(Autograd):
    """The norms of fla.modules, with a residual stream or a gate."""

    name = "fla"
    distribution = "fla-core"

    def __init__(self) -> None:
        from fla.modules import fused_norm_gate, l2norm, layernorm

        self._norms: dict[str, Callable[..., Any]] = {
            "rms_norm": layernorm.rms_norm,
            "layer_norm": layernorm.layer_norm,
            "rms_norm+post_gate": fused_norm_gate.rms_norm_gated,
            "l2_norm": l2norm.l2_norm,
        }

    def supports(self, operator: Operator, direction: str, dtype: str) -> bool:
        """Whether fla has the operator."""
        return operator.name.removeprefix("add_") in self._norms

    def function(self, operator: Operator, width: int) -> Function:
        """Return the operator."""
        norm, eps = self._norms[operator.name.removeprefix("add_")], operator.eps
        if operator.base == "l2_norm":
            return lambda x: norm(x, eps=eps)
        if operator.gate_position:
            return lambda x, weight, gate: norm(x, gate, weight, None, activation="swish", eps=eps)

        def call(x: Any, weight: Any, bias: Any = None, residual: Any = None) -> Any:
            prenorm = residual is not None  # prenorm also returns the new stream
            return norm(x, weight, bias, residual=residual, eps=eps, prenorm=prenorm)

        return call
