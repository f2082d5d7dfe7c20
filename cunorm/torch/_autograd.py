# SPDX-License-Identifier: MIT
"""Calls of norms by their DispatchMode, and the autograd.Function of all norms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cunorm._dispatch import dispatch, dispatch_spec, parse
from cunorm.torch._library import OPERATORS, forward_text, present, run_backward, saving
from cunorm.torch._modes import DispatchMode, dispatch_mode, specialized
from cunorm.torch._pair import OpPair


def call(pair: OpPair, params: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
    """Return y and, of a row norm, the new residual stream second: x or None where that is x.

    What follows is not to be used: only some modes return the statistics.

    `params` are scalars for the forward's `parse`, `arrays` its inputs.
    """
    mode = dispatch_mode(params[0], pair.forward.inputs, arrays)
    if mode is DispatchMode.PLAIN:
        return dispatch(pair.forward, params, (*arrays, *pair.no_outputs))
    if mode is DispatchMode.AUTOGRAD:
        return _apply(pair, saving(parse(pair.forward, params)), *arrays)
    operators = OPERATORS[pair.name]
    run = operators.forward if mode is DispatchMode.OPERATOR else operators.transformed
    return present(run(*arrays, forward_text(pair.name, *map(specialized, params))))


class _Norm(torch.autograd.Function):
    """A norm and its gradients, of any pair."""

    @staticmethod
    def forward(ctx: Any, pair: OpPair, spec: Any, *arrays: Any) -> tuple[Any, Any]:
        """Return y, and the new residual stream, None where there is none or it is x."""
        outputs = dispatch_spec(pair.forward, spec, (*arrays, *pair.no_outputs))
        stream = outputs[1] if pair.has_stream else None
        if stream is arrays[0]:
            stream = outputs[1] = None
        elif stream is not None and not any(ctx.needs_input_grad[2:4]):
            ctx.mark_non_differentiable(stream)
        ctx.pair = pair
        pair.save(ctx, spec, arrays, outputs)
        return outputs[0], stream

    @staticmethod
    def backward(ctx: Any, dy: Any, d_residual: Any) -> tuple[Any, ...]:
        """Return a gradient for each argument of `forward`, None where none is needed."""
        return (None, None, *_gradients(ctx, ctx.needs_input_grad[2:], dy, d_residual))


# A Function's own `apply` looks for transforms first, which `dispatch_mode` has done.
_apply = super(torch.autograd.Function, _Norm).apply


def _gradients(ctx: Any, wanted: tuple[bool, ...], dy: Any, d_residual: Any) -> list[Any]:
    """Return the wanted gradients of the inputs of a forward."""
    pair: OpPair = ctx.pair
    run: Any = partial(pair.run, pair.backward)
    if torch.is_grad_enabled():
        run = None
    elif torch.compiler.is_compiling() or _is_batched(dy, d_residual):  # compiled autograd
        run = partial(run_backward, pair, OPERATORS[pair.name].backward)
    return pair.gradients(ctx, wanted, dy, d_residual, run)


def _is_batched(*gradients: Any) -> bool:
    """Whether gradients come as batches, as for a vectorised Jacobian."""
    if torch._C._are_functorch_transforms_active():
        return True
    is_legacy = torch._C._functorch.is_legacy_batchedtensor  # of is_grads_batched
    return any(one is not None and is_legacy(one) for one in gradients)
