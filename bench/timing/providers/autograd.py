# SPDX-License-Identifier: MIT
"""Providers that use torch's autograd: torch, eager and compiled, and libraries of kernels for it.

Liger-Kernel and flash-linear-attention (fla-core) have Triton kernels, QuACK kernels in CuTe's DSL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from bench.timing import cases
from bench.timing.cases import TIMED, Call, Operands, Operator
from bench.timing.providers.base import Provider

Function = Callable[..., Any]  # takes the tensors of `Operator.leaves` by name
_ALL = [operator.label for operator in TIMED]


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

    def supports(self, operator: Operator) -> bool:
        """Whether the library has the operator."""
        return operator.label in self._labels

    def calls(self, operator: Operator, direction: str, sets: Sequence[Operands]) -> list[Call]:
        """Return the function's calls, or `torch.autograd.grad` of the recorded results."""
        function = self._function(operator, sets[0]["x"].shape[1 if operator.of_images else -1])
        call = forward if direction == "forward" else backward
        return [call(function, operator, operands) for operands in sets]


def forward(function: Function, operator: Operator, tensors: Operands) -> Call:
    """Return the call of a function on tensors."""
    return partial(function, **{name: tensors[name] for name in operator.leaves})


def backward(function: Function, operator: Operator, tensors: Operands) -> Call:
    """Record the forward once, and return a call that computes every gradient from it."""
    leaves = {name: tensors[name].detach().requires_grad_() for name in operator.leaves}
    outputs = forward(function, operator, leaves)()
    names = ("dy", "d_residual") if operator.has_residual else ("dy",)
    upstream, inputs = [tensors[name] for name in names], list(leaves.values())
    return lambda: torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)


# --- torch ----------------------------------------------------------------------------------------


def eager() -> Provider:
    """Return torch's eager operations."""
    return Autograd("torch", "torch", torch_function)


def compiled() -> Provider:
    """Return torch's operations, compiled by torch.compile for one shape."""

    def function(operator: Operator, width: int) -> Function:
        # All operators share one code object, which may have few compiled forms.
        torch.compiler.reset()
        # With donated buffers, a graph would allow only one backward.
        torch._functorch.config.donated_buffer = False
        eager = torch_function(operator, width)
        compiled: Function = torch.compile(eager, fullgraph=True, dynamic=False)
        return compiled

    return Autograd("torch.compile", "", function)


def torch_function(operator: Operator, width: int) -> Function:
    """Return the operator in torch, for rows of a width or for a number of channels."""
    norm, silu = _norm(operator, width), functional.silu
    quantized = _quantized(operator, width) if operator.quantized else None

    def call(x: Any, residual: Any = None, gate: Any = None, **parameters: Any) -> Any:
        stream = x if residual is None else x + residual
        if operator.gate_position == "pre":
            y = norm(stream * silu(gate), **parameters)
        elif operator.gate_position == "post":
            y = norm(stream, **parameters) * silu(gate)
        else:
            y = norm(stream, **parameters)
        if operator.options.get("activation") == "silu":
            y = silu(y)
        results = (y,) if quantized is None else quantized(y)
        if residual is not None:
            results = (*results, stream)
        return results if len(results) > 1 else y

    return call


def _quantized(operator: Operator, width: int) -> Function:
    """Return a function of y that returns q, float8_e4m3fn, and its scale."""
    given, block = operator.options.get("scale"), operator.block(width)

    def call(y: Any) -> tuple[Any, Any]:
        if width % block:
            y = functional.pad(y, (0, -width % block))
        blocks = y.unflatten(-1, (-1, block))
        scale = given
        if given is None:
            scale = (blocks.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1 / (448 * 512))
        q = (blocks.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        q = q.flatten(-2)[..., :width]
        return q, scale if given is not None else scale.squeeze(-1)

    return call


def _norm(operator: Operator, width: int) -> Function:
    """Return the norm without gate or activation, a function of x and named parameters."""
    options, eps, groups = operator.options, operator.eps, operator.groups(width)
    if operator.modulated:
        plain, offset = (
            _norm(replace(operator, modulated=False), width),
            options.get("weight_offset", 0),
        )
        at = (..., None, None) if operator.of_channels else ...
        return lambda x, weight, bias: plain(x) * (offset + weight[at]) + bias[at]
    row = (width // groups,)
    if operator.base == "l2_norm":
        return partial(functional.normalize, dim=-1, eps=eps)
    if operator.base == "rms_norm":
        plain = partial(functional.rms_norm, normalized_shape=row, eps=eps)
        if groups > 1:
            return lambda x, weight: plain(x.unflatten(-1, (groups, -1))).flatten(-2) * weight
        if "round_before_weight" in options:
            return lambda x, weight: plain(x) * weight
        if "weight_offset" in options:
            return lambda x, weight: plain(x, weight=weight + options["weight_offset"])
        return plain
    if operator.of_channels:
        return partial(functional.group_norm, num_groups=groups, eps=eps)
    layer_norm = partial(functional.layer_norm, normalized_shape=row, eps=eps)
    if "c" in options:
        k = options["c"] / math.sqrt(width)
        return lambda x, weight, bias: layer_norm(x, weight=weight * k, bias=bias)
    if operator.of_images:
        return lambda x, **given: layer_norm(x.permute(0, 2, 3, 1), **given).permute(0, 3, 1, 2)
    return layer_norm


# --- libraries for torch --------------------------------------------------------------------------


def ours() -> Provider:
    """Return cunorm.torch's functions, through autograd as those of other libraries."""
    import cunorm.torch

    def function(operator: Operator, width: int) -> Function:
        return lambda **tensors: cases.forward(cunorm.torch, operator, tensors)()

    labels = [one.label for one in TIMED if hasattr(cunorm.torch, one.function)]
    return Autograd("cunorm-autograd", "", function, labels)


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
