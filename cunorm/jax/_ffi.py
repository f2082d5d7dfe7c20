# SPDX-License-Identifier: MIT
"""Calls of the kernels inside JAX: FFI calls with a rule for vmap and without a derivative."""

import atexit
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn

import jax
import jax.ffi
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jax.custom_batching import custom_vmap

from cunorm._core.dtypes import FLOAT64
from cunorm._core.memo import memoize
from cunorm._core.plan import OpDef, SpecT
from cunorm.jax import _xla_structs as xla
from cunorm.jax._batch import merged
from cunorm.jax._call import Arrays, Call, OptionalArrays
from cunorm.jax._handler import called, handler, run_on_cpu, run_on_cuda

_CPU_TARGET, _CUDA_TARGET = "cunorm_on_cpu", "cunorm_on_cuda"
NEEDS_X64 = (
    "a float64 JAX array would be cut to float32 here: "
    "jax.config.update('jax_enable_x64', True) before"
)


def run(op: OpDef[SpecT], spec: SpecT, arrays: OptionalArrays) -> dict[str, Array | None]:
    """Return the outputs of a call by name, None for absent outputs. They have no derivatives."""
    call = Call.on(op, spec, arrays)
    outputs = call.output_picker()((None, *arrays, *run_new_outputs(call, arrays)))
    return dict(zip(op.outputs, outputs, strict=True))


def run_new_outputs(call: Call, arrays: OptionalArrays) -> Arrays:
    check_x64(call)
    if not call.plan.outputs:
        return ()
    return _kernel(call)(*[array for array in arrays if array is not None])


def check_x64(call: Call) -> None:
    """Refuse float64 outputs if JAX would make them float32."""
    is_float64 = any(spec.dtype is FLOAT64 for _, spec in call.plan.outputs)
    if is_float64 and not jax.enable_x64.value:
        raise TypeError(f"{call.spec.function}: a result of dtype float64: {NEEDS_X64}")


@memoize()
def _kernel(call: Call) -> Callable[..., Arrays]:
    """Return a call as a function of its present arrays, compiled once and with a vmap rule.

    `_underivable` inside the function refuses derivatives. JAX would drop a derivative rule of the
    function itself when it splits the derivative of a loop.
    """

    @custom_vmap
    def function(*arrays: Array) -> Arrays:
        return _underivable(call, *arrays)

    @function.def_vmap
    def _(size: int, batched: list[bool], *arrays: Array) -> tuple[Arrays, tuple[bool, ...]]:
        outputs = _run_batch(call, size, batched, arrays)
        return outputs, (True,) * len(outputs)

    return jax.jit(function, inline=True)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _underivable(call: Call, *arrays: Array) -> Arrays:
    return _ffi_call(call, arrays)


@_underivable.defjvp
def _refuse(call: Call, primals: Arrays, tangents: Arrays) -> NoReturn:
    raise NotImplementedError(
        f"{call.spec.function}: a derivative is asked for, expected none, as quantised results "
        "have no derivatives: pass jax.lax.stop_gradient of x and of the other arrays"
    )


def _run_batch(call: Call, size: int, batched: list[bool], arrays: Arrays) -> Arrays:
    """Return the outputs of a batch; the batch axis is the first, also in the batched arrays."""
    found = merged(call, size, batched, arrays)
    if found is None:
        own = {slot: arrays[slot] for slot, is_batched in enumerate(batched) if is_batched}
        return jax.lax.map(
            lambda own: _kernel(call)(*(dict(enumerate(arrays)) | own).values()), own
        )
    one, inputs = found
    pairs = zip(_kernel(one)(*inputs), call.plan.outputs, strict=True)
    return tuple([result.reshape(size, *spec.shape) for result, (_, spec) in pairs])


def _ffi_call(call: Call, arrays: Arrays) -> Arrays:
    """Call the target of XLA's platform, which is not known before XLA compiles the call."""
    register()
    plan, like = call.plan, jax.typeof(arrays[0])
    outputs = [struct(spec.shape, spec.dtype.name, like) for _, spec in plan.outputs]
    if call.is_empty:
        axes = varying(arrays[0])
        return tuple(_vary(jnp.zeros(one.shape, one.dtype), axes) for one in outputs)
    # The workspace on a GPU is one more result, which is dropped.
    size = plan.workspace_bound(None)
    workspace = [struct((size,), "uint8", like)] if size else []

    def on_cpu(*arrays: Array) -> Arrays:
        return tuple(jax.ffi.ffi_call(_CPU_TARGET, outputs)(*arrays, op=call.text()))

    def on_cuda(*arrays: Array) -> Arrays:
        results = jax.ffi.ffi_call(_CUDA_TARGET, [*outputs, *workspace])(*arrays, op=call.text())
        return tuple(results[: len(outputs)])

    return jax.lax.platform_dependent(*arrays, cpu=on_cpu, cuda=on_cuda)


# --- arrays over several devices ------------------------------------------------------------------


def match_varying_axes(arrays: OptionalArrays) -> tuple[Array | None, ...]:
    """Return the arrays unsharded; all vary over each axis of a `shard_map` that one varies over.

    In reverse mode, JAX's transpose of this sums an array's gradient over the axes added to it, and
    shards the gradient of an array that was sharded over an explicit mesh.
    """
    axes = frozenset().union(*(varying(array) for array in arrays if array is not None))
    return tuple([None if array is None else _vary(_whole(array), axes) for array in arrays])


def _whole(array: Array) -> Array:
    sharding = jax.typeof(array).sharding
    if all(axis is None for axis in sharding.spec):
        return array
    return jax.reshard(array, jax.NamedSharding(sharding.mesh, jax.P(*(None,) * array.ndim)))


def _vary(array: Array, axes: frozenset[object]) -> Array:
    missing = tuple(sorted(axes - varying(array), key=str))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def varying(array: Array) -> frozenset[object]:
    return jax.typeof(array).manual_axis_type.varying


def struct(shape: tuple[int, ...], dtype: str, like: Any) -> ShapeDtypeStruct:
    """Return the shape and dtype of a result, unsharded; it varies over the axes of a type."""
    if like.sharding.mesh.empty:
        return ShapeDtypeStruct(shape, dtype)
    sharding = jax.NamedSharding(like.sharding.mesh, jax.P(*(None,) * len(shape)))
    kind = like.manual_axis_type
    return ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=kind)


# --- the targets ----------------------------------------------------------------------------------

_handlers: list[object] = []  # XLA calls them for as long as the process lives


@cache
def refusal() -> str | None:
    """Return why this JAX cannot call the kernels, or None if it can."""
    return xla.refusal(xla.library_version(jax.ffi.include_dir()))


@cache
def register() -> None:
    """Register the handlers, or raise an error with the text of `refusal`."""
    reason = refusal()
    if reason is not None:
        raise ImportError(f"cunorm.jax: {reason}")
    atexit.register(_finish)
    targets = ((_CPU_TARGET, run_on_cpu, "cpu"), (_CUDA_TARGET, run_on_cuda, "CUDA"))
    for target, run, platform in targets:
        _handlers.append(handler(run))
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(_handlers[-1]), platform=platform)


def _finish() -> None:
    """Wait for all work of XLA, which after Python's end would wait for the GIL forever.

    Each device gets one more computation, which it runs after all others, also those not awaited.
    """
    if called:
        after = jax.jit(lambda x: x + 1)
        devices = {*jax.local_devices(), *jax.local_devices(backend="cpu")}
        jax.block_until_ready([after(jax.device_put(0.0, device)) for device in devices])
