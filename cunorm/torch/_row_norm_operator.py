# SPDX-License-Identifier: MIT
"""Row norms as operators of torch's dispatcher: for torch.compile, torch.func and modes.

An operator returns no None and none of its inputs: what is absent is a tensor of no elements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cunorm.row_norm._backward import GradArrays, NormBackward, backward
from cunorm.row_norm._forward import Arrays, Norm, forward
from cunorm.row_norm._forward_plan import Options
from cunorm.row_norm._variant import Variant
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

# Of `said`, as which a Norm travels: its variant follows the function's name.
_SAID = (
    "str function, bool center, int axis, int groups, bool round_before_weight, "
    "str gate_activation, str gate_position, float eps, float? c, float weight_offset, "
    "bool eps_of_sum"
)
_AXIS, _GROUPS, _ROUND = 2, 3, 4  # places in `said`
_ARRAYS, _GRAD_ARRAYS = len(Arrays._fields), len(GradArrays._fields)
_VARIANT = len(Variant._fields)


def row_norm(
    run: Callable[..., Any],
    norm: Norm,
    arrays: Arrays,
    dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
) -> tuple[Any, Any]:
    """Return y, and the new stream, None where that is x; `run` is one of the two below."""
    y, stream, _, _ = run(*arrays, *_said(norm), dtype, residual_dtype)
    return y, stream if _writes_stream(arrays.x, arrays.residual, residual_dtype) else None


def _said(norm: Norm) -> tuple[Any, ...]:
    function, variant, *numbers = norm
    return (function, *variant, *numbers)


def _norm(said: tuple[Any, ...]) -> Norm:
    function, *rest = said
    return Norm(function, Variant(*rest[:_VARIANT]), *rest[_VARIANT:])


def _writes_stream(x: Any, residual: Any, residual_dtype: torch.dtype | None) -> bool:
    """Whether there is a new stream other than x itself."""
    return residual is not None or residual_dtype not in (None, x.dtype)


# --- the forward ----------------------------------------------------------------------------------


@torch.library.custom_op(
    "cunorm::row_norm_forward",
    mutates_args=(),
    schema=f"(Tensor x, Tensor? residual, Tensor? gate, Tensor? weight, Tensor? bias, {_SAID}, "
    "ScalarType? dtype, ScalarType? residual_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
)
def forward_operator(*arguments: Any) -> tuple[Any, ...]:
    """Return y, the new residual stream, mean and rstd."""
    arrays, said, (dtype, residual_dtype) = _taken_apart(arguments)
    x, options = arrays.x, Options(dtype, residual_dtype, saves=True)
    results = forward(_norm(said), arrays, options, None)
    return tuple(x.new_empty(0) if one is None or one is x else one for one in results)


def _taken_apart(arguments: tuple[Any, ...]) -> tuple[Arrays, tuple[Any, ...], tuple[Any, ...]]:
    return Arrays(*arguments[:_ARRAYS]), arguments[_ARRAYS:-2], arguments[-2:]


@forward_operator.register_fake
def _forward_forms(*arguments: Any) -> tuple[Any, ...]:
    (x, residual, _, weight, _), said, (dtype, residual_dtype) = _taken_apart(arguments)
    if dtype is None:
        rounds = said[_ROUND] and weight is not None
        dtype = torch.promote_types(x.dtype, weight.dtype) if rounds else x.dtype
    stream = residual_dtype if residual is None else residual.dtype
    compute = torch.float64 if torch.float64 in (x.dtype, stream) else torch.float32
    groups = said[_GROUPS]
    statistic = (*x.shape[: said[_AXIS]], *([groups] if groups > 1 else []))
    writes_stream = _writes_stream(x, residual, residual_dtype)
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.shape, dtype=stream) if writes_stream else x.new_empty(0),
        x.new_empty(statistic, dtype=compute) if _norm(said).variant.center else x.new_empty(0),
        x.new_empty(statistic, dtype=compute),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    (x, residual, gate, weight, bias), said, (_, residual_dtype) = _taken_apart(inputs)
    _, stream, mean, rstd = output
    writes_stream = _writes_stream(x, residual, residual_dtype)
    ctx.said, ctx.x_dtype, ctx.has_residual = said, x.dtype, residual is not None
    ctx.set_materialize_grads(False)
    has_gradient = writes_stream and any(ctx.needs_input_grad[:2])
    ctx.mark_non_differentiable(mean, rstd, *(() if has_gradient else (stream,)))
    normalised = stream if writes_stream else x
    mean = mean if _norm(said).variant.center else None
    ctx.save_for_backward(normalised, rstd, mean, gate, weight, bias)


def _gradients(
    run: Callable[..., Any], ctx: Any, dy: Any, d_residual: Any, *_: Any
) -> tuple[Any, ...]:
    x_wanted, residual_wanted, *wanted = ctx.needs_input_grad[:_ARRAYS]
    no_more = (None,) * (len(ctx.said) + 2)
    if dy is None:
        return (d_residual.to(ctx.x_dtype), d_residual, None, None, None, *no_more)
    normalised, rstd, mean, *others = ctx.saved_tensors
    names = ("gate", "weight", "bias")
    needs = [name for name, want in zip(names, wanted, strict=True) if want]
    needs += ["x"] if x_wanted or residual_wanted else []
    arrays = GradArrays(dy, normalised, rstd, mean, d_residual, *others)
    made = gradients(run, _norm(ctx.said), arrays, ctx.x_dtype, needs)
    wants = (x_wanted, residual_wanted, *wanted)
    return (*(g if want else None for g, want in zip(made, wants, strict=True)), *no_more)


def gradients(
    run: Callable[..., Any], norm: Norm, arrays: GradArrays, x_dtype: torch.dtype, needs: Any
) -> tuple[Any, ...]:
    """Return gradients in the order of Arrays, by the backward's operator."""
    made = run(*arrays, *_said(norm), x_dtype, list(needs))
    dx, dweight, dbias, dgate, dresidual = made
    return (dx, dx if arrays.x.dtype == x_dtype else dresidual, dgate, dweight, dbias)


