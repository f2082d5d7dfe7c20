# SPDX-License-Identifier: MIT
"""Norms as operators of torch's dispatcher: for torch.compile, torch.func and modes.

An operator takes the inputs of an OpDef, and its OpSpec as JSON. It returns no None and none of its
inputs: what is absent is a tensor of bools, of no elements.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef  # type: ignore[attr-defined]

from cunorm._arrays._torch_private import assume_constant, is_transforming
from cunorm._arrays.torch import PLAIN_TYPES, TORCH_DTYPES
from cunorm._core.dtypes import parse_dtype
from cunorm._core.memo import memoize
from cunorm._core.operands import Kind, Slot
from cunorm._core.plan import OpDef, OpSpec, spec_from_json, spec_to_json
from cunorm._core.tensor import Device, TensorSpec
from cunorm._dispatch import parse
from cunorm.torch._pair import (
    GROUP,
    ROW,
    BackwardSpec,
    Context,
    ForwardSpec,
    Operand,
    OpPair,
    Tensors,
)
from cunorm.torch._tensors import unwrapped

Operator = Callable[..., tuple[Tensor, ...]]
Batched = tuple[tuple[Tensor, ...], tuple[int, ...]]  # outputs, and where each one's batch axis is

_to_text = memoize()(spec_to_json)
_from_text = memoize()(spec_from_json)


class Operators:
    """The operators of a pair; `transformed` is the forward's for torch.func."""

    def __init__(self, pair: OpPair) -> None:
        self.pair = pair
        self.forward = _define(pair, pair.forward, "forward")
        self.backward = _define(pair, pair.backward, "backward")
        save = partial(_save, pair)
        gradients = partial(_eager_gradients, pair, self.backward)
        self.forward.register_autograd(gradients, setup_context=save)
        backward = _transformable(self.backward, lambda ctx, inputs, output: None, _refuse)
        self.transformed = _transformable(self.forward, save, partial(_gradients, pair, backward))


def _define(pair: OpPair, op: OpDef[Any], direction: str) -> CustomOpDef:
    inputs = [f"Tensor{'' if slot.is_required else '?'} {slot.argument}" for slot in op.input_slots]
    outputs = ", ".join(["Tensor"] * len(op.outputs))

    def run(function: Callable[..., Tensors], *arguments: Any) -> tuple[Tensor, ...]:
        *arrays, text = arguments
        x, found = arrays[op.x], function(pair, _from_text(op.spec_type, text), arrays)
        return tuple(x.new_empty(0, dtype=torch.bool) if y is None else y for y in found)

    operator = torch.library.custom_op(
        f"cunorm::{pair.name}_{direction}",
        partial(run, partial(_own_outputs, op)),
        mutates_args=(),
        schema=f"({', '.join(inputs)}, str spec) -> ({outputs})",
    )
    operator.register_fake(partial(run, partial(_fake, op)))
    operator.register_vmap(partial(_run_batch, pair, op, operator))
    return operator


def _own_outputs(op: OpDef[Any], pair: OpPair, spec: OpSpec, arrays: Tensors) -> Tensors:
    """Return outputs with the promised strides, None for absent ones and for x or dx again."""
    arrays = [*map(unwrapped, arrays)]
    x: Any = arrays[op.x]
    first, *others = pair.run(op, spec, arrays)
    if first is not None:
        promised = _empty_like(pair, x, dtype=first.dtype, device="meta").stride()
        if first.stride() != promised:
            first = _empty_like(pair, x, dtype=first.dtype).copy_(first)
    return [first, *(None if output is x or output is first else output for output in others)]


def present(outputs: Sequence[Tensor]) -> list[Operand]:
    """Return what an operator returned, with None for what is absent."""
    return [None if output.dtype == torch.bool else output for output in outputs]


