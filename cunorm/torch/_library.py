# SPDX-License-Identifier: MIT
"""Norms as operators of torch's dispatcher: for torch.compile, torch.func and modes.

An operator takes the inputs of an OpDef, and its OpSpec as JSON. It returns no None and none of its
inputs: what is absent is a tensor of bools, of no elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cunorm._core.memo import memoize
from cunorm._core.plan import OpDef
from cunorm._core.serialize import spec_from_json, spec_to_json
from cunorm._dispatch import parse
from cunorm.torch._pair import GROUP, ROW, OpPair, Tensors

Function = Callable[..., Any]
Batched = tuple[tuple[Any, ...], tuple[int, ...]]  # results, and where each one's batch axis is

_to_text = memoize()(spec_to_json)
_from_text = memoize()(spec_from_json)


class Operators:
    """The operators of a pair; the forward's also as torch.func wants it."""

    def __init__(self, pair: OpPair) -> None:
        self.forward = _define(pair, pair.forward, "forward", pair.fake_outputs)
        self.backward = _define(pair, pair.backward, "backward", pair.fake_gradients)
        save, gradients = partial(_save, pair), partial(_gradients, pair, self.backward)
        self.forward.register_autograd(gradients, setup_context=save)
        once = _transformable(self.backward, lambda ctx, inputs, output: None, _refuse)
        self.transformed = _transformable(self.forward, save, partial(_gradients, pair, once))


def _define(pair: OpPair, op: OpDef, direction: str, fake: Function) -> Any:
    """Define the operator of an OpDef."""
    inputs = [f"Tensor{'?' * (n >= op.required)} {name}" for n, name in enumerate(op.inputs)]
    outputs = ", ".join(["Tensor"] * len(op.outputs))

    def run(function: Function, *arguments: Any) -> tuple[Any, ...]:
        *arrays, text = arguments
        found = function(_from_text(op.spec_type, text), arrays)
        x = arrays[op.x]
        return tuple(x.new_empty(0, dtype=torch.bool) if one is None else one for one in found)

    operator = torch.library.custom_op(
        f"cunorm::{pair.name}_{direction}",
        partial(run, partial(_own_outputs, pair, op)),
        mutates_args=(),
        schema=f"({', '.join(inputs)}, str spec) -> ({outputs})",
    )
    operator.register_fake(partial(run, fake))
    operator.register_vmap(partial(_run_batch, pair, op, operator))
    return operator


def _own_outputs(pair: OpPair, op: OpDef, spec: Any, arrays: Tensors) -> list[Any]:
    """Return outputs with the promised strides, None for absent ones and for copies of others."""
    x = arrays[op.x]
    first, *others = pair.run(op, spec, arrays)
    others = [None if one is x or one is first else one for one in others]
    if first is not None:
        promised = pair.like(x, dtype=first.dtype, device="meta").stride()
        if first.stride() != promised:
            first = pair.like(x, dtype=first.dtype).copy_(first)
    return [first, *others]


def present(outputs: Sequence[Any]) -> list[Any]:
    """Return what an operator returned, with None for what is absent."""
    return [None if one.dtype == torch.bool else one for one in outputs]


@torch.compiler.assume_constant_result  # which torch.compile could not follow
def forward_text(name: str, *params: Any) -> str:
    """Return the spec of a forward of a pair that saves statistics, of its scalars."""
    plain = {torch.SymInt: int, torch.SymFloat: float}
    params = tuple(plain[type(one)](one) if type(one) in plain else one for one in params)
    pair = next(pair for pair in (ROW, GROUP) if pair.name == name)
    return _to_text(saving(parse(pair.forward, params)))  # type: ignore[no-any-return]


@memoize()
def saving(spec: Any) -> Any:
    """Return the spec of the same forward that also returns statistics."""
    return replace(spec, saves=True)


# --- gradients ------------------------------------------------------------------------------------


def backward_by(pair: OpPair, operator: Function, spec: Any, arrays: Tensors) -> list[Any]:
    """Return the outputs of a backward, by its operator."""
    outputs = present(operator(*arrays, _to_text(spec)))
    if pair.has_stream and outputs[-1] is None:
        outputs[-1] = outputs[0]  # dx is dresidual, too
    return outputs


def _save(pair: OpPair, ctx: Any, inputs: Tensors, output: Tensors) -> None:
    *arrays, text = inputs
    has_two = pair.has_stream and any(ctx.needs_input_grad[:2])
    ctx.mark_non_differentiable(*output[2 if has_two else 1 :])
    pair.save(ctx, _from_text(pair.forward.spec_type, text), arrays, present(output))


def _gradients(pair: OpPair, operator: Function, ctx: Any, dy: Any, *others: Any) -> Any:
    wanted, run = tuple(ctx.needs_input_grad[:-1]), partial(backward_by, pair, operator)
    gradients = pair.gradients(run, ctx, wanted, dy, others[0] if pair.has_stream else None)
    return (*pair.in_order(gradients, wanted), None)


def _transformable(operator: Function, save: Function, gradients: Function) -> Function:
    """Return an operator as torch.func wants it, which does not ask operators for gradients."""

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = True  # by the rules of the operators
        setup_context = staticmethod(save)
        backward = staticmethod(gradients)

        @staticmethod
        def forward(*arguments: Any) -> Any:
            return operator(*arguments)

    run: Function = Transformed.apply
    return run


def _refuse(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "cunorm.torch has no second derivatives under torch.func, only through "
        "torch.autograd.grad(..., create_graph=True)"
    )


# --- batches --------------------------------------------------------------------------------------


def _run_batch(
    pair: OpPair, op: OpDef, operator: Function, info: Any, dims: Sequence[Any], *arguments: Any
) -> Batched:
    """Run a batch of calls as one, whose rows or samples are theirs, or one by one."""
    *arrays, text = arguments
    batch, count = info.batch_size, len(arrays) - len(op.parameters)
    has_sums = any(name[1:] in _from_text(op.spec_type, text).needs for name in op.sums)
    if has_sums or any(isinstance(dim, int) for dim in dims[count:]):
        return _one_by_one(operator, batch, dims, arguments)

    def merged(array: Any, dim: Any) -> Any:
        if array is None:
            return None
        is_batch = isinstance(dim, int)
        return pair.merged(array.movedim(dim, 0) if is_batch else array.expand(batch, *array.shape))

    rows = map(merged, arrays[:count], dims)
    outputs = operator(*rows, *arrays[count:], _merged_text(pair, op.spec_type, text))
    outputs = tuple(
        one.new_empty(batch, 0) if one.dtype == torch.bool else pair.parted(one, batch)
        for one in outputs
    )
    return outputs, (0,) * len(outputs)


@memoize()
def _merged_text(pair: OpPair, spec_type: type, text: str) -> str:
    return spec_to_json(pair.merged_spec(_from_text(spec_type, text)))


def _one_by_one(
    operator: Function, batch: int, dims: Sequence[Any], arguments: Sequence[Any]
) -> Batched:
    """Call an operator for each item of a batch: what all rows share differs between them."""
    calls = [
        operator(
            *(
                one.select(dim, item) if isinstance(dim, int) else one
                for one, dim in zip(arguments, dims, strict=True)
            )
        )
        for item in range(batch)
    ]
    outputs = tuple(torch.stack(items) for items in zip(*calls, strict=True))
    return outputs, (0,) * len(outputs)


OPERATORS = {pair.name: Operators(pair) for pair in (ROW, GROUP)}
