# SPDX-License-Identifier: MIT
"""A batch of calls by torch.func.vmap as one call with more rows, or with more samples."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from cunorm._core.operands import Kind
from cunorm._core.plan import OpDef
from cunorm._row_norm.order import full_shape
from cunorm.torch._pair import Operand, Tensors

Dims = Sequence[int | None]  # for each operand: the axis of the batch, None if all items share it


class RowBatch:
    """A batch of row norms: the batch is a new first axis of x, and all operands are views."""

    def __init__(self, op: OpDef[Any], spec: Any, batch: int, dims: Dims, arrays: Tensors) -> None:
        self.op, self.spec, self.batch, self.axis = op, spec, batch, getattr(spec, "axis", 1)
        self.given = [*zip(op.input_slots, arrays, dims, strict=True)]
        self.shapes = {
            slot.name: _item_shape(array, dim)
            for slot, array, dim in self.given
            if array is not None
        }
        self.of_x = self.shapes["x"]
        self.needs = getattr(spec, "needs", ())
        # The operands whose shapes need not be x's: weight, bias and the gate of a branch.
        has_branch = getattr(spec, "gate_position", "") == "branch"
        named = [slot.name for slot in op.input_slots if slot.kind is Kind.PARAMETER]
        self.parameters = {*named, *(["gate"] if has_branch else [])}
        self.scales = {slot.name for slot in op.input_slots if slot.kind is Kind.SCALE}

    def is_one_call(self) -> bool:
        """Return whether one call has the results of the items, unless it is an error."""
        ndim, given = len(self.of_x), (self.parameters | self.scales) & self.shapes.keys()
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        are_axes = all(-ndim <= axis < ndim for axis in axes)
        return are_axes and all(self._fits(name, self.shapes[name]) for name in given)

    def _fits(self, name: str, shape: tuple[int, ...]) -> bool:
        if name in self.scales:
            return prod(shape) == 1 or shape == self.spec.scale_shape(self.of_x)
        return len(shape) <= len(self.of_x)

    def inputs(self) -> list[Operand]:
        """Return the operands of the one call."""
        return [a if a is None else self._input(slot.name, a, dim) for slot, a, dim in self.given]

    def _input(self, name: str, array: Tensor, dim: int | None) -> Tensor:
        if dim is None and self._stays(name):
            return array
        moved = array.expand(self.batch, *array.shape) if dim is None else array.movedim(dim, 0)
        if name in self.scales:
            return self._scale(moved)
        return self._parameter(name, moved) if name in self.parameters else self._merged(moved)

    def _stays(self, name: str) -> bool:
        """Return whether the one call has the operand that all items share."""
        if name in self.scales:
            return prod(self.shapes[name]) == 1
        return name in self.parameters and name not in self.needs

    def _parameter(self, name: str, array: Tensor) -> Tensor:
        shape = full_shape(self.axis, len(self.of_x), self.shapes[name])
        return array.reshape(self.batch, *shape)

    def _scale(self, array: Tensor) -> Tensor:
        """Return a scale for each row of the batch; an item may have one number for its rows."""
        if array.numel() == self.batch:
            array = array.reshape(self.batch, *[1] * len(self.of_x))
        return array.expand(self.batch, *self.spec.scale_shape(self.of_x))

    def outputs(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs of the batch, from those of the one call."""
        found = zip(self.op.result_slots, outputs, strict=True)
        return tuple(self._output(slot.name, output) for slot, output in found)

    def _output(self, name: str, output: Tensor) -> Tensor:
        if output.dtype == torch.bool:
            return output.new_empty(self.batch, 0)
        if name[1:] in self.parameters:
            return output.reshape(self.batch, *self.shapes[name[1:]])
        return self._parted(output)

    def _merged(self, array: Tensor) -> Tensor:
        return array

    def _parted(self, output: Tensor) -> Tensor:
        return output


class SampleBatch(RowBatch):
    """A batch of group norms: the samples of all items are the samples of one call."""

    def _fits(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether each sample may have a parameter of its own, even if its sum is wanted."""
        samples = self.of_x[0]
        if shape[:-1] in ((), (1,)):
            return len(shape) > 0 and (samples == 1 or name not in self.needs)
        return shape[:-1] == (samples,)

    def _stays(self, name: str) -> bool:
        return super()._stays(name) and self.shapes[name][:-1] in ((), (1,))

    def _parameter(self, name: str, array: Tensor) -> Tensor:
        array = array[:, None] if len(self.shapes[name]) == 1 else array
        return self._merged(array.expand(self.batch, self.of_x[0], array.shape[-1]))

    def _merged(self, array: Tensor) -> Tensor:
        return array.flatten(0, 1)

    def _parted(self, output: Tensor) -> Tensor:
        return output.unflatten(0, (self.batch, self.of_x[0]))


def _item_shape(array: Tensor, dim: int | None) -> tuple[int, ...]:
    """Return the shape that an operand has in the call of an item."""
    shape = tuple(array.shape)
    return shape if dim is None else shape[:dim] + shape[dim + 1 :]
