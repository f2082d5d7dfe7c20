# SPDX-License-Identifier: MIT
"""Calls of the kernels inside JAX: an FFI call, what vmap makes of it, and no derivative of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.ffi
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from cunorm._core.dtypes import FLOAT64
from cunorm.jax._batch import run_batch
from cunorm.jax._kinds import KINDS, Settled, settle
from cunorm.jax._op import Op
from cunorm.jax._target import CPU_TARGET, CUDA_TARGET, register

Arrays = tuple[Any, ...]


def run(op: Op, arrays: Arrays) -> list[Any]:
    """Return every result of a call, None for those that there are not.

    `arrays` are all inputs of the op, None where absent. Every transformation goes through but
    differentiation, which is for the callers to define.
    """
    settled = settle(op)
    results = [None] * len(KINDS[op.kind].results)
    if not settled.made:
        return results
    _check_x64(op, settled)
    given = [array for array in arrays if array is not None]
    made = _undifferentiated(op, *given)
    for (place, _), array in zip(settled.made, made, strict=True):
        results[place - len(op.inputs)] = array
    return results


def alike(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays, whole, and as if they all varied on the devices of a `shard_map`.

    What depends on all of them varies where one does. The transpose of this sums gradients, and
    brings those of arrays that are spread over an explicit mesh back to where these lie.
    """
    axes = frozenset().union(*(_varying(array) for array in arrays if array is not None))
    return [None if array is None else _varied(_whole(array), axes) for array in arrays]


def _whole(array: Any) -> Any:
    where = jax.typeof(array).sharding
    if all(axis is None for axis in where.spec):
        return array
    return jax.reshard(array, jax.NamedSharding(where.mesh, jax.P(*(None,) * array.ndim)))


def _varied(array: Any, axes: frozenset[Any]) -> Any:
    missing = tuple(sorted(axes - _varying(array), key=str))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def _varying(array: Any) -> frozenset[Any]:
    """Return the axes of a `shard_map`'s mesh along which an array differs."""
    found: frozenset[Any] = jax.typeof(array).manual_axis_type.varying
    return found


def _check_x64(op: Op, settled: Settled) -> None:
    """Refuse results that JAX would cut to float32."""
    if not jax.config.jax_enable_x64 and any(form.dtype is FLOAT64 for _, form in settled.made):
        raise TypeError(
            f"{op.said[0]}: a result of dtype float64: a float64 JAX array would be cut to float32 "
            "here: jax.config.update('jax_enable_x64', True) before"
        )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _undifferentiated(op: Op, *arrays: Any) -> Arrays:
    results: Arrays = _batchable(op)(*arrays)
    return results


@_undifferentiated.defjvp
def _refuse(op: Op, primals: Arrays, tangents: Arrays) -> None:
    raise NotImplementedError(
        f"{op.said[0]}: a second or a forward-mode derivative is asked for, expected first ones of "
        "reverse mode (jax.grad, jax.vjp): cunorm.jax has no others"
    )


@lru_cache(maxsize=1024)
def _batchable(op: Op) -> Any:
    """Return the call as a function of the arrays that there are, with a rule for vmap."""
    settled = settle(op)

    @custom_vmap
    def call(*arrays: Any) -> Arrays:
        return _call(op, settled, arrays)

    @call.def_vmap
    def _(size: int, batched: list[bool], *arrays: Any) -> tuple[Arrays, tuple[bool, ...]]:
        results = run_batch(op, settled, size, batched, arrays, _batchable)
        return results, (True,) * len(results)

    return call


def _call(op: Op, settled: Settled, arrays: Arrays) -> Arrays:
    """Call the target of the platform that this is compiled for, which is not known here."""
    register()
    made = [_struct(form.shape, form.dtype.name, arrays[0]) for _, form in settled.made]
    if settled.is_empty:
        axes = _varying(arrays[0])
        return tuple(_varied(jnp.zeros(struct.shape, struct.dtype), axes) for struct in made)
    # The memory on a GPU is a result that nobody gets.
    memory = [_struct((size,), "uint8", arrays[0]) for size in (settled.workspace,) if size]

    def on_cpu(*arrays: Any) -> Arrays:
        return tuple(jax.ffi.ffi_call(CPU_TARGET, made)(*arrays, op=op.text()))

    def on_cuda(*arrays: Any) -> Arrays:
        results = jax.ffi.ffi_call(CUDA_TARGET, [*made, *memory])(*arrays, op=op.text())
        return tuple(results[: len(made)])

    results: Arrays = jax.lax.platform_dependent(*arrays, cpu=on_cpu, cuda=on_cuda)
    return results


def _struct(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    """Return what JAX is told of a result: it is whole, and varies as an array does."""
    found = jax.typeof(like)
    if found.sharding.mesh.empty:
        return jax.ShapeDtypeStruct(shape, dtype)
    sharding = jax.NamedSharding(found.sharding.mesh, jax.P(*(None,) * len(shape)))
    varying = found.manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=varying)
