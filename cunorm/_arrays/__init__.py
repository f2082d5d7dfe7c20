# SPDX-License-Identifier: MIT
"""Operands: the arrays of every framework as pointer, shape, strides, dtype and device.

`describe` finds the framework of an array through the root module of its type, once per type, and
imports nothing that the caller has not. Whatever would give silently wrong numbers is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cunorm._arrays._bytes import as_floats, check_bytes
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
    "Device",
    "Form",
    "Framework",
    "Operand",
    "contiguous_form",
    "describe",
    "describe_bytes",
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
_DESCRIBERS: dict[type, Callable[[str, str, Any], Operand]] = {}


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
    describer = _DESCRIBERS.get(type(array))
    if describer is None:
        describer = _find(function, argument, type(array)).describe
        _DESCRIBERS[type(array)] = describer
    return describer(function, argument, array)


def describe_bytes(function: str, argument: str, array: Any, size: int) -> Operand:
    """Describe a contiguous array of at least so many bytes, which may be elements of uint8."""
    floats = as_floats(function, argument, array)
    operand = describe(function, argument, floats)
    check_bytes(function, argument, operand, floats, size)
    return operand


def _find(function: str, argument: str, kind: type) -> Framework:
    """Return the framework of a type of array; types that are refused are asked for every time."""
    for base in kind.__mro__:
        framework = _ROOTS.get(base.__module__.partition(".")[0])
        if framework is not None and framework.accepts(function, argument, kind):
            return framework
    if DLPACK.accepts(function, argument, kind):
        return DLPACK
    name = "None" if kind is type(None) else f"a {kind.__qualname__}"
    raise TypeError(
        f"{function}: {argument} is {name}, expected a NumPy, CuPy, PyTorch or JAX array or "
        "another object with __dlpack__"
    )
