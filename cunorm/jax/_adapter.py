# SPDX-License-Identifier: MIT
"""JAX arrays, on the CPU and on CUDA.

A call on JAX arrays alone is XLA's to make, which allocates and orders: `cunorm.jax` has it. Where
there are arrays of other frameworks too, both directions go through DLPack, as JAX computes in the
background and its arrays are immutable: an input's capsule waits for its values (or orders our
stream after them), and an output is a buffer of ours, filled first and handed to JAX after. A bare
buffer pointer would show stale data.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from cunorm._arrays._cupy import cupy
from cunorm._arrays._dlpack import KDL_BFLOAT, DLPack, operand_from_capsule, read_capsule
from cunorm._arrays._numpy import data_pointer
from cunorm._arrays._operand import Form, Operand, fresh
from cunorm._core.dtypes import BFLOAT16, FLOAT64, dtype_of

_ALIGNMENT = 64  # XLA copies a host buffer that is aligned to less


class Jax(DLPack):
    """JAX: the arrays of one device, read and made through DLPack."""

    name = "jax"

    def accepts(self, function: str, argument: str, kind: type) -> bool:
        """Take concrete arrays; a tracer has no memory."""
        jax = sys.modules["jax"]
        if issubclass(kind, jax.core.Tracer):
            raise TypeError(
                f"{function}: {argument} is a JAX tracer (inside jit, grad or vmap), expected an "
                "array with values: use cunorm.jax there"
            )
        return issubclass(kind, jax.Array)

    def call(
        self, asked: Any, numbers: Any, arrays: tuple[Any, ...], first_result: int
    ) -> list[Any] | None:
        """Let XLA make the call, which allocates and orders, where all arrays are JAX's."""
        found: list[Any] | None = _eager().run(asked, numbers, arrays, first_result)
        return found

    def describe(self, function: str, argument: str, array: Any) -> Operand:
        """Describe an array of one device, once its values are there or ordered."""
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
            operand = operand_from_capsule(function, argument, capsule, capsule, self)
        else:
            operand = super().describe(function, argument, array)
        operand.writable = False
        return operand

    def allocate(self, form: Form) -> Operand:
        """Make a NumPy or CuPy buffer for `export`. bfloat16 is held as float16, bits are bits."""
        if form.dtype is FLOAT64 and not sys.modules["jax"].config.jax_enable_x64:
            raise TypeError(
                "a float64 JAX array would be cut to float32 here: "
                "jax.config.update('jax_enable_x64', True) before"
            )
        buffer: Any
        if form.device.kind == "cpu":
            buffer = _aligned(form.shape, form.dtype.itemsize)
            pointer = data_pointer(buffer)
        else:
            with self.device_scope(form.device):
                buffer = cupy().empty(form.shape, f"=f{form.dtype.itemsize}")
            pointer = buffer.data.ptr
        return fresh(pointer, form, buffer, self)

    def export(self, operand: Operand) -> Any:
        """Hand a filled buffer to JAX, which keeps it alive. On CUDA its stream waits for ours."""
        with self.device_scope(operand.device):
            return import_module("jax.dlpack").from_dlpack(_Exporter(operand))


@cache
def _eager() -> Any:
    return import_module("cunorm.jax._eager")


class _Exporter:
    """Passes on the capsule of the NumPy or CuPy buffer, whose owner's C code frees it.

    Written in Python, a deleter would need the GIL in XLA's threads, could be called after the
    interpreter has gone, and could overwrite an exception on its way up.
    """

    def __init__(self, operand: Operand) -> None:
        self.buffer, self.dtype = operand.owner, operand.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.buffer.__dlpack_device__()
        return device

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        capsule = self.buffer.__dlpack__(stream=stream)
        if self.dtype is BFLOAT16:  # neither NumPy nor every CuPy can say so itself
            read_capsule(capsule)[0].code = KDL_BFLOAT
        return capsule


def _aligned(shape: tuple[int, ...], itemsize: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an uninitialised float array whose address is a multiple of 64."""
    size = math.prod(shape) * itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -data_pointer(memory) % _ALIGNMENT
    return memory[start : start + size].view(f"=f{itemsize}").reshape(shape)


JAX = Jax()
