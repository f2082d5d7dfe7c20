# SPDX-License-Identifier: MIT
"""JAX arrays, on the CPU and on CUDA.

If all arrays of a call are JAX's, XLA makes the call: it allocates the outputs and orders calls.
In other calls, inputs go through DLPack: making a capsule waits for the input's values, or makes
cunorm's stream wait for them. A bare pointer could show old data, because JAX computes in the
background. An output becomes a JAX array, which is immutable, after cunorm has filled it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.dlpack
import numpy as np
from jax import Array
from jax.sharding import SingleDeviceSharding

from cunorm._arrays.adapter import new_view
from cunorm._arrays.cupy import cupy
from cunorm._arrays.dlpack import CODES, DLPackAdapter, read_capsule, view_of_capsule
from cunorm._arrays.numpy import data_pointer
from cunorm._backends import cuda
from cunorm._backends.cpu.compiler import has_compiler
from cunorm._core.dtypes import FLOAT64, dtype_of
from cunorm._core.memo import memoize
from cunorm._core.plan import OpDef
from cunorm._core.tensor import ArrayView, TensorSpec
from cunorm.jax import _ffi
from cunorm.jax._call import Call, OptionalArrays

Run = Callable[[OptionalArrays], list[Array | None]]

_ALIGNMENT = 64  # XLA copies a host buffer with less alignment


class JaxAdapter(DLPackAdapter):
    """The adapter of JAX arrays that are on one device."""

    dispatches_itself = True

    def accepts(self, function: str, argument: str, kind: type) -> bool:
        """Accept concrete arrays, but no tracers, which have no memory."""
        if issubclass(kind, jax.core.Tracer):
            raise TypeError(
                f"{function}: {argument} is a JAX tracer (inside jit, grad or vmap), expected an "
                "array with values: use cunorm.jax there"
            )
        return issubclass(kind, jax.Array)

    def dispatch(self, op: OpDef[Any], spec: Any, arrays: Sequence[Any]) -> list[Any] | None:
        """Let XLA make a call on JAX arrays of one device.

        Return None if outputs or a workspace are given, if a required array is absent, if arrays
        are deleted, of several types or not in one SingleDeviceSharding, or if this JAX cannot call
        the kernels.
        """
        kind = type(arrays[0])
        key_parts: list[object] = []
        for array in arrays:
            if array is None:
                key_parts.append(None)
            elif type(array) is kind and not array.is_deleted():
                key_parts.append((array.shape, array.dtype, array.sharding))
            else:
                return None
        run: Run | None = _eager_call(op, spec, *key_parts)
        return None if run is None else run(arrays[: op.first_output])

    def view(self, function: str, argument: str, array: Array) -> ArrayView:
        """Return the view of an array on one device; the host or CUDA's stream waits for values."""
        dtype_of(function, argument, array.dtype)
        if array.is_deleted():
            raise ValueError(
                f"{function}: {argument} is a deleted or donated JAX array, expected one with "
                f"data: pass a copy made before, jax.numpy.copy({argument})"
            )
        devices = array.devices()
        if len(devices) != 1:
            raise ValueError(
                f"{function}: {argument} is spread over {len(devices)} devices, expected one: "
                f"pass jax.device_put({argument}, one_device), or its addressable_shards one by one"
            )
        if next(iter(devices)).platform == "cpu":
            capsule = array.__dlpack__()
            view = view_of_capsule(function, argument, capsule, capsule, self)
        else:
            view = super().view(function, argument, array)
        view.writable = False
        return view

    def allocate(self, spec: TensorSpec) -> ArrayView:
        """Make a NumPy or CuPy buffer for `export`; it has the dtype's host type."""
        if spec.dtype is FLOAT64 and not jax.enable_x64.value:
            raise TypeError(_ffi.NEEDS_X64)
        buffer: Any
        if spec.device.kind == "cpu":
            memory = np.empty(spec.nbytes + _ALIGNMENT, np.uint8)
            start = -data_pointer(memory) % _ALIGNMENT
            data = memory[start : start + spec.nbytes]
            buffer = data.view(spec.dtype.host).reshape(spec.shape)
            pointer = data_pointer(buffer)
        else:
            with self.device_scope(spec.device):
                buffer = cupy().empty(spec.shape, spec.dtype.host)
            pointer = buffer.data.ptr
        return new_view(pointer, spec, buffer, self)

    def export(self, view: ArrayView) -> Array:
        """Give a filled buffer to JAX, which keeps it. JAX's stream waits for cunorm's."""
        with self.device_scope(view.spec.device):
            return jax.dlpack.from_dlpack(_Exporter(view))


class _Exporter:
    """Gives JAX the capsule of a NumPy or CuPy buffer; the C code of that library frees the buffer.

    A deleter in Python would need the GIL in threads of XLA, perhaps after Python has ended.
    """

    def __init__(self, view: ArrayView) -> None:
        self.buffer, self.dtype = view.owner, view.spec.dtype

    def __dlpack_device__(self) -> object:
        return self.buffer.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        capsule = self.buffer.__dlpack__(stream=stream)
        if self.dtype in CODES:  # the buffer has the host type
            read_capsule(capsule)[0].code = CODES[self.dtype]
        return capsule


# --- calls that XLA makes -------------------------------------------------------------------------


@memoize()
def _eager_call(op: OpDef[Any], spec: Any, *key_parts: Any) -> Run | None:
    """Return a function that makes a call on its inputs, or None if XLA cannot make the call.

    Each of `key_parts` is an array's shape, dtype and sharding, or None. Wrong input, and CUDA
    without CuPy, raise errors here, before JAX traces anything.
    """
    inputs, given = key_parts[: op.first_output], key_parts[op.first_output :]
    sharding = key_parts[0][2]
    are_apart = any(one is not None and one[2] != sharding for one in inputs)
    is_missing = any(a is None and b for a, b in zip(inputs, op.required, strict=False))
    if is_missing or any(given) or are_apart:
        return None
    if type(sharding) is not SingleDeviceSharding or _ffi.refusal():
        return None
    call = Call.on(op, spec, [one and jax.ShapeDtypeStruct(*one[:2]) for one in inputs])
    _ffi.check_x64(call)
    device: Any = next(iter(sharding.device_set))
    if device.platform == "cpu":
        has_compiler()
    else:
        cuda.require()
    pick, compiled = call.output_picker(), jax.jit(partial(_ffi.run_new_outputs, call))

    def run(arrays: OptionalArrays) -> list[Array | None]:
        with jax.ensure_compile_time_eval():  # a surrounding jit does not trace the call
            return [*pick((None, *arrays, *compiled(arrays)))]

    return run


ADAPTER = JaxAdapter()
