# SPDX-License-Identifier: MIT
"""Group norms as operators of torch's dispatcher: for torch.compile, torch.func and modes.

An operator returns no None: what is absent is a tensor of no elements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cunorm.group_norm import _backward_plan
from cunorm.group_norm._backward import backward
from cunorm.group_norm._forward import EACH_CHANNEL, asked, forward
from cunorm.torch._batches import (
    Batched,
    Dims,
    differentiable_once,
    in_front,
    is_batched,
    one_by_one,
    transformable,
)
from cunorm.torch._ways import resolved

# What is said of both, in this order. num_groups None is EACH_CHANNEL.
_SAID = "str function, int? num_groups, str? activation, int channel_axis"
_SAID_COUNT = 4
_NO_MORE = (None,) * (_SAID_COUNT + 2)  # gradients of what is not a tensor


@torch.library.custom_op(
    "cunorm::group_norm_forward",
    mutates_args=(),
    schema=f"(Tensor x, Tensor? weight, Tensor? bias, {_SAID}, float eps, ScalarType? dtype) "
    "-> (Tensor, Tensor, Tensor)",
)
def forward_operator(*arguments: Any) -> tuple[Any, ...]:
    """Return y, which lies as `torch.empty_like(x)` does, mean and rstd."""
    x, weight, bias, function, num_groups, activation, channel_axis, eps, dtype = arguments
    groups = EACH_CHANNEL if num_groups is None else num_groups
    told = asked(function, groups, activation, channel_axis, dtype, True)
    y, mean, rstd = forward(told, eps, (x, weight, bias, None, None, None, None))
    return (_lying_as(x, y), mean, rstd)


def _lying_as(x: Any, result: Any) -> Any:
    """Return a result with the strides that the operator promises of it, which it mostly has."""
    promised = torch.empty_like(x, dtype=result.dtype, device="meta").stride()
    if result.stride() == promised:
        return result
    return torch.empty_like(x, dtype=result.dtype).copy_(result)


@forward_operator.register_fake
def _forward_forms(*arguments: Any) -> tuple[Any, ...]:
    x, _, _, _, num_groups, _, channel_axis, _, dtype = arguments
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    shape = (x.shape[0], x.shape[channel_axis] if num_groups is None else num_groups)
    statistics = (x.new_empty(shape, dtype=compute) for _ in range(2))
    return (torch.empty_like(x, dtype=dtype), *statistics)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, weight, bias, *said = inputs
    ctx.said = said[:_SAID_COUNT]
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, mean, rstd, weight, bias)


def _gradients(run: Callable[..., Any], ctx: Any, dy: Any, *_: Any) -> tuple[Any, ...]:
    wanted = ctx.needs_input_grad[:3]
    if dy is None:
        return (None, None, None, *_NO_MORE)
    needs = [name for name, want in zip(_backward_plan.NEEDS, wanted, strict=True) if want]
    gradients = run(dy, *ctx.saved_tensors, *ctx.said, needs)
    return (*(g if want else None for g, want in zip(gradients, wanted, strict=True)), *_NO_MORE)


@forward_operator.register_vmap
def _forward_of_batch(info: Any, dims: Dims, *arguments: Any) -> Batched:
    x, weight, bias, *rest = arguments
    batch = info.batch_size
    if is_batched(dims[1]) or is_batched(dims[2]):
        return one_by_one(forward_operator, batch, dims, arguments)
    (x,) = _as_samples([x], dims[:1], batch)
    return _as_batch(forward_operator(x, weight, bias, *rest), batch)


def _as_samples(arrays: Any, dims: Dims, batch: int) -> list[Any]:
    return [one.flatten(0, 1) for one in in_front(arrays, dims, batch)]


def _as_batch(results: tuple[Any, ...], batch: int) -> Batched:
    return tuple(one.unflatten(0, (batch, -1)) for one in results), (0,) * len(results)


@torch.library.custom_op(
    "cunorm::group_norm_backward",
    mutates_args=(),
    schema=f"(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, {_SAID},"
    " str[] needs) -> (Tensor, Tensor, Tensor)",
)
def backward_operator(*arguments: Any) -> tuple[Any, ...]:
    """Return dx, which lies as `torch.empty_like(x)` does, dweight and dbias."""
    dy, x, *others, function, num_groups, activation, channel_axis, needs = arguments
    grads = gradients(
        (dy, x, *others), (function, num_groups, activation, channel_axis), tuple(needs)
    )
    dx, *of_parameters = (x.new_empty(0) if one is None else one for one in grads)
    return (_lying_as(x, dx) if "x" in needs else dx, *of_parameters)


def gradients(arrays: tuple[Any, ...], said: tuple[Any, ...], needs: tuple[str, ...]) -> list[Any]:
    """Return dx, dweight and dbias, by the kernels, from dy, x, mean, rstd, weight and bias."""
    function, num_groups, activation, channel_axis = said
    dy, x, *others = arrays
    groups = x.shape[channel_axis] if num_groups is None else num_groups
    told = _backward_plan.asked(function, groups, activation, channel_axis, needs, False)
    return backward(told, (resolved(dy), x, *others, None, None, None, None))


@backward_operator.register_fake
def _backward_forms(*arguments: Any) -> tuple[Any, ...]:
    _, x, _, _, weight, bias, *_, needs = arguments
    operands = (x, weight, bias)
    return tuple(
        torch.empty_like(one) if one is not None and name in needs else x.new_empty(0)
        for name, one in zip(_backward_plan.NEEDS, operands, strict=True)
    )


@backward_operator.register_vmap
def _backward_of_batch(info: Any, dims: Dims, *arguments: Any) -> Batched:
    *arrays, weight, bias, function, num_groups, activation, channel_axis, needs = arguments
    batch, count = info.batch_size, len(arrays)
    if tuple(needs) != ("x",) or any(is_batched(dim) for dim in dims[count : count + 2]):
        return one_by_one(backward_operator, batch, dims, arguments)
    arrays = _as_samples(arrays, dims[:count], batch)
    said = (function, num_groups, activation, channel_axis)
    dx, *absent = backward_operator(*arrays, weight, bias, *said, needs)
    batches = (dx.unflatten(0, (batch, -1)), *(one.new_empty(batch, 0) for one in absent))
    return batches, (0,) * len(batches)


# --- the gradients, as autograd wants them and as torch.func does ---------------------------------

forward_operator.register_autograd(partial(_gradients, backward_operator), setup_context=_save)
transformed = transformable(
    forward_operator, _save, partial(_gradients, differentiable_once(backward_operator))
)
