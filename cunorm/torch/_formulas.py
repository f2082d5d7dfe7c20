# SPDX-License-Identifier: MIT
"""Formulas of y in torch's operations, for torch.compile and for higher derivatives."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from cunorm._arrays.torch import TORCH_DTYPES
from cunorm._core.tensor import inverse_permutation
from cunorm._group_norm.spec import GroupForwardSpec
from cunorm._row_norm.order import row_order
from cunorm._row_norm.spec import RowForwardSpec

Operand: TypeAlias = Tensor | None
Function = Callable[..., Any]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda z: z,
    "sigmoid": torch.sigmoid,
    "silu": lambda z: z * torch.sigmoid(z),  # torch's silu_backward has no forward mode
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
}


def pulled(function: Function, primals: Sequence[Tensor], cotangents: Any) -> tuple[Tensor, ...]:
    """Return the gradients of a function of tensors; they can be differentiated again."""
    found: tuple[Tensor, ...] = torch.func.vjp(function, *primals)[1](cotangents)
    return found


def pushed(
    function: Function, primals: Sequence[Tensor], tangents: Sequence[Tensor], like: Any
) -> Any:
    """Return the tangents of results, which are like the tensors of `like`.

    This is the transpose of the function's transpose, since PyTorch nests no other forward mode in
    a dual level.
    """
    zeros = _zeros(like)
    return torch.func.vjp(lambda ct: pulled(function, primals, ct), zeros)[1](tuple(tangents))[0]


def _zeros(like: Any) -> Any:
    """Return zeros in place of a tensor, or of the tensors of a dict."""
    if isinstance(like, dict):
        return {name: torch.zeros_like(one) for name, one in like.items()}
    return torch.zeros_like(like)


def compute_of(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def gated_branch(activation: str, branch: Tensor, gate: Tensor) -> Tensor:
    """Return a branch times the activation of its gate, in the branch's dtype."""
    return branch * ACTIVATIONS[activation](gate.to(branch.dtype))


def _centered(rows: Tensor) -> Tensor:
    """Subtract the mean, then the mean of the differences: the first mean has a rounding error."""
    rows = rows - rows.mean(-1, keepdim=True)
    return rows - rows.mean(-1, keepdim=True)


