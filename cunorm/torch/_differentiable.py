# SPDX-License-Identifier: MIT
"""Operators as Functions that torch differentiates in both modes, and torch.func transforms."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cunorm._arrays._torch_private import (
    has_dual_level,
    is_legacy_batch,
    is_used,
    primal,
    saved_tensors,
    set_tangents,
)
from cunorm._core.plan import OpDef
from cunorm.torch._formulas import Operand
from cunorm.torch._library import Run, to_text
from cunorm.torch._pair import Context, Tensors
from cunorm.torch._second import Point

Rule = Callable[..., Any]


def differentiable(run: Run, save: Callable[..., None], vjp: Rule, jvp: Rule) -> Run:
    """Return a function of tensors and specs as a Function, which torch.func transforms, too.

    `register_autograd` makes a Function whose forward takes ctx; torch.func refuses such Functions.
    """

    class Differentiable(torch.autograd.Function):
        generate_vmap_rule = True  # uses the vmap rules of the operators
        setup_context = staticmethod(save)
        backward = staticmethod(vjp)

        @staticmethod
        def forward(*arguments: Any) -> tuple[Tensor, ...]:
            if has_dual_level():  # the kernels refuse tangents, which `jvp` propagates
                arguments = tuple(map(_without_tangent, arguments))
            return run(*arguments)

        @staticmethod
        def jvp(ctx: Context, *tangents: Operand) -> Tensors:
            # PyTorch turns all tangents off here. Those of outer transforms must go on; those of
            # this level are `tangents`.
            with set_tangents(True):
                saved = [None if one is None else primal(one) for one in ctx.saved_tensors]
                return tuple([_apart(one, tangents) for one in jvp(ctx, saved, *tangents)])

    return Differentiable.apply


def _used(ctx: Context, operands: dict[str, Operand]) -> list[str]:
    """Return the names of a Function's operands whose gradients are used."""
    given = [name for name, one in operands.items() if one is not None]
    # The graph has an edge for each tensor, in their order.
    nodes = [node for node, _ in ctx.next_functions]
    return [name for name, node in zip(given, nodes, strict=True) if node and is_used(node)]


def _apart(found: Operand, tangents: Sequence[Operand]) -> Operand:
    """Return a result's tangent, not an operand's: each may be changed in place with its tensor.

    No rule returns a view of a tangent.
    """
    if found is not None and any(found is one for one in tangents):
        return found.clone()
    return found


def _without_tangent(argument: Any) -> Any:
    """Return a tensor without its tangent; a legacy batch has none, and cannot be detached."""
    if not isinstance(argument, Tensor) or is_legacy_batch(argument):
        return argument
    return argument.detach()


def derivative(operator: Run, op: OpDef[Any], vjp: Rule, jvp: Rule, plain_vjp: Rule) -> Run:
    """Return an operator as a Function of its tensors, its spec, and the spec of the forward.

    The rules are methods of `Rules`; `plain_vjp` uses torch's operations alone, for legacy batches
    that are differentiated again: autograd would lose a Function's call on a batch.
    """
    names = [slot.name for slot in op.input_slots]
    count = len(names)

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        return operator(*arguments[:count], to_text(arguments[count]))

    def save(ctx: Context, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.specs = inputs[count:]
        ctx.mark_non_differentiable(*(one for one in output if one.dtype is torch.bool))
        ctx.save_for_backward(*inputs[:count])
        ctx.save_for_forward(*inputs[:count])

    def backward(ctx: Context, *cotangents: Operand) -> Tensors:
        saved = dict(zip(names, saved_tensors(ctx), strict=True))
        wanted = [name for name in _used(ctx, saved) if name not in ("mean", "rstd")]
        arriving = [one for one in cotangents if one is not None]
        rule = plain_vjp if torch.is_grad_enabled() and any(map(is_legacy_batch, arriving)) else vjp
        found = rule(Point(saved, *ctx.specs), wanted, cotangents) if arriving else {}
        return (*(found.get(name) for name in names), None, None)

    def forward_mode(ctx: Context, saved: Tensors, *tangents: Operand) -> Tensors:
        given = dict(zip(names, tangents, strict=False))
        return jvp(Point(dict(zip(names, saved, strict=True)), *ctx.specs), given)

    return differentiable(run, save, backward, forward_mode)