@assume_constant
def forward_text(name: str, *params: object) -> str:
    """Return the spec of the forward of the pair of a name that returns statistics, too."""
    spec = saving(parse(OPERATORS[name].pair.forward, params))
    return _to_text(spec)  # type: ignore[no-any-return]


@memoize()
def saving(spec: ForwardSpec) -> ForwardSpec:
    """Return the spec of a forward that also returns statistics."""
    return replace(spec, saves=True)


# --- fake tensors ---------------------------------------------------------------------------------


def _empty_like(pair: OpPair, x: Tensor, **options: Any) -> Tensor:
    """Return an empty tensor that lies as outputs of x's shape do."""
    layout = torch.contiguous_format if pair.is_rows else torch.preserve_format
    return torch.empty_like(x, memory_format=layout, **options)


def _fake(op: OpDef[Any], pair: OpPair, spec: OpSpec, arrays: Tensors) -> Tensors:
    """Return outputs without memory; operands on meta are checked as on any device."""
    if any(type(array) in PLAIN_TYPES and array.is_meta for array in arrays if array is not None):
        specs = map(partial(_spec_of, spec.function), op.inputs, arrays)
        op.plan(spec, (*specs, *op.no_outputs))
    return _fake_outputs(op, pair, spec, arrays)


def _spec_of(function: str, name: str, array: Operand) -> TensorSpec | None:
    if array is None:
        return None
    dtype = parse_dtype(function, name, array.dtype)
    device = Device(array.device.type, array.device.index or 0)
    return TensorSpec(tuple(array.shape), array.stride(), dtype, device)


def _fake_outputs(op: OpDef[Any], pair: OpPair, spec: Any, arrays: Tensors) -> Tensors:
    """Return outputs without memory: the plan's rules give their dtypes, x and operands shapes."""
    operands: dict[str, Any] = {
        slot.name: array for slot, array in zip(op.input_slots, arrays, strict=True)
    }
    x, names = operands["x"], [slot.name for slot in op.result_slots]
    dtypes = spec.result_dtypes(
        dict.fromkeys(names)
        | {
            name: None if array is None else parse_dtype(spec.function, name, array.dtype)
            for name, array in operands.items()
        }
    )

    def fake(slot: Slot) -> Operand:
        if slot.name not in dtypes:
            return None
        dtype = TORCH_DTYPES[dtypes[slot.name]]
        if slot.kind is Kind.LIKE_X:
            return _empty_like(pair, x, dtype=dtype)
        is_gradient = slot.kind is Kind.PARAMETER
        shape = operands[slot.name[1:]].shape if is_gradient else spec.statistics_shape(x.shape)
        return x.new_empty(shape, dtype=dtype)

    return [fake(slot) for slot in op.result_slots]


# --- gradients ------------------------------------------------------------------------------------


def run_backward(
    pair: OpPair, operator: Operator, spec: BackwardSpec, arrays: Tensors
) -> list[Operand]:
    """Return the outputs of a backward, by its operator."""
    outputs = present(operator(*arrays, _to_text(spec)))
    if pair.is_rows and outputs[-1] is None:
        outputs[-1] = outputs[0]  # dx is dresidual, too
    return outputs


