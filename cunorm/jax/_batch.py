# SPDX-License-Identifier: MIT
"""A call for each example of a batch: one call, where examples share nothing but parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cunorm.jax._kinds import KINDS, Settled
from cunorm.jax._op import Array, Op

Results = tuple[Any, ...]
CallOf = Callable[[Op], Callable[..., Results]]  # what runs an op, given its arrays

_AXIS = 2  # the place of a row norm's axis in what was said


def run_batch(
    op: Op, settled: Settled, size: int, batched: list[bool], arrays: Results, call_of: CallOf
) -> Results:
    """Return the results of a batch, its axis in front; it is in front of the batched arrays too.

    Rows and samples of all examples go into one call. Where parameters differ, or a gradient is to
    be summed over each example alone, there is a call for each.
    """
    kind = KINDS[op.kind]
    names = [kind.inputs[place] for place in settled.places]
    of_batch = {name for name, is_it in zip(names, batched, strict=True) if is_it}
    summed = {kind.results[place - len(op.inputs)] for place, _ in settled.made}
    if of_batch & set(kind.parameters) or summed & set(kind.gradients):
        return _one_by_one(op, batched, arrays, call_of)
    whole = _of_batch(op, size)
    taken = [
        array if name in kind.parameters else _joined(op, array, is_it, size)
        for name, array, is_it in zip(names, arrays, batched, strict=True)
    ]
    results = call_of(whole)(*taken)
    return tuple(
        result.reshape(size, *form.shape)
        for result, (_, form) in zip(results, settled.made, strict=True)
    )


def _one_by_one(op: Op, batched: list[bool], arrays: Results, call_of: CallOf) -> Results:
    def one(own: list[Any]) -> Results:
        left = iter(own)
        both = zip(arrays, batched, strict=True)
        return call_of(op)(*(next(left) if is_it else array for array, is_it in both))

    of_batch = [array for array, is_it in zip(arrays, batched, strict=True) if is_it]
    results: Results = jax.lax.map(one, of_batch)
    return results


def _of_batch(op: Op, size: int) -> Op:
    """Return the op of all examples together."""
    kind = KINDS[op.kind]
    inputs = tuple(
        array if array is None or name in kind.parameters else _grown(op, array, size)
        for name, array in zip(kind.inputs, op.inputs, strict=True)
    )
    if _has_samples(op):
        return op._replace(inputs=inputs)
    x = op.inputs[kind.x]
    assert x is not None
    axis = op.said[_AXIS]
    axis -= len(x.shape) if axis >= 0 else 0  # counted from the end, it stays what it is
    return op._replace(said=(*op.said[:_AXIS], axis, *op.said[_AXIS + 1 :]), inputs=inputs)


def _has_samples(op: Op) -> bool:
    """Whether the first axis of arrays is that of samples, which those of a batch join."""
    return op.kind.startswith("group")


def _grown(op: Op, array: Array, size: int) -> Array:
    shape = array.shape
    joined = (size * shape[0], *shape[1:]) if _has_samples(op) else (size, *shape)
    return array._replace(shape=joined)


def _joined(op: Op, array: Any, is_batched: bool, size: int) -> Any:
    """Return the arrays of all examples as one."""
    if not is_batched:
        array = jnp.broadcast_to(array, (size, *array.shape))
    return array.reshape(-1, *array.shape[2:]) if _has_samples(op) else array
