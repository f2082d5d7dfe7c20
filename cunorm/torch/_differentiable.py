# SPDX-License-Identifier: MIT
"""Operators as Functions that torch differentiates in both modes, and torch.func transforms."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cunorm._arrays._torch_private import has_dual_level, set_tangents
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
                arguments = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
            return run(*arguments)

        @staticmethod
        def jvp(ctx: Context, *tangents: Operand) -> Tensors:
            # PyTorch turns all tangents off here. Those of outer transforms must go on; those of
            # this level are `tangents`.
            with set_tangents(True):
                saved = [
                    None if one is None else forward_ad.unpack_dual(one).primal
                    for one in ctx.saved_tensors
                ]
                return tuple(jvp(ctx, saved, *tangents))

    return Differentiable.apply


def derivative(operator: Run, op: OpDef[Any], vjp: Rule, jvp: Rule) -> Run:
    """Return an operator as a Function of its tensors, its spec, and the spec of the forward.

    `vjp` and `jvp` are methods of `Rules`.
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
        saved = dict(zip(names, ctx.saved_tensors, strict=True))
        pairs = zip(names, ctx.needs_input_grad, strict=False)
        wanted = [name for name, want in pairs if want and name not in ("mean", "rstd")]
        found = vjp(Point(saved, *ctx.specs), wanted, cotangents)
        return (*(found.get(name) for name in names), None, None)

    def forward_mode(ctx: Context, saved: Tensors, *tangents: Operand) -> Tensors:
        given = dict(zip(names, tangents, strict=False))
        return jvp(Point(dict(zip(names, saved, strict=True)), *ctx.specs), given)

    return differentiable(run, save, backward, forward_mode)
