# SPDX-License-Identifier: MIT
"""Row norms that autograd records: the eager way, and which way each call takes."""

from __future__ import annotations

from typing import Any

import torch

from cunorm.results import AddNorm
from cunorm.row_norm._backward import GradArrays, NormBackward, backward
from cunorm.row_norm._forward import Arrays, Norm, forward
from cunorm.row_norm._forward_plan import Options
from cunorm.torch import _row_norm_operator as operator
from cunorm.torch._row_norm_formula import differentiable_gradients
from cunorm.torch._ways import Way, any_batched, resolved, torch_dtype, way_of

# What each operand's gradient is called in `needs`: the two of x and residual are one.
_NEEDS = ("x", "x", "gate", "weight", "bias")


def row_norm(
    norm: Norm, arrays: Arrays, dtype: Any, residual_dtype: Any = None, *, streams: bool = False
) -> AddNorm:
    """Return y and, if that is asked for, the new residual stream, x itself where it is that."""
    way = way_of(norm.function, Arrays._fields, arrays)
    if way is Way.PLAIN:
        result = forward(norm, arrays, Options(dtype, residual_dtype, streams=streams), None)
        return AddNorm(result.y, result.residual)
    if way is Way.RECORDED:
        options = Options(dtype, residual_dtype, saves=True, streams=streams)
        y, stream = _RowNorm.apply(norm, options, *arrays)
    else:
        asked = torch_dtype(norm.function, "dtype", dtype)
        asked_residual = torch_dtype(norm.function, "residual_dtype", residual_dtype)
        run = operator.transformed if way is Way.TRANSFORMED else operator.forward_operator
        y, stream = operator.row_norm(run, norm, arrays, asked, asked_residual)
    return AddNorm(y, arrays.x if stream is None else stream)


class _RowNorm(torch.autograd.Function):
    """A row norm and its gradients. It saves what was normalised, rstd, mean and parameters."""

    @staticmethod
    def forward(ctx: Any, norm: Norm, options: Options, *arrays: Any) -> tuple[Any, Any]:
        """Return y, and the new stream, None where that is x."""
        x, residual, gate, weight, bias = arrays
        y, stream, mean, rstd = forward(norm, Arrays(*arrays), options, None)
        if stream is x:
            stream = None
        elif stream is not None and not any(ctx.needs_input_grad[2:4]):
            ctx.mark_non_differentiable(stream)
        normalised = x if stream is None else stream
        ctx.norm, ctx.dtypes, ctx.has_residual = norm, (x.dtype, y.dtype), residual is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(normalised, rstd, mean, gate, weight, bias)
        return y, stream

    @staticmethod
    def backward(ctx: Any, dy: Any, d_residual: Any) -> tuple[Any, ...]:
        """Return a gradient for each argument of `forward`, None where none is needed."""
        wanted = ctx.needs_input_grad[2:]
        if dy is None or torch.is_grad_enabled():
            made = differentiable_gradients(ctx.norm, ctx.dtypes, ctx.saved_tensors, dy, d_residual)
        else:
            made = _gradients(ctx, wanted, dy, d_residual)
        dx, dresidual, *others = made
        found = (dx, dresidual if ctx.has_residual else None, *others)
        kept = (gradient if want else None for gradient, want in zip(found, wanted, strict=True))
        return (None, None, *kept)


def _gradients(ctx: Any, wanted: tuple[bool, ...], dy: Any, d_residual: Any) -> tuple[Any, ...]:
    """Return the kernels' gradients, in the order of Arrays."""
    normalised, rstd, mean, gate, weight, bias = ctx.saved_tensors
    norm: Norm = ctx.norm
    x_dtype = ctx.dtypes[0]
    needs = tuple({name for name, want in zip(_NEEDS, wanted, strict=True) if want})
    arrays = GradArrays(
        resolved(dy), normalised, rstd, mean, resolved(d_residual), gate, weight, bias
    )
    if any_batched(dy, d_residual):
        return operator.gradients(operator.backward_operator, norm, arrays, x_dtype, needs)
    asked = NormBackward(norm.function, norm.variant, norm.c, norm.weight_offset, x_dtype, needs)
    grads = backward(asked, arrays, None, None)
    return (grads.dx, grads.dresidual, grads.dgate, grads.dweight, grads.dbias)
