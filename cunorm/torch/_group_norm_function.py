# SPDX-License-Identifier: MIT
"""Group norms that autograd records: the eager way, and which way each call takes."""

from __future__ import annotations

from typing import Any

import torch

from cunorm.group_norm._backward_plan import NEEDS
from cunorm.group_norm._forward import EACH_CHANNEL, Asked, asked, forward
from cunorm.torch import _group_norm_operator as operator
from cunorm.torch._group_norm_formula import differentiable_gradients
from cunorm.torch._ways import Way, any_batched, torch_dtype, way_of


def group_norm_of(
    function: str,
    arrays: tuple[Any, Any, Any],
    said: tuple[Any, Any, Any],
    eps: float,
    dtype: Any,
) -> Any:
    """Return y; arrays are x, weight and bias, said num_groups, activation and channel_axis."""
    way = way_of(function, NEEDS, arrays)
    if way in (Way.OPERATOR, Way.TRANSFORMED):
        run = operator.transformed if way is Way.TRANSFORMED else operator.forward_operator
        return run(*arrays, function, *said, eps, torch_dtype(function, "dtype", dtype))[0]
    num_groups, activation, channel_axis = said
    groups = EACH_CHANNEL if num_groups is None else num_groups
    told = asked(function, groups, activation, channel_axis, dtype, way is Way.RECORDED)
    if way is Way.PLAIN:
        return forward(told, eps, (*arrays, None, None, None, None))[0]
    return _GroupNorm.apply(told, eps, *arrays)


class _GroupNorm(torch.autograd.Function):
    """A group norm and its gradients. It saves x, mean, rstd and parameters."""

    @staticmethod
    def forward(ctx: Any, told: Asked, eps: float, x: Any, weight: Any, bias: Any) -> Any:
        """Return y."""
        y, mean, rstd = forward(told, eps, (x, weight, bias, None, None, None, None))
        ctx.told, ctx.eps = told, eps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
        """Return a gradient for each argument of `forward`, None where none is needed."""
        if dy is None:
            return (None,) * 5
        wanted, told = ctx.needs_input_grad[2:], ctx.told
        said = (told.num_groups, told.activation, told.channel_axis)
        if torch.is_grad_enabled():
            made = differentiable_gradients(*said, ctx.eps, ctx.saved_tensors, dy)
        else:
            needs = tuple(name for name, want in zip(NEEDS, wanted, strict=True) if want)
            arrays = (dy, *ctx.saved_tensors)
            if any_batched(dy):
                made = operator.backward_operator(*arrays, told.function, *said, list(needs))
            else:
                made = operator.gradients(arrays, (told.function, *said), needs)
        kept = (one if want else None for one, want in zip(made, wanted, strict=True))
        return (None, None, *kept)
