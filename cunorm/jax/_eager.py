# SPDX-License-Identifier: MIT
"""The plain functions' calls on JAX arrays: FFI calls, compiled by XLA once for all alike.

The call is checked and planned when JAX traces it, which it does once for all arrays of the same
shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from cunorm import _cuda
from cunorm._backend import has_compiler
from cunorm.group_norm import _backward_plan as group_backward_plan
from cunorm.group_norm import _forward as group_forward_plan
from cunorm.group_norm._calls import eps_bits
from cunorm.jax import _launch
from cunorm.jax._arguments import described
from cunorm.jax._kinds import KINDS, name_of
from cunorm.jax._op import Op
from cunorm.jax._target import refused
from cunorm.row_norm import _backward_plan, _forward_plan

Asked = (
    _forward_plan.Asked
    | _backward_plan.Asked
    | group_forward_plan.Asked
    | group_backward_plan.Asked
)


def run(told: Asked, numbers: Any, arrays: tuple[Any, ...], first_result: int) -> list[Any] | None:
    """Return the results of a call; None where one of its arrays is to be looked at more closely.

    That is where arrays of other frameworks, or memory for results, are given; and for what is
    refused, say an array that is traced, deleted, or on other devices than x.
    """
    if any(array is not None for array in arrays[first_result:]) or refused():
        return None
    inputs = arrays[:first_result]
    x = inputs[0]
    kind, where = type(x), x.sharding
    if type(where) is not SingleDeviceSharding or not hasattr(x, "platform"):  # an array of keys
        return None
    for array in inputs:
        if array is not None and (
            type(array) is not kind or array.is_deleted() or array.sharding != where
        ):
            return None
    call = _compiled(told, numbers, x.platform() == "cpu")
    try:
        with jax.ensure_compile_time_eval():  # inside a jit, too, where the call is not traced
            return call(inputs)
    except (TypeError, ValueError):  # said again, without a word of JAX's tracing
        return None


@lru_cache(maxsize=1024)
def _compiled(told: Asked, numbers: Any, on_cpu: bool) -> Callable[[tuple[Any, ...]], list[Any]]:
    """Return what makes all calls with these words; what is missing to make one is said first."""
    kind, said, bits = _op_of(told, numbers)
    names = KINDS[kind].inputs
    if on_cpu:
        has_compiler()
    else:
        _cuda.require()

    def call(arrays: tuple[Any, ...]) -> list[Any]:
        op = Op(kind, said, bits, described(told.function, names, arrays))
        return _launch.run(op, arrays)

    compiled: Callable[[tuple[Any, ...]], list[Any]] = jax.jit(call)
    return compiled


def _op_of(told: Asked, numbers: Any) -> tuple[str, tuple[Any, ...], bytes]:
    """Return the kind of a call, what was said, and the numbers."""
    words: tuple[Any, ...]
    function = told.function
    if isinstance(told, _forward_plan.Asked):
        dtype, residual_dtype, *rest = told.options
        dtypes = (name_of(dtype), name_of(residual_dtype))
        return "row_forward", (function, *told.variant, told.has_offset, *dtypes, *rest), numbers
    if isinstance(told, _backward_plan.Asked):
        words = (told.has_offset, name_of(told.x_dtype), tuple(sorted(told.needs)))
        return "row_backward", (function, *told.variant, *words), numbers
    if isinstance(told, group_forward_plan.Asked):
        words = (told.num_groups, told.activation, told.channel_axis, name_of(told.dtype))
        return "group_forward", (function, *words, told.saves), eps_bits(numbers)
    words = (told.num_groups, told.activation, told.channel_axis, tuple(sorted(told.needs)))
    return "group_backward", (function, *words), b""
