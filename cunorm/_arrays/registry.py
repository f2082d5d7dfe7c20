# SPDX-License-Identifier: MIT
"""Finds the adapter of a type of array by the root module of the type or of a base, and caches it.

A search imports only libraries that the caller has imported.
"""

from collections.abc import Sequence
from importlib import import_module
from weakref import WeakKeyDictionary

from cunorm._arrays.adapter import ArrayAdapter
from cunorm._arrays.cupy import CUPY
from cunorm._arrays.dlpack import DLPACK
from cunorm._arrays.numpy import NUMPY
from cunorm._core.tensor import WIDEST_ACCESS, ArrayView
from cunorm._core.validate import array_hint, describe_type

# An adapter, or the module whose ADAPTER is imported when needed. JAX's is in a higher layer.
_ROOTS: dict[str, ArrayAdapter | str] = {
    "numpy": NUMPY,
    "cupy": CUPY,
    "torch": "cunorm._arrays.torch",
    "jax": "cunorm.jax._adapter",
    "jaxlib": "cunorm.jax._adapter",
}
library_types: dict[type, ArrayAdapter] = {}  # types that the libraries define
_user_types: WeakKeyDictionary[type, ArrayAdapter] = WeakKeyDictionary()


def adapter_of(function: str, argument: str, array: object) -> ArrayAdapter:
    """Return the adapter of an array's type.

    Raise a TypeError for other objects, and for arrays that are more than their memory (masked
    arrays, tensor subclasses, tracers).
    """
    kind = type(array)
    adapter = library_types.get(kind) or _user_types.get(kind)
    if adapter is None:
        adapter = _find(function, argument, kind)
        if adapter is None:
            raise TypeError(
                f"{function}: {argument} is {describe_type(kind)}, expected a NumPy, CuPy, PyTorch "
                "or JAX array or another object with __dlpack__"
                f"{array_hint(function, argument, array)}"
            )
        of_library = kind.__module__.partition(".")[0] in _ROOTS
        (library_types if of_library else _user_types)[kind] = adapter
    return adapter


def _find(function: str, argument: str, kind: type) -> ArrayAdapter | None:
    for base in kind.__mro__:
        adapter = _ROOTS.get(base.__module__.partition(".")[0])
        if isinstance(adapter, str):
            adapter = import_module(adapter).ADAPTER
        if adapter is not None and adapter.accepts(function, argument, kind):
            return adapter
    return DLPACK if DLPACK.accepts(function, argument, kind) else None


def view(function: str, argument: str, array: object) -> ArrayView:
    """Return the view of an array; refuse arrays that no kernel can read."""
    return adapter_of(function, argument, array).view(function, argument, array)


def view_all(
    function: str, arguments: Sequence[str], arrays: Sequence[object], required: Sequence[bool]
) -> list[ArrayView | None]:
    """Return the views of arrays; arrays that are not required may be None."""
    return [
        None if array is None and not is_required else view(function, argument, array)
        for argument, array, is_required in zip(arguments, arrays, required, strict=True)
    ]


def view_workspace(function: str, array: object) -> ArrayView:
    """Return the view of an array that a call may use as memory: contiguous and writable.

    NumPy and CuPy arrays may have any dtype of numbers; tensors uint8 or one of the kernels' four.
    """
    adapter = adapter_of(function, "workspace", array)
    workspace = adapter.workspace_view(function, "workspace", array)
    if not workspace.writable or workspace.pointer % WIDEST_ACCESS:
        raise ValueError(
            f"{function}: workspace cannot be used in place, expected a writable array whose "
            f"address is a multiple of {WIDEST_ACCESS} (JAX arrays are immutable)"
        )
    return workspace
