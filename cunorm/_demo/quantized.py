# SPDX-License-Identifier: MIT
"""Quantised rows as the demo checks them: how far q * scale may be from the exact norm."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cunorm import reference
from cunorm.reference.tolerance import U, ulp
from cunorm.results import QuantizedNorm

Array = NDArray[Any]
_DTYPE = "float8_e4m3fn"
_LARGEST = 448.0
_LEAST_SCALE = 1 / (_LARGEST * 512)


def dequantized(found: QuantizedNorm[Any]) -> Array:
    """Return q * scale as a NumPy array."""
    return reference.dequantize(_on_host(found.q), _on_host(found.scale))


def _on_host(array: Any) -> Array:
    if hasattr(array, "get"):  # CuPy has no kernels for 8-bit floats, but copies bytes
        array = array.view("uint8").get().view(array.dtype)
    return np.asarray(array)


def error_of(y: Array, error: Array) -> Array:
    """Return how far q * scale may be from y, if the rows that are quantised are off by `error`.

    Rounding adds half a step of q. The largest element of a row may be off, too, and then its scale
    is off. The scale, the quotient and q * scale are each rounded to float32.
    """
    a, off = (abs(one).max(axis=-1, keepdims=True) for one in (y, error))
    low, high = (
        np.maximum((a + sign * off) / _LARGEST * (1 + 2 * sign * U), _LEAST_SCALE)
        for sign in (-1, 1)
    )
    far = abs(y) + error
    return np.asarray(error + 0.5 * high * ulp(far / low, _DTYPE) + 4 * U * far)
