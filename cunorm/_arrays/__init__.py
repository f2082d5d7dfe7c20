# SPDX-License-Identifier: MIT
"""Operands: the arrays of every framework as pointer, shape, strides, dtype and device.

`describe` finds the framework of an array through the root module of its type, once per type, and
imports nothing that the caller has not. Whatever would give silently wrong numbers is refused.
"""

from __future__ import annotations

from typing import Any

from cunorm._arrays._cupy import CUPY
from cunorm._arrays._dlpack import DLPACK
from cunorm._arrays._jax import JAX
from cunorm._arrays._numpy import NUMPY, numpy_view
from cunorm._arrays._operand import (
    CPU,
    Device,
    Form,
    Framework,
    Operand,
    contiguous_form,
    in_c_order,
)
from cunorm._arrays._streams import joined
from cunorm._arrays._torch import TORCH

__all__ = [
    "CPU",
    "NUMPY",
    "Device",
    "Form",
    "Framework",
    "Operand",
    "contiguous_form",
    "describe",
    "describe_all",
    "describe_memory",
    "framework_of",
    "in_c_order",
    "joined",
    "numpy_view",
]

_ROOTS: dict[str, Framework] = {
    "numpy": NUMPY,
    "cupy": CUPY,
    "torch": TORCH,
    "jax": JAX,
    "jaxlib": JAX,
}
_FRAMEWORKS: dict[type, Framework] = {}


def describe(function: str, argument: str, array: Any) -> Operand:
    """Return what the kernels need to know of an array.

    Parameters
    ----------
    function, argument : str
        Who asks for what; every error begins with them.
    array : array
        Of NumPy, CuPy, PyTorch or JAX, or any object with ``__dlpack__``. NumPy data that is not
        aligned is copied; then `Operand.owner` is the copy and not `array`.

    Raises
    ------
    TypeError
        If it is no array, of a dtype no kernel reads, or of a kind that stands for something
        other than its memory (masked array, tensor subclass, tracer).
    ValueError
        If its memory cannot be read as it is: autograd, bits to resolve, sparse, no data, several
        devices. The message names what to call.
    """
    operand: Operand = describe_all(function, (argument,), (array,), required=1)[0]
    return operand


def describe_all(
    function: str, arguments: tuple[str, ...], arrays: tuple[Any, ...], required: int = 0
) -> list[Any]:
    """Describe arrays in one go; all but the first `required` may be None, and are then None."""
    operands: list[Any] = [None] * len(arrays)
    for place, array in enumerate(arrays):
        if array is not None or place < required:
            kind = type(array)
            framework = _FRAMEWORKS.get(kind) or _framework(function, arguments[place], kind)
            operands[place] = framework.describe(function, arguments[place], array)
    return operands


def describe_memory(function: str, argument: str, array: Any, size: int) -> Operand:
    """Describe an array that is lent for its memory, which must be writable and large enough.

    Contiguous, of any dtype of numbers in NumPy and CuPy, of uint8 or one that kernels read in
    PyTorch.
    """
    framework = _FRAMEWORKS.get(type(array)) or _framework(function, argument, type(array))
    operand = framework.memory(function, argument, array)
    where = f"{function}: {argument}"
    if not operand.writable or operand.pointer % _ALIGNMENT:
        raise ValueError(
            f"{where} cannot be used in place, expected a writable array whose address is a "
            f"multiple of {_ALIGNMENT} (JAX arrays are immutable)"
        )
    got = operand.form.shape[0] * operand.form.dtype.itemsize
    if got < size:
        raise ValueError(
            f"{where} has {got} bytes, expected at least {size}, as cunorm.workspace_size says"
        )
    return operand


def framework_of(array: Any) -> Framework | None:
    """Return the framework of an array, None where none of its type was described before.

    JAX's is known from the first, as it makes calls itself.
    """
    kind = type(array)
    found = _FRAMEWORKS.get(kind)
    if found is None and kind.__module__.partition(".")[0] == "jaxlib":
        return JAX if JAX.accepts("", "", kind) else None
    return found


_ALIGNMENT = 16  # bytes of a GPU's widest access


def _framework(function: str, argument: str, kind: type) -> Framework:
    """Return the framework of a type of array that was not met before."""
    framework = _FRAMEWORKS[kind] = _find(function, argument, kind)
    return framework


def _find(function: str, argument: str, kind: type) -> Framework:
    """Return the framework of a type of array; types that are refused are asked for every time."""
    for base in kind.__mro__:
        framework = _ROOTS.get(base.__module__.partition(".")[0])
        if framework is not None and framework.accepts(function, argument, kind):
            return framework
    if DLPACK.accepts(function, argument, kind):
        return DLPACK
    got = "None" if kind is type(None) else f"of type {kind.__qualname__}"
    raise TypeError(
        f"{function}: {argument} is {got}, expected a NumPy, CuPy, PyTorch or JAX array or "
        "another object with __dlpack__"
    )