def _save(pair: OpPair, ctx: Context, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    *arrays, text = inputs
    has_two = pair.is_rows and pair.has_stream_gradient(ctx.needs_input_grad)
    ctx.mark_non_differentiable(*output[2 if has_two else 1 :])
    pair.save(ctx, _from_text(pair.forward.spec_type, text), arrays, present(output))


def _gradients(
    pair: OpPair, operator: Operator | None, ctx: Context, dy: Operand, *others: Operand
) -> Tensors:
    wanted, dresidual_out = tuple(ctx.needs_input_grad[:-1]), others[0] if pair.is_rows else None
    run = operator and partial(run_backward, pair, operator)
    return (*pair.gradients(ctx, wanted, dy, dresidual_out, run), None)


def _eager_gradients(
    pair: OpPair, operator: Operator, ctx: Context, *gradients: Operand
) -> Tensors:
    """Return gradients, by the formula where autograd, not torch.func, may differentiate again."""
    is_recorded = torch.is_grad_enabled() and not is_transforming()
    return _gradients(pair, None if is_recorded else operator, ctx, *gradients)


def _transformable(
    operator: Operator, save: Callable[..., None], gradients: Callable[..., Tensors]
) -> Operator:
    """Return an operator as a Function that torch.func transforms.

    It refuses the Function that `register_autograd` makes, as that has no `setup_context`.
    """

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = True  # by the rules of the operators
        setup_context = staticmethod(save)
        backward = staticmethod(gradients)

        @staticmethod
        def forward(*arguments: Any) -> tuple[Tensor, ...]:
            return operator(*arguments)

    return Transformed.apply


def _refuse(*_: object) -> Tensors:
    raise RuntimeError(
        "cunorm.torch has no second derivatives under torch.func, only through "
        "torch.autograd.grad(..., create_graph=True)"
    )


# --- batches --------------------------------------------------------------------------------------


def _run_batch(
    pair: OpPair,
    op: OpDef[Any],
    operator: Operator,
    info: Any,
    dims: Sequence[int | None],
    *arguments: Any,
) -> Batched:
    """Run a batch of calls as one call with more rows or samples; if it cannot, one by one.

    It cannot where the calls have different parameters, or return sums over their own rows.
    """
    *arrays, text = arguments
    batch, kinds = info.batch_size, op.kinds[: len(arrays)]
    have_own = any(
        isinstance(dim, int) and kind is Kind.PARAMETER
        for dim, kind in zip(dims[: len(arrays)], kinds, strict=True)
    )
    if have_own or any(name in _from_text(op.spec_type, text).needs for name in op.summed):
        return _run_items(operator, batch, dims, arguments)

    samples = arrays[op.x].shape[int(dims[op.x] == 0)]

    def merged(array: Operand, dim: int | None, kind: Kind) -> Operand:
        if array is None or kind is Kind.PARAMETER:
            return array
        array = array.movedim(dim, 0) if isinstance(dim, int) else array.expand(batch, *array.shape)
        return array if pair.is_rows else array.flatten(0, 1)

    def parted(output: Tensor) -> Tensor:
        if output.dtype == torch.bool:
            return output.new_empty(batch, 0)
        return output if pair.is_rows else output.unflatten(0, (batch, samples))

    inputs = map(merged, arrays, dims[: len(arrays)], kinds)
    outputs = operator(*inputs, _merged_text(op.spec_type, text))
    return tuple(map(parted, outputs)), (0,) * len(outputs)


@memoize()
def _merged_text(spec_type: type, text: str) -> str:
    """Return the spec of a call whose rows have one more axis in front, or more samples."""
    spec = _from_text(spec_type, text)
    axis = getattr(spec, "axis", -1)
    return text if axis < 0 else spec_to_json(replace(spec, axis=axis + 1))


def _run_items(
    operator: Operator, batch: int, dims: Sequence[int | None], arguments: Sequence[Any]
) -> Batched:
    """Call an operator for each item of a batch."""

    def item_of(index: int) -> list[Any]:
        batched = zip(arguments, dims, strict=True)
        return [_item(a, dim, index) if isinstance(dim, int) else a for a, dim in batched]

    calls = [operator(*item_of(index)) for index in range(max(batch, 1))]
    outputs = tuple(torch.stack(items)[:batch] for items in zip(*calls, strict=True))
    return outputs, (0,) * len(outputs)


def _item(items: Tensor, dim: int, index: int) -> Tensor:
    """Return an item of a batch; of an empty batch zeros, whose results have an item's shapes."""
    shape = (*items.shape[:dim], *items.shape[dim + 1 :])
    return items.select(dim, index) if items.shape[dim] else items.new_zeros(shape)


OPERATORS = {pair.name: Operators(pair) for pair in (ROW, GROUP)}
