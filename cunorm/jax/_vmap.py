# SPDX-License-Identifier: MIT
"""A call for each example of a batch: one call, where examples share nothing but parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cunorm._core.tensor import TensorSpec, contiguous
from cunorm._group_norm.spec import GroupNormSpec
from cunorm.jax._call import Call, changed

Arrays = tuple[Any, ...]
FunctionOf = Callable[[Call], Callable[..., Arrays]]  # runs a call, given the arrays that there are


def run_batch(
    call: Call, size: int, batched: list[bool], arrays: Arrays, function_of: FunctionOf
) -> Arrays:
    """Return the outputs of a batch, its axis in front; it is in front of the batched arrays too.

    Rows and samples of all examples go into one call. Where parameters differ, or a gradient is to
    be summed over each example alone, there is a call for each.
    """
    op, outputs = call.op, call.plan.outputs
    present = zip(op.inputs, call.inputs, strict=True)
    names = [name for name, spec in present if spec is not None]
    differing = {name for name, is_it in zip(names, batched, strict=True) if is_it}
    wanted = {op.outputs[place - op.first_output] for place, _ in outputs}
    if differing & set(op.parameters) or wanted & set(op.sums):
        return _one_by_one(call, batched, arrays, function_of)
    taken = [
        array if name in op.parameters else _joined(call, array, is_it, size)
        for name, array, is_it in zip(names, arrays, batched, strict=True)
    ]
    results = function_of(_of_batch(call, size))(*taken)
    pairs = zip(results, outputs, strict=True)
    return tuple([result.reshape(size, *spec.shape) for result, (_, spec) in pairs])


def _one_by_one(call: Call, batched: list[bool], arrays: Arrays, function_of: FunctionOf) -> Arrays:
    def one(own: list[Any]) -> Arrays:
        left = iter(own)
        both = zip(arrays, batched, strict=True)
        return function_of(call)(*(next(left) if is_it else array for array, is_it in both))

    differing = [array for array, is_it in zip(arrays, batched, strict=True) if is_it]
    results: Arrays = jax.lax.map(one, differing)
    return results


def _of_batch(call: Call, size: int) -> Call:
    """Return the call of all examples together."""
    op, spec = call.op, call.spec
    inputs = tuple(
        one if one is None or name in op.parameters else _grown(call, one, size)
        for name, one in zip(op.inputs, call.inputs, strict=True)
    )
    if not _has_samples(call) and spec.axis >= 0:  # counted from the end, it stays what it is
        x = call.inputs[op.x]
        assert x is not None
        spec = changed(spec, axis=spec.axis - len(x.shape))
    return Call(op, spec, inputs)


def _has_samples(call: Call) -> bool:
    """Whether the first axis of arrays is that of samples, which those of a batch join."""
    return isinstance(call.spec, GroupNormSpec)


def _grown(call: Call, spec: TensorSpec, size: int) -> TensorSpec:
    shape = spec.shape
    joined = (size * shape[0], *shape[1:]) if _has_samples(call) else (size, *shape)
    return contiguous(joined, spec.dtype, spec.device)


def _joined(call: Call, array: Any, is_batched: bool, size: int) -> Any:
    """Return the arrays of all examples as one."""
    if not is_batched:
        array = jnp.broadcast_to(array, (size, *array.shape))
    return array.reshape(-1, *array.shape[2:]) if _has_samples(call) else array
