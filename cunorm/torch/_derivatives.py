# SPDX-License-Identifier: MIT
"""Norms as Functions that torch differentiates any number of times, in both modes.

`Functions` has a forward, its gradients and its tangent. The derivatives of the last two are those
of a formula in torch's operations; `RowRules` has kernels for them where there is no gate.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cunorm._arrays._torch_private import assume_constant, has_dual_level, is_legacy_batch
from cunorm._core.dtypes import parse_dtype
from cunorm._core.memo import memoize
from cunorm._core.tensor import Device, TensorSpec, contiguous
from cunorm._dispatch import parse
from cunorm._group_norm.spec import jvp_spec as group_jvp_spec
from cunorm._row_norm.jvp_spec import jvp_spec
from cunorm.torch._differentiable import derivative, differentiable
from cunorm.torch._formulas import Operand, group_formula, row_formula
from cunorm.torch._library import Operator, from_text, present, to_text
from cunorm.torch._pair import (
    GROUP,
    ROW,
    BackwardSpec,
    Context,
    ForwardSpec,
    OpPair,
    Run,
    Tensors,
    saving,
)
from cunorm.torch._row_second import RowRules
from cunorm.torch._second import Named, Point, Rules, stream_tangent


class Functions:
    """The forward, the gradients and the tangent of a pair."""

    def __init__(self, pair: OpPair, formula: Callable[..., Tensor]) -> None:
        self.pair, self.plain = pair, Rules(pair, formula)
        rules = RowRules(pair, self) if pair.is_rows else self.plain
        self.forward = Operator(f"{pair.name}_forward", pair.forward).call
        self.backward = Operator(f"{pair.name}_backward", pair.backward).call
        self.forward.register_autograd(self._operator_vjp, setup_context=self._save)
        self.norm = differentiable(self.forward, self._save, self._norm_vjp, self._norm_jvp)
        self.gradients = derivative(
            *(self.backward, pair.backward, rules.gradients_vjp, rules.gradients_jvp),
            self.plain.gradients_vjp,
        )
        tangent = Operator(f"{pair.name}_jvp", pair.tangent).run
        self.tangent = derivative(
            *(tangent, pair.tangent, rules.tangent_vjp, rules.tangent_jvp),
            self.plain.tangent_vjp,
        )

    # --- the forward ------------------------------------------------------------------------------

    def _save(self, ctx: Context, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
        *arrays, text = inputs
        pair, wanted = self.pair, ctx.needs_input_grad[:-1]
        spec, is_dual = from_text(pair.forward.spec_type, text), has_dual_level()
        outputs = present(output)
        has_two = pair.is_rows and (is_dual or pair.has_stream_gradient(spec, wanted))
        hidden = output[2 if has_two else 1 :]
        # Under vmap, PyTorch forgets what is marked, and then refuses the tangent None.
        if is_dual:
            hidden = tuple(one for one in hidden if one.dtype is torch.bool)
        ctx.mark_non_differentiable(*hidden)
        saved = pair.save(ctx, spec, wanted, arrays, outputs, keeps_branch=is_dual)
        if is_dual:
            ctx.save_for_forward(*saved)
            ctx.y_dtype = output[0].dtype
            ctx.has_stream = pair.is_rows and outputs[1] is not None

    def _operator_vjp(self, ctx: Context, *cotangents: Operand) -> Tensors:
        return self._vjp(self.run(ctx.spec), ctx, *cotangents)

    def _norm_vjp(self, ctx: Context, *cotangents: Operand) -> Tensors:
        return self._vjp(partial(self.recorded_gradients, ctx.spec), ctx, *cotangents)

    def _vjp(self, run: Any, ctx: Context, dy: Operand, *others: Operand) -> Tensors:
        wanted = tuple(ctx.needs_input_grad[:-1])
        dresidual_out = others[0] if self.pair.is_rows else None
        return (*self.pair.gradients(ctx, wanted, dy, dresidual_out, run), None)

    def run(self, spec: ForwardSpec) -> Run:
        """Return what runs the backward of a forward's spec, outside of the kernels' own call."""
        if torch.is_grad_enabled() or has_dual_level():
            return partial(self.recorded_gradients, spec)
        return self._operator_gradients

    def _operator_gradients(self, spec: BackwardSpec, arrays: Tensors) -> list[Operand]:
        return self._shared(present(self.backward(*arrays, to_text(spec))))

    def recorded_gradients(
        self, forward: ForwardSpec, spec: BackwardSpec, arrays: Tensors
    ) -> list[Operand]:
        """Return the gradients of a forward's operands, which torch can differentiate.

        Autograd loses a Function's call on a legacy batch, so torch's operations are on batches.
        """
        if any(one is not None and is_legacy_batch(one) for one in arrays):
            reads = [slot.name for slot in self.pair.backward.input_slots]
            point = Point(dict(zip(reads, arrays, strict=True)), spec, forward)
            found = self.plain.gradients(point)
            return self._shared([found.get(name) for name in self.pair.operands])
        return self._shared(present(self.gradients(*arrays, spec, forward)))

    def _shared(self, outputs: list[Operand]) -> list[Operand]:
        if self.pair.is_rows and outputs[-1] is None:
            outputs[-1] = outputs[0]  # dx is also dresidual
        return outputs

    def _norm_jvp(self, ctx: Context, saved: Tensors, *tangents: Operand) -> Tensors:
        named = dict(zip(self.pair.saved, saved, strict=True))
        given = dict(zip(self.pair.forward.inputs, tangents, strict=False))
        if not self.pair.is_rows:
            return (self.tangent_of(ctx, named, given), *_no_tangents(named))
        x: Any = named["x"]
        given["x"] = stream = stream_tangent(ctx, named, given)
        if ctx.spec.gate_position == "branch":
            named["gate"] = given["gate"] = None
        y = self.tangent_of(ctx, named, given)
        if stream is None and ctx.has_stream:
            stream = torch.zeros_like(x)
        return (y, stream if ctx.has_stream else None, *_no_tangents(named))

    def tangent_of(self, ctx: Context, named: Named, tangents: Named) -> Tensor:
        """Return the tangent of y, which torch can differentiate."""
        spec = _tangent_spec(self.pair, ctx.spec, ctx.y_dtype, ctx.x_dtype)
        x: Any = named["x"]
        named = named | {f"{name}_tangent": tangent for name, tangent in tangents.items()}
        if not self.pair.is_rows and named["x_tangent"] is None:
            named["x_tangent"] = torch.zeros_like(x)
        arrays = [named[slot.name] for slot in self.pair.tangent.input_slots]
        (y,) = self.tangent(*arrays, spec, ctx.spec)
        return y


def _no_tangents(named: Named) -> Tensors:
    """Return zeros for the statistics: derivatives are those of x, not of its statistics."""
    statistics = (named.get(name) for name in ("mean", "rstd"))
    return [None if one is None else torch.zeros_like(one) for one in statistics]


@memoize()
def _tangent_spec(pair: OpPair, spec: Any, y: torch.dtype, x: torch.dtype) -> Any:
    """Return the spec of the tangent of a forward's y, from the dtypes of y and x."""
    dtype = parse_dtype(spec.function, "dtype", y)
    if not pair.is_rows:
        return group_jvp_spec(spec, dtype)
    return jvp_spec(spec, dtype, parse_dtype(spec.function, "x", x))


FUNCTIONS = {"row_norm": Functions(ROW, row_formula), "group_norm": Functions(GROUP, group_formula)}


@assume_constant
def checked_spec(name: str, params: tuple[Any, ...], known: Sequence[Any]) -> ForwardSpec:
    """Return the spec of a forward, for its formula; check its tensors.

    Of each tensor, the shape, the dtype and the kind of device are known.
    """
    op = FUNCTIONS[name].pair.forward
    spec: ForwardSpec = parse(op, params)
    specs: list[TensorSpec | None] = []
    for argument, one in zip(op.inputs, known, strict=True):
        if one is not None:
            shape, dtype, device = one
            dtype = parse_dtype(spec.function, argument, dtype)
            one = contiguous(shape, dtype, Device(device, 0))
        specs.append(one)
    op.plan(spec, (*specs, *op.no_outputs))
    return spec


@assume_constant
def forward_text(name: str, *params: object) -> str:
    """Return the spec, as text, of a forward that also returns statistics."""
    return to_text(saving(parse(FUNCTIONS[name].pair.forward, params)))
