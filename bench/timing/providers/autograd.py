# SPDX-License-Identifier: MIT
"""Providers that use torch's autograd: torch, eager and compiled, and libraries of kernels for it.

Liger-Kernel and flash-linear-attention (fla-core) have Triton kernels, QuACK kernels in CuTe's DSL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from bench.timing import peers
from bench.timing.cases import OPERATORS, Call, Operands, Operator
from bench.timing.peers import Function
from bench.timing.providers.base import Provider

_ALL = [operator.label for operator in OPERATORS]


class Autograd(Provider):
    """Functions of named tensors; the backward repeats on a forward that was recorded once."""

    arrays = "torch"

    def __init__(
        self,
        name: str,
        distribution: str,
        function: Callable[[Operator, int], Function],
        labels: Collection[str] = _ALL,
    ) -> None:
        """Make a provider from the labels of its operators.

        `function` returns an operator, for rows of a width or for a number of channels.
        """
        self.name, self.distribution = name, distribution
        self._function, self._labels = function, labels

    def supports(self, operator: Operator, direction: str, dtype: str) -> bool:
        """Whether the library has the operator."""
        return operator.label in self._labels

    def calls(self, operator: Operator, direction: str, sets: Sequence[Operands]) -> list[Call]:
        """Return the function's calls, or `torch.autograd.grad` of the recorded results."""
        function = self._function(operator, sets[0]["x"].shape[1])
        if direction == "forward":
            return [peers.torch_forward(function, operator, operands) for operands in sets]
        return [peers.torch_backward(torch, function, operator, operands) for operands in sets]


def eager() -> Provider:
    """Return torch's eager operations."""
    return Autograd("torch", "torch", partial(peers.torch_function, torch))


def compiled() -> Provider:
    """Return torch's operations, compiled by torch.compile."""

    def function(operator: Operator, width: int) -> Function:
        return peers.compiled(torch, peers.torch_function(torch, operator, width))

    return Autograd("torch.compile", "", function)


def liger() -> Provider:
    """Return Liger-Kernel's autograd functions, which take their arguments by position."""
    from liger_kernel import ops

    def function(operator: Operator, width: int) -> Function:
        eps, offset = operator.eps, operator.options.get("weight_offset", 0.0)
        # With "gemma", all arithmetic is in float32; False keeps Liger from writing dx over dy.
        last = (eps, offset, "gemma", False)
        if operator.of_channels:
            apply = ops.LigerGroupNormFunction.apply
            groups = operator.groups(width)
            return lambda x, weight, bias: apply(x, weight, bias, width, groups, eps)
        if operator.has_residual:
            add = ops.LigerFusedAddRMSNormFunction.apply
            return lambda x, residual, weight: add(x, residual, weight, *last)
        if operator.center:
            layer_norm = ops.LigerLayerNormFunction.apply
            return lambda x, weight, bias: layer_norm(x, weight, bias, eps)
        rms_norm = ops.LigerRMSNormFunction.apply
        return lambda x, weight: rms_norm(x, weight, *last)

    # Its group norm is of channels-first images.
    labels = ("rms_norm", "rms_norm+offset", "layer_norm", "add_rms_norm", "group_norm NCHW")
    return Autograd("liger", "liger-kernel", function, labels)


def fla() -> Provider:
    """Return the norms of fla.modules, with a residual stream or a gate."""
    from fla.modules import fused_norm_gate, l2norm, layernorm

    norms = {"rms_norm": layernorm.rms_norm, "layer_norm": layernorm.layer_norm}

    def function(operator: Operator, width: int) -> Function:
        eps = operator.eps
        if operator.base == "l2_norm":
            return lambda x: l2norm.l2_norm(x, eps=eps)
        if operator.gate_position:
            gated = partial(fused_norm_gate.rms_norm_gated, activation="swish", eps=eps)
            return lambda x, weight, gate: gated(x, gate, weight, None)
        norm = norms[operator.base]

        def call(x: Any, weight: Any, bias: Any = None, residual: Any = None) -> Any:
            prenorm = residual is not None  # prenorm also returns the new stream
            return norm(x, weight, bias, residual=residual, eps=eps, prenorm=prenorm)

        return call

    labels = (*norms, *(f"add_{name}" for name in norms), "rms_norm+post_gate", "l2_norm")
    return Autograd("fla", "fla-core", function, labels)


class Quack(Autograd):
    """QuACK's RMSNorm through autograd; its LayerNorm's two functions, which lack autograd."""

    def __init__(self) -> None:
        self._norms = import_module("quack.rmsnorm")  # the attribute quack.rmsnorm is a function
        labels = ("rms_norm", "rms_norm+offset", "add_rms_norm", "layer_norm")
        super().__init__("quack", "quack-kernels", self._rms_norm, labels)

    def _rms_norm(self, operator: Operator, width: int) -> Function:
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
        forward = partial(self._norms.layernorm_fwd, x, weight, bias, eps=operator.eps)
        if direction == "forward":
            return forward
        _, rstd, mean = forward(return_rstd=True, return_mean=True)
        backward = self._norms.layernorm_bwd  # older versions lack it
        return lambda: backward(x, weight, operands["dy"], rstd, mean, has_bias=True)
