# SPDX-License-Identifier: MIT
"""Calls of a forward by their DispatchMode; the autograd.Function of all norms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction

from cunorm._dispatch import dispatch, dispatch_spec, parse
from cunorm.torch._formula import recorded_gradients
from cunorm.torch._library import OPERATORS, backward_by, forward_text, present, saving
from cunorm.torch._modes import DispatchMode, dispatch_mode
from cunorm.torch._pair import OpPair


def call(pair: OpPair, params: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
    """Return y first and, of a row norm, the new residual stream, None or x where that is x.

    `params` are the scalars for the forward's `parse`, `arrays` its inputs.
    """
    forward = pair.forward
    mode = dispatch_mode(params[0], forward.inputs, arrays)
    if mode is DispatchMode.PLAIN:
        return dispatch(forward, params, (*arrays, *pair.no_outputs))
    if mode is DispatchMode.AUTOGRAD:
        return _Norm.apply(pair, saving(parse(forward, params)), *arrays)
    operators = OPERATORS[pair.name]
    run = operators.forward if mode is DispatchMode.OPERATOR else operators.transformed
    return present(run(*arrays, forward_text(pair.name, *params)))


# A Function's own `apply` would look at each argument for torch.func, which is not active here.
class _Norm(_SingleLevelFunction):
    """A forward and its gradients, of any pair."""

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


def _gradients(ctx: Any, wanted: tuple[bool, ...], dy: Any, d_residual: Any) -> list[Any]:
    """Return the wanted gradients of the forward's inputs."""
    pair: OpPair = ctx.pair
    if dy is not None and torch.is_grad_enabled():
        saved = zip(pair.saved, ctx.saved_tensors, strict=True)
        operands = {name: one for name, one in saved if name in pair.forward.inputs}
        formula = partial(pair.formula, ctx.spec, ctx.x_dtype)
        found = recorded_gradients(formula, ctx.x_dtype, operands, dy, d_residual)
    else:
        if _is_batched(dy, d_residual):
            run = partial(backward_by, pair, OPERATORS[pair.name].backward)
        else:
            run = partial(pair.run, pair.backward)
        found = pair.gradients(run, ctx, wanted, dy, d_residual)
    return pair.in_order(found, wanted)


def _is_batched(*gradients: Any) -> bool:
    """Whether gradients come as batches, as for a vectorised Jacobian."""
    if torch._C._are_functorch_transforms_active():
        return True
    is_legacy = torch._C._functorch.is_legacy_batchedtensor  # of is_grads_batched
    return any(one is not None and is_legacy(one) for one in gradients)
