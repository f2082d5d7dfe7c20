# SPDX-License-Identifier: MIT
"""Gradients in torch's own operations, which can be differentiated again."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

ACTIVATIONS = {
    "identity": lambda z: z,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
}


def compute_type(*dtypes: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a norm of operands of these dtypes is computed."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def recorded_gradients(
    formula: Callable[..., Any],
    x_dtype: torch.dtype,
    operands: dict[str, Any],
    dy: Any,
    d_residual: Any,
) -> dict[str, Any]:
    """Return the gradients of a forward's inputs, by name, which autograd may record.

    The operands are those of the formula, x what was normalised; `d_residual` may be None.
    """
    x = operands["x"]
    wide = x.to(compute_type(x_dtype, x.dtype))
    # As views they are distinct, where the caller gave one tensor for two of them.
    views = {
        name: None if one is None else one.view_as(one)
        for name, one in {**operands, "x": wide}.items()
    }
    y = formula(**views).to(dy.dtype)
    recorded = {n: one for n, one in views.items() if one is not None and one.requires_grad}
    found = torch.autograd.grad(y, list(recorded.values()), dy, create_graph=True)
    gradients = dict(zip(recorded, found, strict=True))
    of_x = gradients.get("x")
    if d_residual is not None:
        d_residual = d_residual.to(wide.dtype)
        of_x = d_residual if of_x is None else of_x + d_residual
    if of_x is not None:
        gradients |= {"x": of_x.to(x_dtype), "residual": of_x.to(x.dtype)}
    return gradients


def row_formula(spec: Any, x_dtype: torch.dtype, x: Any, gate: Any, weight: Any, bias: Any) -> Any:
    """Return y in the dtype of x, that of computing: the formula of `cunorm.normalize`."""
    compute, groups = x.dtype, spec.groups
    leading, width = x.shape[: spec.axis], x.shape[spec.axis :].numel() // groups

    def as_rows(operand: Any, *leading: int) -> Any:
        return operand.to(compute).reshape(*leading, groups, width)

    g = None if gate is None else ACTIVATIONS[spec.gate_activation](as_rows(gate, *leading))
    options = spec.formula({"gate": gate, "weight": weight}, x_dtype, compute)
    q = as_rows(x, *leading)
    if options.pre_gate:
        q = q * g
    if spec.center:
        q = q - q.mean(-1, keepdim=True)
    r = q * (q.square().mean(-1, keepdim=True) + spec.mean_eps(width)).rsqrt()
    r = r if spec.c is None else r * (spec.c / width**0.5)
    r = r if options.rounded is None else r.to(options.rounded).to(compute)
    n = r if weight is None else r * (as_rows(weight) + spec.weight_offset)
    n = n if bias is None else n + as_rows(bias)
    n = n if g is None or options.pre_gate else n * g
    return n.reshape(x.shape)


def group_formula(spec: Any, x_dtype: torch.dtype, x: Any, weight: Any, bias: Any) -> Any:
    """Return y in the dtype of x, that of computing: the formula of `cunorm.group_norm`."""
    channels_first = x.movedim(spec.channel_axis, 1)
    samples, channels = channels_first.shape[:2]
    groups = channels_first.reshape(samples, spec.num_groups or channels, -1)
    q = groups - groups.mean(-1, keepdim=True)
    r = q * (q.square().mean(-1, keepdim=True) + spec.eps).rsqrt()
    n = r.reshape(samples, channels, -1)
    n = n if weight is None else n * weight.to(x.dtype)[:, None]
    n = n if bias is None else n + bias.to(x.dtype)[:, None]
    y = ACTIVATIONS[spec.activation](n).reshape(channels_first.shape)
    return y.movedim(1, spec.channel_axis)
