# SPDX-License-Identifier: MIT
"""A call of an operator, as an object for JAX's transformations and as text in executables."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

from jax import Array, ShapeDtypeStruct

from cunorm._core.dtypes import DTYPES, dtype_of
from cunorm._core.memo import memoize
from cunorm._core.plan import OpDef, OpSpec, Plan, SpecT, spec_from_json, spec_to_json
from cunorm._core.tensor import CPU, Device, OptionalSpecs, TensorSpec, contiguous
from cunorm._group_norm.plan import GROUP_BACKWARD, GROUP_FORWARD, GROUP_JVP
from cunorm._row_norm.combine_plan import COMBINE_MOMENTS
from cunorm._row_norm.jvp_plan import ROW_JVP, ROW_SECOND
from cunorm._row_norm.plan import ROW_BACKWARD, ROW_FORWARD
from cunorm._row_norm.quantized_plan import ROW_QUANTIZED
from cunorm._row_norm.spec import RowNormSpec
from cunorm._row_norm.split_plan import ROW_GIVEN, ROW_GIVEN_SUMS, ROW_MOMENTS, ROW_SUMS

Arrays = tuple[Array, ...]
OptionalArrays = Sequence[Array | None]
Picker = Callable[[tuple[Any, ...]], tuple[Any, ...]]

_OF_SPLIT_ROWS = (ROW_MOMENTS, COMBINE_MOMENTS, ROW_GIVEN, ROW_SUMS, ROW_GIVEN_SUMS)
_OF_ROWS = (ROW_FORWARD, ROW_BACKWARD, ROW_JVP, ROW_SECOND, ROW_QUANTIZED, *_OF_SPLIT_ROWS)
_OPS = {op.name: op for op in (*_OF_ROWS, GROUP_FORWARD, GROUP_BACKWARD, GROUP_JVP)}


class Call(NamedTuple):
    """A call without its memory; equal calls do the same work."""

    op: OpDef[Any]
    spec: Any  # an OpSpec
    inputs: OptionalSpecs  # contiguous, like XLA's arrays; None if absent

    @classmethod
    def on(
        cls, op: OpDef[SpecT], spec: SpecT, arrays: Sequence[Array | ShapeDtypeStruct | None]
    ) -> "Call":
        """Return a call on arrays, traced or not, of which only the shapes and dtypes are read."""
        named = zip(op.inputs, arrays, strict=True)
        inputs = [one if one is None else _describe(spec, name, one) for name, one in named]
        return cls(op, spec, tuple(inputs))

    @property
    @memoize()
    def plan(self) -> Plan:
        op = self.op
        return op.plan(self.spec, (*self.inputs, *op.no_outputs))

    @property
    def is_empty(self) -> bool:
        """Return whether no kernel runs, because outputs are empty or sums over no rows."""
        x = self.inputs[self.op.x]
        return bool(self.plan.is_empty) or (x is not None and 0 in x.shape)

    def output_picker(self) -> Picker:
        """Return a picker of all outputs from (None, *inputs, *outputs of `plan`)."""
        op, plan, shared = self.op, self.plan, dict(self.plan.shared)
        sources = (*range(op.first_output), *(slot for slot, _ in plan.outputs))
        slots = range(op.first_output, op.array_count - 1)
        return picker(sources, (shared.get(slot, slot) for slot in slots))

    def text(self) -> str:
        """Return the call as text that has the same meaning in every process."""
        named = zip(self.op.inputs, self.inputs, strict=True)
        inputs = {name: (one.shape, one.dtype.name) for name, one in named if one is not None}
        return json.dumps([self.op.name, json.loads(spec_to_json(self.spec)), inputs])

    @staticmethod
    def parse(text: bytes, device: Device = CPU) -> "Call":
        name, spec, inputs = json.loads(text)[-3:]  # texts of earlier versions have four parts
        op = _OPS[name]
        spec = spec_from_json(op.spec_type, json.dumps(spec))  # this checks the version of the text
        given = map(inputs.get, op.inputs)
        specs = [one and contiguous(tuple(one[0]), DTYPES[one[1]], device) for one in given]
        return Call(op, spec, tuple(specs))


@memoize()
def replace_interned(spec: Any, **fields: object) -> Any:
    """Return an OpSpec with new values of some fields; equal arguments give the same object."""
    return replace(spec, **fields)


def gates_branch(spec: object) -> bool:
    """Return whether the call has a gate of the branch, the x that is added to the stream."""
    return isinstance(spec, RowNormSpec) and spec.gate_position == "branch"


def _describe(spec: OpSpec, name: str, array: Array | ShapeDtypeStruct) -> TensorSpec:
    if not all(isinstance(size, int) for size in array.shape):
        raise TypeError(
            f"{spec.function}: {name} has shape {array.shape}, expected sizes that are known: "
            "export the function for each of the shapes"
        )
    return contiguous(array.shape, dtype_of(spec.function, name, array.dtype), CPU)


def picker(sources: Iterable[int], slots: Iterable[int]) -> Picker:
    """Return a function that picks the array of each slot from a tuple.

    The tuple begins with a stand-in for absent arrays; then come the arrays of the source slots.
    """
    ranks = {source: rank for rank, source in enumerate(sources, 1)}
    first, *others = [ranks.get(slot, 0) for slot in slots]
    # An itemgetter of one item returns no tuple.
    return itemgetter(first, *others) if others else lambda arrays: (arrays[first],)