@forward_operator.register_vmap
def _forward_of_batch(info: Any, dims: Dims, *arguments: Any) -> Batched:
    (*rows, weight, bias), said, options = _taken_apart(arguments)
    batch = info.batch_size
    if any(is_batched(dim) for dim in dims[len(rows) : _ARRAYS]):
        return one_by_one(forward_operator, batch, dims, arguments)
    rows = in_front(rows, dims[: len(rows)], batch)
    results = forward_operator(*rows, weight, bias, *_of_batch(said), *options)
    return _with_batch(results, batch)


def _of_batch(said: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `said` for rows with one more axis in front."""
    axis = said[_AXIS] if said[_AXIS] < 0 else said[_AXIS] + 1
    return (*said[:_AXIS], axis, *said[_AXIS + 1 :])


def _with_batch(results: tuple[Any, ...], batch: int) -> Batched:
    """Return results of rows, with a batch axis for absent ones, too."""
    results = tuple(
        one.new_empty(batch, 0) if one.dim() == 1 and not len(one) else one for one in results
    )
    return results, (0,) * len(results)


# --- the backward ---------------------------------------------------------------------------------


@torch.library.custom_op(
    "cunorm::row_norm_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor rstd, Tensor? mean, Tensor? d_residual, Tensor? gate, "
    f"Tensor? weight, Tensor? bias, {_SAID}, ScalarType x_dtype, str[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward_operator(*arguments: Any) -> tuple[Any, ...]:
    """Return dx, dweight, dbias, dgate and dresidual, which is absent where dx stands for it."""
    arrays, said, (x_dtype, needs) = _grads_taken_apart(arguments)
    arrays = arrays._replace(dy=resolved(arrays.dy), d_residual=resolved(arrays.d_residual))
    x, norm = arrays.x, _norm(said)
    asked = NormBackward(
        norm.function, norm.variant, norm.c, norm.weight_offset, x_dtype, tuple(needs)
    )
    grads = backward(asked, arrays, None, None)
    if grads.dresidual is grads.dx:
        grads = grads._replace(dresidual=None)
    return tuple(x.new_empty(0) if one is None else one for one in grads)


def _grads_taken_apart(arguments: tuple[Any, ...]) -> tuple[GradArrays, tuple[Any, ...], Any]:
    return GradArrays(*arguments[:_GRAD_ARRAYS]), arguments[_GRAD_ARRAYS:-2], arguments[-2:]


@backward_operator.register_fake
def _backward_forms(*arguments: Any) -> tuple[Any, ...]:
    arrays, _, (x_dtype, needs) = _grads_taken_apart(arguments)
    x = arrays.x

    def form(name: str) -> Any:
        operand = getattr(arrays, name)
        absent = operand is None or name not in needs
        shape = x.shape if name == "gate" else () if absent else operand.shape
        return x.new_empty(0) if absent else x.new_empty(shape, dtype=operand.dtype)

    return (
        x.new_empty(x.shape, dtype=x_dtype) if "x" in needs else x.new_empty(0),
        *(form(name) for name in ("weight", "bias", "gate")),
        x.new_empty(x.shape) if "x" in needs and x_dtype != x.dtype else x.new_empty(0),
    )


@backward_operator.register_vmap
def _backward_of_batch(info: Any, dims: Dims, *arguments: Any) -> Batched:
    (*rows, weight, bias), said, (x_dtype, needs) = _grads_taken_apart(arguments)
    batch = info.batch_size
    has_sums = any(name in needs for name in ("weight", "bias"))
    if has_sums or any(is_batched(dim) for dim in dims[len(rows) : _GRAD_ARRAYS]):
        return one_by_one(backward_operator, batch, dims, arguments)
    rows = in_front(rows, dims[: len(rows)], batch)
    results = backward_operator(*rows, weight, bias, *_of_batch(said), x_dtype, needs)
    return _with_batch(results, batch)


# --- the gradients, as autograd wants them and as torch.func does ---------------------------------

forward_operator.register_autograd(partial(_gradients, backward_operator), setup_context=_save)
transformed = transformable(
    forward_operator, _save, partial(_gradients, differentiable_once(backward_operator))
)
