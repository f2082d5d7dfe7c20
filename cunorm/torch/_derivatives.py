# SPDX-License-Identifier: MIT
"""Norms as Functions that torch differentiates any number of times, in both modes.

`Functions` has a forward, its gradients and its tangent, each by a kernel. The derivatives of the
last two are derivatives of a formula in torch's operations, which `RowFunctions` replaces by calls
of kernels, as far as there are kernels.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cunorm._arrays._torch_private import assume_constant, has_dual_level, with_tangents
from cunorm._arrays.torch import torch_dtype
from cunorm._dispatch import parse
from cunorm.torch._formulas import Operand, compute_of, group_formula, pulled, pushed
from cunorm.torch._library import Operator, Run, from_text, present, to_text
from cunorm.torch._pair import GROUP, ROW, BackwardSpec, Context, OpPair, Tensors, saving

Rule = Callable[..., Sequence[Operand]]


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
            if has_dual_level():  # here no derivative is recorded, and kernels take no tangents
                arguments = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
            return run(*arguments)

        @staticmethod
        def jvp(ctx: Context, *tangents: Operand) -> Any:
            # PyTorch turns tangents off here, also those of outer transforms.
            with with_tangents():
                saved = [None if t is None else _primal(t) for t in ctx.saved_tensors]
                return tuple(jvp(ctx, saved, *tangents))

    return Differentiable.apply


def _primal(tensor: Tensor) -> Tensor:
    """Return a tensor without its tangent of the innermost level."""
    return forward_ad.unpack_dual(tensor).primal


def _save_all(count: int, ctx: Context, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    """Keep the first `count` inputs, which are tensors or None, and the specs that follow."""
    ctx.set_materialize_grads(False)
    ctx.specs = inputs[count:]
    ctx.mark_non_differentiable(*(one for one in output if one.dtype is torch.bool))
    ctx.save_for_backward(*inputs[:count])
    ctx.save_for_forward(*inputs[:count])


class Functions:
    def __init__(self, pair: OpPair, formula: Callable[..., Tensor]) -> None:
        self.pair, self.formula = pair, formula
        self.forward = Operator(f"{pair.name}_forward", pair.forward).call
        self.backward = Operator(f"{pair.name}_backward", pair.backward).call
        self.forward.register_autograd(self._operator_gradients, setup_context=self._save)
        self.norm = differentiable(self.forward, self._save, self._norm_vjp, self._norm_jvp)
        reads = len(pair.backward.inputs)
        self._gradients = self._of(reads, self._run_backward, self.gradients_vjp, self.gradients_jvp)
        count = len(self.tangent_inputs)
        self._tangent = self._of(count, self._run_tangent, self.tangent_vjp, self.tangent_jvp)

    def _of(self, count: int, run: Run, vjp: Rule, jvp: Rule) -> Run:
        """Return a function of `count` tensors and some specs as a Function."""

        def backward(ctx: Context, *cotangents: Operand) -> Tensors:
            found = vjp(ctx.saved_tensors, ctx.specs, ctx.needs_input_grad, cotangents)
            return (*found, *[None] * len(ctx.specs))

        def forward_mode(ctx: Context, saved: Tensors, *tangents: Operand) -> Tensors:
            return jvp(saved, ctx.specs, tangents[:count])

        return differentiable(run, partial(_save_all, count), backward, forward_mode)

    # --- the forward ---

    def _save(self, ctx: Context, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
        ...
