# SPDX-License-Identifier: MIT
"""A call of an operator, as JAX's transformations carry it and as executables keep it: as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

from cunorm._core.dtypes import DTYPES, dtype_of
from cunorm._core.memo import memoize
from cunorm._core.plan import OpDef, Plan, spec_from_json, spec_to_json
from cunorm._core.tensor import CPU, Device, OptionalSpecs, TensorSpec, contiguous
from cunorm._group_norm.ops import GROUP_BACKWARD, GROUP_FORWARD
from cunorm._row_norm.ops import ROW_BACKWARD, ROW_FORWARD

Picker = Callable[[tuple[Any, ...]], tuple[Any, ...]]

_VERSION = 2  # of the text
_OPS = {op.name: op for op in (ROW_FORWARD, ROW_BACKWARD, GROUP_FORWARD, GROUP_BACKWARD)}


class Call(NamedTuple):
    """A call but for its memory; equal calls do the same.

    Attributes
    ----------
    op : OpDef
        The operator.
    spec : OpSpec
        Its scalars.
    inputs : tuple
        The specs of its inputs, which are contiguous as all of XLA's arrays; None is absent.
    """

    op: OpDef
    spec: Any
    inputs: OptionalSpecs

    @classmethod
    def of(cls, op: OpDef, spec: Any, arrays: Sequence[Any]) -> Call:
        """Return a call on arrays, traced or not; a dtype that no kernel reads is an error."""
        facts = [None if array is None else (array.shape, array.dtype) for array in arrays]
        return cls.of_facts(op, spec, facts)

    @classmethod
    def of_facts(cls, op: OpDef, spec: Any, facts: Sequence[Any]) -> Call:
        """Return the same, for the shape and dtype of each array, None where it is absent."""
        function, named = spec.function, zip(op.inputs, facts, strict=True)
        inputs = [None if one is None else _describe(function, name, *one) for name, one in named]
        return cls(op, spec, tuple(inputs))

    @property
    def plan(self) -> Plan:
        """Return the plan; wrong input is the error that the plain function raises."""
        plan: Plan = _plan(self)
        return plan

    @property
    def is_empty(self) -> bool:
        """Whether no kernel runs: outputs are empty, or sums over no rows."""
        x = self.inputs[self.op.x]
        return self.plan.is_empty or (x is not None and 0 in x.shape)

    def output_picker(self) -> Picker:
        """Return the picker of all outputs, of None, all inputs and the outputs to allocate."""
        op, plan, shared = self.op, self.plan, dict(self.plan.shared)
        sources = (*range(op.first_output), *(place for place, _ in plan.outputs))
        places = range(op.first_output, op.array_count - 1)
        return picker(sources, (shared.get(place, place) for place in places))

    def text(self) -> str:
        """Return this as text, which means the same to any process of any time."""
        inputs = [None if one is None else (one.shape, one.dtype.name) for one in self.inputs]
        return json.dumps([_VERSION, self.op.name, json.loads(spec_to_json(self.spec)), inputs])

    @staticmethod
    def parse(text: bytes, device: Device = CPU) -> Call:
        """Return the call of a text, on arrays of a device."""
        version, *rest = json.loads(text)
        if version != _VERSION:
            raise ValueError(
                f"cunorm.jax: an executable of text version {version}, expected {_VERSION}: "
                "compile it again with this version of cunorm"
            )
        name, spec, inputs = rest
        op = _OPS[name]
        specs = [one and contiguous(tuple(one[0]), DTYPES[one[1]], device) for one in inputs]
        return Call(op, spec_from_json(op.spec_type, json.dumps(spec)), tuple(specs))


@memoize()
def _plan(call: Call) -> Plan:
    op = call.op
    return op.plan(call.spec, (*call.inputs, *[None] * len(op.outputs)))


@memoize()
def changed(spec: Any, **fields: Any) -> Any:
    """Return an OpSpec with other values of some fields, one object for all calls alike."""
    return replace(spec, **fields)


def _describe(function: str, name: str, shape: tuple[Any, ...], dtype: Any) -> TensorSpec:
    if not all(isinstance(size, int) for size in shape):
        raise TypeError(
            f"{function}: {name} has shape {shape}, expected sizes that are known: export the "
            "function for each of the shapes"
        )
    return contiguous(shape, dtype_of(function, name, dtype), CPU)


def picker(sources: Iterable[int], places: Iterable[int]) -> Picker:
    """Return a function that picks the array at each place.

    It takes a tuple of what stands for an absent array, and then of the arrays at `sources`.
    """
    ranks = {source: rank for rank, source in enumerate(sources, 1)}
    return itemgetter(*[ranks.get(place, 0) for place in places])
