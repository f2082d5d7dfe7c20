# SPDX-License-Identifier: MIT
"""One call that does the work of a call for each example of a batch."""

import jax.numpy as jnp
from jax import Array

from cunorm._core.operands import Kind, present
from cunorm._core.types import Axis
from cunorm._row_norm.combine_plan import COMBINE_MOMENTS
from cunorm._row_norm.order import full_shape
from cunorm._row_norm.quantized_spec import RowQuantizedSpec
from cunorm._row_norm.spec import RowNormSpec
from cunorm.jax._call import Arrays, Call, gates_branch, replace_interned


def merged(
    call: Call, size: int, batched: list[bool], arrays: Arrays
) -> tuple[Call, Arrays] | None:
    """Return the call for all examples, and its arrays; None if each example needs its own.

    The axis of examples is the first, also in the batched arrays. It becomes x's first leading axis
    or, in a group norm, a part of the axis of samples.
    """
    if call.op is COMBINE_MOMENTS:
        return _combined(call, arrays) if all(batched) else None
    op, spec, is_row = call.op, call.spec, isinstance(call.spec, RowNormSpec)
    ndim, shared = len(present(call.inputs[op.x]).shape), _shared(call)
    results = {op.outputs[slot - op.first_output] for slot, _ in call.plan.outputs}
    names = [name for name, one in zip(op.inputs, call.inputs, strict=True) if one is not None]
    inputs = {}
    for name, array, is_batched in zip(names, arrays, batched, strict=True):
        if name in shared and not is_batched and f"d{name}" not in results:
            inputs[name] = array  # all examples share it, and nobody wants the gradient of each
            continue
        if name in shared and not is_row:
            return None  # a group norm has parameters for all samples or for each, not for some
        if name == "scale":
            inputs[name] = _scale_of_examples(call, size, is_batched, array)
            continue
        full = array if is_batched else jnp.broadcast_to(array, (size, *array.shape))
        shape = full.shape[1:]
        if is_row:
            of_example = full_shape(spec.axis, ndim, shape) if name in shared else shape
            inputs[name] = full.reshape(size, *of_example)
        else:
            inputs[name] = full.reshape(-1, *shape[1:])
    if isinstance(spec, RowNormSpec):  # a negative axis needs no change
        spec = replace_interned(spec, axis=_negative(spec.axis, ndim))
    one = Call.on(op, spec, [inputs.get(name) for name in op.inputs])
    try:
        _ = one.plan
    except ValueError:  # with the axis of examples, rows share parameters along too many axes
        return None
    return one, tuple(inputs.values())


def _negative(axis: Axis, ndim: int) -> Axis:
    if isinstance(axis, tuple):
        return tuple(one % ndim - ndim for one in axis)
    return axis if axis < 0 else axis - ndim


def _combined(call: Call, arrays: Arrays) -> tuple[Call, Arrays]:
    """Return the call that combines the moments of all examples: parts stay the first axis."""
    moved = tuple([jnp.moveaxis(array, 0, 1) for array in arrays])
    given = iter(moved)
    inputs = [None if one is None else next(given) for one in call.inputs]
    return Call.on(call.op, call.spec, inputs), moved


def _scale_of_examples(call: Call, size: int, is_batched: bool, array: Array) -> Array:
    """Return the given scale of all examples: one number, or a number for each of their rows."""
    if array.size == 1 and not is_batched:
        return array
    assert isinstance(call.spec, RowQuantizedSpec)
    shape = call.spec.scale_shape(present(call.inputs[call.op.x]).shape)
    if is_batched and array.size == size:  # one number for each example
        array = array.reshape(size, *[1] * len(shape))
    return jnp.broadcast_to(array, (size, *shape))


def _shared(call: Call) -> set[str]:
    """Return the operands that several rows or samples may share."""
    op, spec = call.op, call.spec
    found = {slot.argument for slot in op.input_slots if slot.kind is Kind.PARAMETER}
    if isinstance(spec, RowNormSpec):
        return found | ({"gate"} if gates_branch(spec) else set())
    samples = present(call.inputs[op.x]).shape[:1]
    given = zip(op.inputs, call.inputs, strict=True)
    return found - {name for name, one in given if one is not None and one.shape[:-1] == samples}
