# SPDX-License-Identifier: MIT
"""Norms as operators of torch's dispatcher, for torch.compile, torch.func and modes.

An operator takes the inputs of an OpDef, and its OpSpec as JSON. It returns none of its inputs. An
absent output is an empty tensor of bools.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef  # type: ignore[attr-defined]

from cunorm._arrays._torch_private import assume_constant
from cunorm._arrays.torch import PLAIN_TYPES, torch_dtype
from cunorm._core.dtypes import parse_dtype
from cunorm._core.memo import memoize
from cunorm._core.operands import Kind, Slot, dtypes_of
from cunorm._core.plan import OpDef, OpSpec, spec_from_json, spec_to_json
from cunorm._core.tensor import Device, TensorSpec
from cunorm._dispatch import dispatch_spec, parse
from cunorm._row_norm.quantized_plan import ROW_QUANTIZED
from cunorm._row_norm.spec import RowNormSpec
from cunorm.torch._pair import Operand, Tensors
from cunorm.torch._tensors import unwrapped
from cunorm.torch._vmap import RowBatch, SampleBatch

Run = Callable[..., tuple[Tensor, ...]]
Batched = tuple[Any, Any]  # outputs, and their batch axes

to_text = memoize()(spec_to_json)
from_text = memoize()(spec_from_json)


class Operator:
    """An operator of torch's dispatcher, which makes the calls of an OpDef."""

    def __init__(self, name: str, op: OpDef[Any]) -> None:
        self.op, self._is_rows = op, issubclass(op.spec_type, RowNormSpec)
        inputs = [
            f"Tensor{'' if one.is_required else '?'} {one.argument}" for one in op.input_slots
        ]
        outputs = ", ".join(["Tensor"] * len(op.outputs))
        self.call: CustomOpDef = torch.library.custom_op(
            f"cunorm::{name}",
            partial(self._call, self._own_outputs),
            mutates_args=(),
            schema=f"({', '.join(inputs)}, str spec) -> ({outputs})",
        )
        self.call.register_fake(partial(self._call, self._fake_outputs))
        self.call.register_vmap(self._batch)

    def run(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Call the operator and return its outputs as a tuple."""
        found: Any = self.call(*arguments)
        return found if isinstance(found, tuple) else (found,)

    def _call(self, function: Callable[..., Tensors], *arguments: Any) -> Any:
        *arrays, text = arguments
        x, found = arrays[self.op.x], function(from_text(self.op.spec_type, text), arrays)
        outputs = tuple(x.new_empty(0, dtype=torch.bool) if y is None else y for y in found)
        return outputs if len(outputs) > 1 else outputs[0]

    def _own_outputs(self, spec: OpSpec, arrays: Tensors) -> Tensors:
        """Return outputs with the strides that `_fake_outputs` gives them.

        Return None for an output that is absent, is x, or is the first output again.
        """
        arrays = [*map(unwrapped, arrays)]
        x: Any = arrays[self.op.x]
        found = dispatch_spec(self.op, spec, (*arrays, *self.op.no_outputs, None))
        promised = self._empty_like(spec, x, device="meta").stride()

        def own(slot: Slot, output: Tensor) -> Tensor:
            if slot.kind is not Kind.LIKE_X or output.shape != x.shape:
                return output.contiguous()
            if output.stride() == promised:
                return output
            return self._empty_like(spec, x, dtype=output.dtype).copy_(output)

        outputs = zip(self.op.result_slots, found, strict=True)
        return [
            None if one is None or one is x or (number and one is found[0]) else own(slot, one)
            for number, (slot, one) in enumerate(outputs)
        ]

    def _empty_like(self, spec: Any, x: Tensor, **options: Any) -> Tensor:
        """Return an empty tensor with the memory layout of outputs that have x's shape."""
        is_contiguous = self._is_rows and not isinstance(getattr(spec, "axis", None), tuple)
        layout = torch.contiguous_format if is_contiguous else torch.preserve_format
        return torch.empty_like(x, memory_format=layout, **options)

    def _fake_outputs(self, spec: Any, arrays: Tensors) -> Tensors:
        """Return outputs without memory; operands on meta are checked as on any other device."""
        op = self.op
        named = zip(op.input_slots, arrays, strict=True)
        operands: dict[str, Any] = {slot.name: array for slot, array in named}
        specs = {
            slot.name: _spec_of(spec.function, slot.argument, operands[slot.name])
            for slot in op.input_slots
        }
        given = [array for array in arrays if array is not None]
        if any(type(array) in PLAIN_TYPES and array.is_meta for array in given):
            op.plan(spec, (*specs.values(), *op.no_outputs))
        if self._is_rows:
            spec.check_options(defaultdict(type(None), specs))
        results = dict.fromkeys(slot.name for slot in op.result_slots)
        x, dtypes = operands["x"], spec.result_dtypes({**results, **dtypes_of(specs)})

        def fake(slot: Slot) -> Operand:
            if slot.name not in dtypes:
                return None
            dtype, like = torch_dtype(dtypes[slot.name]), operands.get(slot.name[1:], x)
            if slot.kind is Kind.STATISTIC:
                return x.new_empty(spec.statistics_shape(x.shape), dtype=dtype)
            if slot.kind is Kind.SCALE:
                return x.new_empty(spec.scale_shape(x.shape), dtype=dtype)
            if slot.kind is not Kind.LIKE_X or like.shape != x.shape:
                return x.new_empty(like.shape, dtype=dtype)
            return self._empty_like(spec, x, dtype=dtype)

        return [fake(slot) for slot in op.result_slots]

    def _batch(self, info: Any, dims: Sequence[int | None], *arguments: Any) -> Batched:
        """Run a batch of calls as one call with more rows or samples.

        Group norms whose sums are wanted run one by one, unless each sample has its parameters.
        """
        *arrays, text = arguments
        spec, dims = from_text(self.op.spec_type, text), dims[: len(arrays)]
        kind = RowBatch if self._is_rows else SampleBatch
        batch = kind(self.op, spec, info.batch_size, dims, arrays)
        if batch.is_one_call():
            with suppress(ValueError):  # `_items` raises the error of an item
                outputs = self.run(*batch.inputs(), _merged_text(self.op.spec_type, text))
                return self._along_0(batch.outputs(outputs))
        return self._along_0(self._items(info.batch_size, dims, arrays, text))

    def _along_0(self, outputs: tuple[Tensor, ...]) -> Batched:
        """Return outputs with the axis of the batch; an operator of one output has no tuple."""
        return (outputs, (0,) * len(outputs)) if len(outputs) > 1 else (outputs[0], 0)

    def _items(
        self, batch: int, dims: Sequence[int | None], arrays: Tensors, text: str
    ) -> tuple[Tensor, ...]:
        """Call the operator for each item of a batch; for an empty batch, call it once on zeros."""

        def item(array: Any, dim: int | None, index: int) -> Operand:
            if not isinstance(dim, int):
                return array
            shape = (*array.shape[:dim], *array.shape[dim + 1 :])
            return array.select(dim, index) if batch else array.new_zeros(shape)

        calls = [
            self.run(*(item(*one, index) for one in zip(arrays, dims, strict=True)), text)
            for index in range(max(batch, 1))
        ]
        return tuple(torch.stack(items)[:batch] for items in zip(*calls, strict=True))


def _spec_of(function: str, name: str, array: Operand) -> TensorSpec | None:
    if array is None:
        return None
    dtype = parse_dtype(function, name, array.dtype)
    device = Device(array.device.type, array.device.index or 0)
    return TensorSpec(tuple(array.shape), array.stride(), dtype, device)


@memoize()
def _merged_text(spec_type: type, text: str) -> str:
    """Return the spec of a merged call as text; in row norms, the batch is a new first axis."""
    spec = from_text(spec_type, text)
    axis = getattr(spec, "axis", -1)
    if isinstance(axis, tuple):
        moved: Any = tuple(one if one < 0 else one + 1 for one in axis)
    else:
        moved = axis if axis < 0 else axis + 1
    return text if moved == axis else spec_to_json(replace(spec, axis=moved))


def present(outputs: Sequence[Tensor]) -> list[Operand]:
    """Return an operator's outputs, with None for absent outputs."""
    return [None if output.dtype == torch.bool else output for output in outputs]


QUANTIZED = Operator(ROW_QUANTIZED.name, ROW_QUANTIZED).call


@assume_constant
def quantized_text(*params: object) -> str:
    """Return the spec, as text, of a row norm with a quantised result."""
    return to_text(parse(ROW_QUANTIZED, params))
