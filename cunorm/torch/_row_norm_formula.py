# SPDX-License-Identifier: MIT
"""The gradients of row norms in torch's own operations, for who differentiates them again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from cunorm._activations import checked_activation
from cunorm.row_norm._forward import Norm

ACTIVATIONS = {
    "identity": lambda z: z,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
}


def differentiable_gradients(
    norm: Norm, dtypes: tuple[Any, Any], saved: tuple[Any, ...], dy: Any, d_residual: Any
) -> tuple[Any, ...]:
    """Return the gradients of x, residual, gate, weight and bias, which autograd may record.

    `dtypes` are those of x and y; dy or d_residual is None where it is zero.
    """
    normalised, _, _, gate, weight, bias = saved
    wide = normalised.to(_compute_type(dtypes[0], normalised.dtype))
    ds = None if d_residual is None else d_residual.to(wide.dtype)
    dgate = dweight = dbias = None
    if dy is not None:
        y = partial(_y, norm, dtypes)
        of_y, dgate, dweight, dbias = recorded_gradients(y, (wide, gate, weight, bias), dy)
        ds = ds if of_y is None else of_y if ds is None else of_y + ds
    if ds is None:
        return (None, None, dgate, dweight, dbias)
    return (ds.to(dtypes[0]), ds.to(normalised.dtype), dgate, dweight, dbias)


def _compute_type(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _y(norm: Norm, dtypes: tuple[Any, Any], s: Any, gate: Any, weight: Any, bias: Any) -> Any:
    """Return y of what is normalised, in the compute type: the formula of `cunorm.normalize`."""
    variant, (x_dtype, y_dtype) = norm.variant, dtypes
    compute = s.dtype
    leading, width = s.shape[: variant.axis], s.shape[variant.axis :].numel() // variant.groups

    def of_row(operand: Any) -> Any:
        return operand.to(compute).reshape(variant.groups, width)

    def of_rows(operand: Any) -> Any:
        return operand.to(compute).reshape(*leading, variant.groups, width)

    def gated(rows: Any, position: str) -> Any:
        if gate is None or variant.gate_position != position:
            return rows
        return rows * ACTIVATIONS[checked_activation(norm.function, "", variant.gate_activation)](
            of_rows(gate)
        )

    q = gated(of_rows(s), "pre")
    if variant.center:
        q = q - q.mean(-1, keepdim=True)
    eps = norm.eps / width if norm.eps_of_sum else norm.eps
    r = q * (q.square().mean(-1, keepdim=True) + eps).rsqrt()
    r = r if norm.c is None else r * (norm.c / width**0.5)
    if variant.round_before_weight:
        r = r.to(x_dtype).to(compute)
    n = r if weight is None else r * (of_row(weight) + norm.weight_offset)
    n = n if bias is None else n + of_row(bias)
    return gated(n, "post").reshape(s.shape).to(y_dtype)


def recorded_gradients(y: Callable[..., Any], operands: Any, dy: Any) -> list[Any]:
    """Return the gradients that y, a function, gives its operands; None where none is required."""
    # As views they are distinct, where the caller gave one tensor for two of them.
    operands = [None if one is None else one.view_as(one) for one in operands]
    recorded = [one is not None and one.requires_grad for one in operands]
    asked = [one for one, is_recorded in zip(operands, recorded, strict=True) if is_recorded]
    found = iter(torch.autograd.grad(y(*operands), asked, dy, create_graph=True))
    return [next(found) if is_recorded else None for is_recorded in recorded]
