# SPDX-License-Identifier: MIT
"""Quantisation as written down: the oracle for norms with quantised results."""

from __future__ import annotations  # keeps the names of type aliases in help()

from math import prod
from typing import NamedTuple

import numpy as np

from cunorm.reference import rows
from cunorm.reference.rows import Array

Quantized = tuple[Array, Array]  # q and scale


class _Format(NamedTuple):
    """A dtype of q: its largest magnitude, and the least scale that is found."""

    largest: float
    least_scale: float


_FORMATS = {
    "float8_e4m3fn": _Format(448.0, 1 / (448 * 512)),
    "float8_e5m2": _Format(57344.0, 1 / (448 * 512)),
    "int8": _Format(127.0, 2.0**-23),
}


@np.errstate(all="ignore")
def quantize(
    y: Array,
    *,
    dtype: str = "float8_e4m3fn",
    scale: float | Array | None = None,
    block: int | None = None,
    scale_dtype: str = "float32",
    absmax_bound: float | None = None,
    axis: int = -1,
    groups: int = 1,
) -> Quantized:
    """Return q and scale of rows y, by the formulas and with the roundings of the kernels.

    A scale that is not given is found for each row, or for each `block` of columns::

        a = max |y|, at most absmax_bound
        scale = max(a / largest, least)           float32
        scale = 2 ** ceil(log2(a / largest))      float8_e8m0fnu: at least 2 ** -127
        q = y / scale                             int8: y * (1 / scale)

    q is clamped to +-largest and rounded to nearest even; NaN has the bits 0x7f, in int8 it is 0.
    A scale of float8_e8m0fnu is NaN if it would be NaN or more than 2 ** 127.
    Everything is computed in float64 if y is float64, else in float32.

    >>> import numpy as np
    >>> from cunorm import reference
    >>> q, scale = reference.quantize(np.float32([[1, -127]]), dtype="int8")
    >>> q, scale
    (array([[   1, -127]], dtype=int8), array([[1.]], dtype=float32))
    """
    compute = np.float64 if y.dtype == np.float64 else np.float32
    lead = y.shape[: axis % y.ndim]
    wide = y.astype(compute).reshape(*lead, groups, prod(y.shape[len(lead) :]) // groups)
    if scale is None:
        found = _scales(np.abs(wide), block, dtype, scale_dtype, absmax_bound)
        ones = (1,) * (y.ndim - len(lead) - 1)
        result = found.reshape(*lead, *ones, groups * found.shape[-1])
        each = np.repeat(found.astype(compute), block or wide.shape[-1], axis=-1)
        each = each[..., : wide.shape[-1]]
    else:
        result = np.asarray(scale, np.float32)
        each = result.astype(compute)
        each = each if each.size == 1 else each.reshape(*lead, each.shape[-1], 1)
    quotient = wide * np.reciprocal(each) if dtype == "int8" else wide / each
    return _rounded(quotient, dtype).reshape(y.shape), result


def dequantize(
    q: Array, scale: float | Array, *, block: int | None = None, groups: int = 1
) -> Array:
    """Return q * scale in float32, for NumPy arrays whose rows are the last axis.

    A scale of blocks or groups is repeated over their columns.
    """
    wide = np.asarray(scale).astype(np.float32)
    if wide.size == 1:
        return np.asarray(q.astype(np.float32) * wide)
    width = q.shape[-1] // groups
    blocks = -(-width // (block or width))
    if wide.shape != (*q.shape[:-1], groups * blocks):
        raise ValueError(
            f"dequantize: scale has shape {wide.shape}, expected {(*q.shape[:-1], groups * blocks)}"
        )
    each = np.repeat(wide.reshape(*q.shape[:-1], groups, blocks), block or width, axis=-1)
    return np.asarray(q.astype(np.float32) * each[..., :width].reshape(q.shape))


def _scales(
    magnitudes: Array, block: int | None, dtype: str, scale_dtype: str, bound: float | None
) -> Array:
    """Return the scales of blocks of the last axis."""
    starts = range(0, magnitudes.shape[-1], block or magnitudes.shape[-1])
    a = np.maximum.reduceat(magnitudes, starts, axis=-1)  # NaN if any is
    if bound is not None:
        a = np.where(a > a.dtype.type(bound), a.dtype.type(bound), a)
    largest, least = _FORMATS[dtype]
    if scale_dtype == "float32":
        found = (a / a.dtype.type(largest)).astype(np.float32)
        return np.asarray(np.maximum(found, np.float32(least)))
    return _powers_of_two(a, largest)


def _powers_of_two(a: Array, largest: float) -> Array:
    """Return the least powers of two that are at least a / largest, as float8_e8m0fnu."""
    fraction, exponent = np.frexp(a)
    own_fraction, own_exponent = np.frexp(largest)
    power = np.where(a > 0, exponent - own_exponent + (fraction > own_fraction), -127)
    is_known = np.isfinite(a) & (power <= 127)
    codes = np.where(is_known, np.maximum(power, -127) + 127, 255)
    return np.asarray(codes.astype(np.uint8).view(np.dtype("float8_e8m0fnu")))


def _rounded(values: Array, dtype: str) -> Array:
    """Clamp values, and round them to the dtype of q."""
    largest, is_nan = _FORMATS[dtype].largest, np.isnan(values)
    clamped = np.clip(values, -largest, largest)
    if dtype == "int8":
        return np.where(is_nan, 0, np.rint(clamped)).astype(np.int8)
    bits = rows.round_to(clamped, np.dtype(dtype)).view(np.uint8)
    return np.where(is_nan, np.uint8(0x7F), bits).view(np.dtype(dtype))
