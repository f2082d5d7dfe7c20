# SPDX-License-Identifier: MIT
"""OpPair: a forward and its backward, with all in which the families differ for torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch

from cunorm._core.dtypes import DType, parse_dtype
from cunorm._core.memo import memoize
from cunorm._core.plan import OpDef
from cunorm._dispatch import dispatch_spec
from cunorm._group_norm import ops as group_ops
from cunorm._group_norm.spec import backward_spec as group_backward_spec
from cunorm._row_norm import ops as row_ops
from cunorm._row_norm.spec import backward_spec as row_backward_spec
from cunorm.torch._formula import compute_type, group_formula, row_formula

Tensors = Sequence[Any]  # some of which may be None

_GRADIENTS = ("dy", "d_residual")  # inputs of a backward: the gradients of y and of the new stream


class OpPair(ABC):
    """A forward and its backward.

    The first output of a forward is y, the second one of a row norm's the new residual stream.
    """

    memory_format: torch.memory_format  # of outputs of x's shape
    formula: Callable[..., Any]  # returns y in torch's operations

    def __init__(self, name: str, forward: OpDef, backward: OpDef) -> None:
        self.name, self.forward, self.backward = name, forward, backward
        self.has_stream = "residual" in forward.outputs
        self.operands = tuple(name[1:] for name in backward.outputs)  # whose gradients those are
        self.saved = tuple(name for name in backward.inputs if name not in _GRADIENTS)  # x first
        arrays = (*forward.inputs, *forward.outputs)
        self.no_outputs = (None,) * (len(forward.outputs) + 1)
        self._pick_saved = itemgetter(*map(arrays.index, self.saved[1:]))
        self._gradients = tuple(map(backward.inputs.index, _GRADIENTS[: 1 + self.has_stream]))

    @abstractmethod
    def backward_spec(self, spec: Any, x_dtype: DType, needs: tuple[str, ...]) -> Any:
        """Return the spec of the backward of a forward."""

    @abstractmethod
    def fake_outputs(self, spec: Any, arrays: Tensors) -> list[Any]:
        """Return empty tensors like the outputs of a forward, None for absent ones."""

    @abstractmethod
    def merged_spec(self, spec: Any) -> Any:
        """Return the spec of one call for a batch of calls, whose operands are `merged`."""

    def merged(self, array: Any) -> Any:
        """Return an operand of that call: `array` has the batch as its first axis."""
        return array

    def parted(self, output: Any, batch: int) -> Any:
        """Return an output of that call with the batch as its first axis."""
        return output

    def like(self, x: Any, **options: Any) -> Any:
        """Return an empty tensor as outputs of x's shape are."""
        return torch.empty_like(x, memory_format=self.memory_format, **options)

    def save(self, ctx: Any, spec: Any, arrays: Tensors, outputs: Tensors) -> None:
        """Keep what a backward needs of a forward: what was normalised is its stream, or x."""
        stream = outputs[1] if self.has_stream else None
        ctx.spec, ctx.x_dtype = spec, arrays[0].dtype
        ctx.set_materialize_grads(False)
        normalised = arrays[0] if stream is None else stream
        ctx.save_for_backward(normalised, *self._pick_saved((*arrays, *outputs)))

    def gradients(
        self, run: Callable[..., Any], ctx: Any, wanted: tuple[bool, ...], dy: Any, d_residual: Any
    ) -> dict[str, Any]:
        """Return the gradients of inputs by name; `run` takes an OpSpec and a backward's inputs."""
        if dy is None:
            of_x = None if d_residual is None else d_residual.to(ctx.x_dtype)
            return {"x": of_x, "residual": d_residual}
        arrays = [*ctx.saved_tensors]
        for place, gradient in zip(self._gradients, (dy, d_residual), strict=False):
            arrays.insert(place, gradient)
        spec = _spec_of_gradients(self, ctx.spec, ctx.x_dtype, wanted)
        return dict(zip(self.operands, run(spec, arrays), strict=True))

    def in_order(self, gradients: dict[str, Any], wanted: tuple[bool, ...]) -> list[Any]:
        """Return the wanted gradients, in the order of a forward's inputs."""
        both = zip(self.forward.inputs, wanted, strict=True)
        return [gradients.get(name) if want else None for name, want in both]

    def run(self, op: OpDef, spec: Any, arrays: Tensors) -> list[Any]:
        """Return the outputs of the forward or the backward; gradients may be negated views."""
        plain = [*arrays, *(None,) * (len(op.outputs) + 1)]
        for place in self._gradients if op is self.backward else ():
            if plain[place] is not None and plain[place].is_neg():
                plain[place] = plain[place].resolve_neg()
        return dispatch_spec(op, spec, tuple(plain))

    def fake_gradients(self, spec: Any, arrays: Tensors) -> list[Any]:
        """Return empty tensors like the outputs of the backward, None for absent ones."""
        named = dict(zip(self.backward.inputs, arrays, strict=True))
        x = named["x"]
        x_dtype = torch_dtype(spec.x_dtype) if self.has_stream else x.dtype
        dtypes = {name: None if one is None else one.dtype for name, one in named.items()}
        dtypes |= {"x": x_dtype, "residual": None if x_dtype == x.dtype else x.dtype}

        def fake(name: str) -> Any:
            dtype, is_needed = dtypes[name], name.replace("residual", "x") in spec.needs
            if dtype is None or not is_needed:
                return None
            if name in self.backward.parameters:
                return x.new_empty(named[name].shape, dtype=dtype)
            return self.like(x, dtype=dtype)

        return [fake(name) for name in self.operands]


