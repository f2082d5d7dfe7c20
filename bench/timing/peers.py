# SPDX-License-Identifier: MIT
"""The operators of the timings in torch's operations, eager or compiled.

The caller passes the module torch, which is not imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from bench.timing.cases import Call, Operands, Operator

Function = Callable[..., Any]  # takes the tensors of `Operator.leaves` by name


def torch_function(torch: ModuleType, operator: Operator, width: int) -> Function:
    """Return the operator in torch, for rows of a width or for a number of channels."""
    norm = _norm(torch, operator, width)
    silu = torch.nn.functional.silu

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
        return y if residual is None else (y, stream)

    return call


def compiled(torch: ModuleType, function: Function, backend: str = "inductor") -> Function:
    """Compile a function with torch.compile, for one shape."""
    torch.compiler.reset()  # all operators share one code object, which may have few compiled forms
    # With donated buffers, a graph would allow only one backward.
    torch._functorch.config.donated_buffer = False
    compiled: Function = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)
    return compiled


def torch_forward(function: Function, operator: Operator, tensors: Operands) -> Call:
    """Return the call of a function on tensors."""
    return partial(function, **{name: tensors[name] for name in operator.leaves})


def torch_backward(
    torch: ModuleType, function: Function, operator: Operator, tensors: Operands
) -> Call:
    """Record torch's forward once, and return a call that computes every gradient from it."""
    leaves = {name: tensors[name].detach().requires_grad_() for name in operator.leaves}
    outputs = torch_forward(function, operator, leaves)()
    names = ("dy", "d_residual") if operator.has_residual else ("dy",)
    upstream = [tensors[name] for name in names]
    inputs = list(leaves.values())
    return lambda: torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)


def _norm(torch: ModuleType, operator: Operator, width: int) -> Function:
    """Return the norm without gate or activation, a function of x and named parameters."""
    functional, options, eps = torch.nn.functional, operator.options, operator.eps
    groups = operator.groups(width)
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
    return layer_norm
