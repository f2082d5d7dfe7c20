# SPDX-License-Identifier: MIT
"""Norms as Functions that torch differentiates any number of times, in both modes.

`Functions` has a forward, its gradients and its tangent. The derivatives of the last two are those
of a formula in torch's operations; `RowFunctions` has kernels for them where there is no gate.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cunorm._arrays._torch_private import has_dual_level, set_tangents
from cunorm._arrays.torch import torch_dtype
from cunorm.torch._formulas import Operand, compute_of, gated_branch, pulled, pushed
from cunorm.torch._library import Operator, Run, from_text, present, to_text
from cunorm.torch._pair import BackwardSpec, Context, ForwardSpec, OpPair, Tensors, has_branch_gate

Rule = Callable[..., Sequence[Operand]]
Named = dict[str, Operand]


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


def _of_tensors(count: int, run: Run, vjp: Rule, jvp: Rule) -> Run:
    """Return a function of `count` tensors or None, and of specs, as a Function.

    `vjp` takes the tensors, the specs, which gradients are wanted, and cotangents; `jvp` takes
    the tensors, the specs and tangents.
    """

    def save(ctx: Context, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.specs = inputs[count:]
        ctx.mark_non_differentiable(*(one for one in output if one.dtype is torch.bool))
        ctx.save_for_backward(*inputs[:count])
        ctx.save_for_forward(*inputs[:count])

    def backward(ctx: Context, *cotangents: Operand) -> Tensors:
        wanted = ctx.needs_input_grad[:count]
        found = vjp(ctx.saved_tensors, ctx.specs, wanted, cotangents)
        return (*found, *[None] * len(ctx.specs))

    def forward_mode(ctx: Context, saved: Tensors, *tangents: Operand) -> Tensors:
        return jvp(saved, ctx.specs, tangents[:count])

    return differentiable(run, save, backward, forward_mode)


class Functions:
    """The forward, the gradients and the tangent of a pair."""

    def __init__(self, pair: OpPair, formula: Callable[..., Tensor]) -> None:
        self.pair, self.formula = pair, formula
        self.forward = Operator(f"{pair.name}_forward", pair.forward).call
        self.backward = Operator(f"{pair.name}_backward", pair.backward).call
        self.forward.register_autograd(self._operator_vjp, setup_context=self._save)
        self.norm = differentiable(self.forward, self._save, self._norm_vjp, self._norm_jvp)
        self.reads = pair.backward.inputs  # of the gradients
        self._gradients = _of_tensors(
            len(self.reads), self._run_backward, self._gradients_vjp, self._gradients_jvp
        )

    # --- the forward ------------------------------------------------------------------------------

    def _save(self, ctx: Context, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
        *arrays, text = inputs
        pair, wanted = self.pair, ctx.needs_input_grad[:-1]
        spec, has_tangents = from_text(pair.forward.spec_type, text), has_dual_level()
        has_two = pair.is_rows and (has_tangents or pair.has_stream_gradient(spec, wanted))
        ctx.mark_non_differentiable(*output[2 if has_two else 1 :])
        pair.save(ctx, spec, wanted, arrays, present(output), has_tangents=has_tangents)

    def _operator_vjp(self, ctx: Context, dy: Operand, *others: Operand) -> Tensors:
        run = self.run_gradients if are_recorded() else self.run_backward
        return self._vjp(partial(run, ctx.spec), ctx, dy, *others)

    def _norm_vjp(self, ctx: Context, dy: Operand, *others: Operand) -> Tensors:
        return self._vjp(partial(self.run_gradients, ctx.spec), ctx, dy, *others)

    def _vjp(self, run: Any, ctx: Context, dy: Operand, *others: Operand) -> Tensors:
        wanted = tuple(ctx.needs_input_grad[:-1])
        dresidual_out = others[0] if self.pair.is_rows else None
        return (*self.pair.gradients(ctx, wanted, dy, dresidual_out, run), None)

    def _norm_jvp(self, ctx: Context, saved: Tensors, *tangents: Operand) -> Tensors:
        named = dict(zip(self.pair.saved, saved, strict=True))
        given = dict(zip(self.pair.forward.inputs, tangents[:-1], strict=True))
        stream = self._stream_tangent(ctx, named, given)
        y = self._tangent(ctx, named, given | {"x": stream})
        absent = [None] * (len(self.pair.forward.outputs) - 1)
        return (y, stream if ctx.has_stream else None, *absent[1:]) if absent else (y,)

    def _stream_tangent(self, ctx: Context, named: Named, tangents: Named) -> Operand:
        """Return the tangent of the array that is normalised."""
        return tangents["x"]

    def _tangent(self, ctx: Context, named: Named, tangents: Named) -> Tensor:
        """Return the tangent of y."""
        operands = {name: named[name] for name in tangents if named.get(name) is not None}
        y = self.tangent_by_parts(ctx.spec, ctx.x_dtype, operands, tangents)
        return y.to(ctx.y_dtype)

    # --- gradients --------------------------------------------------------------------------------

    def run_gradients(
        self, forward: ForwardSpec, spec: BackwardSpec, arrays: Tensors
    ) -> list[Operand]:
        """Return the gradients of a forward's operands, so that they can be differentiated."""
        return self._shared(present(self._gradients(*arrays, forward, spec)))

    def run_backward(
        self, forward: ForwardSpec, spec: BackwardSpec, arrays: Tensors
    ) -> list[Operand]:
        return self._shared(present(self._backward(*arrays, forward, spec)))

    def _backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        *arrays, _, spec = arguments
        return self.backward(*arrays, to_text(spec))

    def _shared(self, outputs: list[Operand]) -> list[Operand]:
        if self.pair.is_rows and outputs[-1] is None:
            outputs[-1] = outputs[0]  # dx is also dresidual
        return outputs