@memoize()
def _spec_of_gradients(
    pair: OpPair, spec: Any, x_dtype: torch.dtype, wanted: tuple[bool, ...]
) -> Any:
    """Return the spec of a backward that computes the wanted gradients of a forward's inputs."""
    named = zip(pair.forward.inputs, wanted, strict=True)
    wanted_names = {name.replace("residual", "x") for name, want in named if want}
    needs = tuple(name for name in pair.operands if name in wanted_names)
    return pair.backward_spec(spec, parse_dtype(spec.function, "x", x_dtype), needs)


class _RowPair(OpPair):
    memory_format = torch.contiguous_format
    formula = staticmethod(row_formula)

    def backward_spec(self, spec: Any, x_dtype: DType, needs: tuple[str, ...]) -> Any:
        return row_backward_spec(spec, x_dtype, needs)

    def fake_outputs(self, spec: Any, arrays: Tensors) -> list[Any]:
        x, residual, _, weight, _ = arrays
        dtype = torch_dtype(spec.dtype)
        if dtype is None and spec.rounds_row and weight is not None:
            dtype = torch.promote_types(x.dtype, weight.dtype)
        stream = torch_dtype(spec.residual_dtype) if residual is None else residual.dtype
        has_new = residual is not None or stream not in (None, x.dtype)
        shape = (*x.shape[: spec.axis], *([spec.groups] if spec.groups > 1 else []))
        mean, rstd = (x.new_empty(shape, dtype=compute_type(x.dtype, stream)) for _ in range(2))
        return [
            self.like(x, dtype=dtype),
            self.like(x, dtype=stream) if has_new else None,
            mean if spec.center else None,
            rstd,
        ]

    def merged_spec(self, spec: Any) -> Any:
        return spec if spec.axis < 0 else replace(spec, axis=spec.axis + 1)


class _GroupPair(OpPair):
    memory_format = torch.preserve_format
    formula = staticmethod(group_formula)

    def backward_spec(self, spec: Any, x_dtype: DType, needs: tuple[str, ...]) -> Any:
        return group_backward_spec(spec, needs)

    def fake_outputs(self, spec: Any, arrays: Tensors) -> list[Any]:
        x = arrays[0]
        groups = x.shape[spec.channel_axis] if spec.num_groups is None else spec.num_groups
        shape = (x.shape[0], groups)
        mean, rstd = (x.new_empty(shape, dtype=compute_type(x.dtype)) for _ in range(2))
        return [self.like(x, dtype=torch_dtype(spec.dtype)), mean, rstd]

    def merged_spec(self, spec: Any) -> Any:
        return spec

    def merged(self, array: Any) -> Any:
        return array.flatten(0, 1)

    def parted(self, output: Any, batch: int) -> Any:
        return output.unflatten(0, (batch, -1))


def torch_dtype(dtype: DType | None) -> torch.dtype | None:
    """Return torch's own of a dtype."""
    return None if dtype is None else getattr(torch, dtype.name)


ROW = _RowPair("row_norm", row_ops.ROW_FORWARD, row_ops.ROW_BACKWARD)
GROUP = _GroupPair("group_norm", group_ops.GROUP_FORWARD, group_ops.GROUP_BACKWARD)