def _rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Round rows; the derivative of the rounding counts as 1."""
    return rows + (rows.to(dtype).to(rows.dtype) - rows).detach()


def with_rows_last(
    formula: Callable[..., Tensor], spec: RowForwardSpec, *, x: Tensor, **operands: Operand
) -> Tensor:
    """Return the y of a formula whose rows are the axes of a tuple, by one of the last axes."""
    order, leading_axes = row_order(spec.function, tuple(x.shape), spec.axis)
    spec = replace(spec, axis=leading_axes - x.dim())
    if order is None:
        return formula(spec, x=x, **operands)
    row = tuple(x.shape[n] for n in order[leading_axes:])

    def moved(operand: Operand) -> Operand:
        if operand is None or operand.shape == row:
            return operand
        return operand[(None,) * (len(order) - operand.dim())].permute(order)

    of_rows = {name: moved(operand) for name, operand in operands.items()}
    return formula(spec, x=x.permute(order), **of_rows).permute(inverse_permutation(order))


def row_formula(
    spec: RowForwardSpec,
    x_dtype: torch.dtype,
    x: Tensor,
    gate: Operand,
    weight: Operand,
    bias: Operand,
) -> Tensor:
    """Return y by the formula of `cunorm.normalize`; x and y have the compute dtype."""
    if isinstance(spec.axis, tuple):
        formula = partial(row_formula, x_dtype=x_dtype)
        return with_rows_last(formula, spec, x=x, gate=gate, weight=weight, bias=bias)
    compute, groups, row_axes = x.dtype, spec.groups, len(x.shape[spec.axis :])
    width = x.shape[spec.axis :].numel() // groups

    def as_rows(operand: Tensor) -> Tensor:
        leading = operand.shape[: operand.dim() - row_axes]
        return operand.to(compute).reshape(*leading, groups, width)

    gate = None if spec.gate_position == "branch" else gate
    g = None if gate is None else ACTIVATIONS[spec.gate_activation](as_rows(gate))
    choose: Callable[..., Any] = spec.formula  # also takes torch's dtypes
    options = choose({"gate": gate, "weight": weight}, x_dtype, compute)
    q = as_rows(x)
    if g is not None and options.pre_gate:
        q = q * g
    if spec.center:
        q = _centered(q)
    r = q * (q.square().mean(-1, keepdim=True) + spec.mean_eps(width)).rsqrt()
    r = r if spec.c is None else r * (spec.c / width**0.5)
    r = r if options.rounded is None else _rounded(r, options.rounded)
    n = r if weight is None else r * (as_rows(weight) + spec.weight_offset)
    n = n if bias is None else n + as_rows(bias)
    n = n if g is None or options.pre_gate else n * g
    return n.reshape(x.shape)


def gated_row(
    norm: Function,
    spec: RowForwardSpec,
    x_dtype: torch.dtype,
    x: Tensor,
    gate: Operand,
    weight: Operand,
    bias: Operand,
) -> Tensor:
    """Return y as `row_formula` does; `norm` is a norm without gate and rounding.

    `norm` takes x, weight and bias.
    """
    g = None if gate is None else ACTIVATIONS[spec.gate_activation](gate.to(x.dtype))
    is_pre = spec.gate_position == "pre"
    x = x if g is None or not is_pre else x * g
    if weight is None or not spec.round_before_weight or x_dtype is x.dtype:
        n = norm(x, weight, bias)
    else:
        n = _rounded(norm(x, None, None), x_dtype) * (weight.to(x.dtype) + spec.weight_offset)
        n = n if bias is None else n + bias.to(x.dtype)
    return n if g is None or is_pre else n * g


def group_formula(
    spec: GroupForwardSpec, x_dtype: torch.dtype, x: Tensor, weight: Operand, bias: Operand
) -> Tensor:
    """Return y by the formula of `cunorm.group_norm`; x and y have the compute dtype."""
    channels_first = x.movedim(spec.channel_axis, 1)
    samples, channels = channels_first.shape[:2]
    q = _centered(channels_first.reshape(samples, spec.num_groups or channels, -1))
    r = q * (q.square().mean(-1, keepdim=True) + spec.eps).rsqrt()
    n = r.reshape(samples, channels, -1)
    n = n if weight is None else n * weight.to(x.dtype)[..., None]
    n = n if bias is None else n + bias.to(x.dtype)[..., None]
    y = ACTIVATIONS[spec.activation](n).reshape(channels_first.shape)
    return y.movedim(1, spec.channel_axis)


def _row_call(spec: RowForwardSpec, operands: dict[str, Any]) -> tuple[Tensor, Operand]:
    """Return y and the new stream, or None if there is no stream or it is x."""
    x, gate, residual = (operands[name] for name in ("x", "gate", "residual"))
    has_branch_gate = gate is not None and spec.gate_position == "branch"
    stream_dtype = None if spec.residual_dtype is None else TORCH_DTYPES[spec.residual_dtype]
    if stream_dtype is None:
        stream_dtype = x.dtype if residual is None else residual.dtype
    compute = compute_of(x.dtype, stream_dtype)
    s = x.to(compute)
    s = gated_branch(spec.gate_activation, s, gate) if has_branch_gate else s
    s = s if residual is None else s + residual.to(compute)
    is_x = residual is None and not has_branch_gate and stream_dtype == x.dtype
    stream = x if is_x else s.to(stream_dtype)
    weight, bias = operands["weight"], operands["bias"]
    y = row_formula(spec, x.dtype, stream.to(compute), gate, weight, bias)
    dtype = x.dtype
    if spec.round_before_weight and weight is not None:
        dtype = torch.promote_types(dtype, weight.dtype)
    dtype = dtype if spec.dtype is None else TORCH_DTYPES[spec.dtype]
    return y.to(dtype), None if is_x else stream


def _group_call(spec: GroupForwardSpec, operands: dict[str, Any]) -> tuple[Tensor]:
    x = operands["x"]
    dtype = x.dtype if spec.dtype is None else TORCH_DTYPES[spec.dtype]
    return (group_formula(spec, x.dtype, **operands | {"x": x.to(compute_of(x.dtype))}).to(dtype),)


FORMULAS: dict[str, Function] = {"row_norm": _row_call, "group_norm": _group_call}
