# SPDX-License-Identifier: MIT
"""The arrays that callers give: of JAX, traced or not, or of NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cunorm._core.dtypes import dtype_of
from cunorm.jax._op import Array


def check(function: str, names: Sequence[str], arrays: Sequence[Any], required: int) -> None:
    """Refuse what is no array; all but the first `required` may be None."""
    for place, (name, array) in enumerate(zip(names, arrays, strict=True)):
        if isinstance(array, jax.Array | np.ndarray) or (array is None and place >= required):
            continue
        got = "None" if array is None else f"of type {type(array).__qualname__}"
        raise TypeError(f"{function}: {name} is {got}, expected a JAX or NumPy array")


def described(
    function: str, names: Sequence[str], arrays: Sequence[Any]
) -> tuple[Array | None, ...]:
    """Return shapes and dtypes; a dtype that no kernel reads is an error."""
    both = zip(names, arrays, strict=True)
    return tuple(None if array is None else _one(function, name, array) for name, array in both)


def _one(function: str, name: str, array: Any) -> Array:
    if not all(isinstance(size, int) for size in array.shape):
        raise TypeError(
            f"{function}: {name} has shape {array.shape}, expected sizes that are known: export "
            "the function for each of the shapes"
        )
    return Array(array.shape, dtype_of(function, name, array.dtype).name)
