# SPDX-License-Identifier: MIT
"""The codes of quantised results by their definition, and calls whose results are quantised."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cunorm
from cunorm import QuantizedNorm, reference
from tests.support.operands import DTYPES, Array, assert_same_bits, bits

QUANTIZED = ("float8_e4m3fn", "float8_e5m2", "int8")
SCALES = {"float32": np.dtype(np.float32), "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu)}
CODES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in QUANTIZED}
LARGEST = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "int8": 127}
LEAST = {"float8_e4m3fn": 1 / (448 * 512), "float8_e5m2": 1 / (448 * 512), "int8": 2.0**-23}


# --- codes ----------------------------------------------------------------------------------------


@cache
def magnitudes(dtype: str) -> Array:
    """Return what the codes from 0 on stand for, up to the largest number, in float64."""
    if dtype == "int8":
        return np.arange(128.0)
    fraction, bias = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15)}[dtype]
    codes = np.arange(128)
    exponents, fractions = codes >> fraction, codes & ((1 << fraction) - 1)
    normal = np.ldexp(fractions + (1 << fraction), exponents - bias - fraction)
    subnormal = np.ldexp(fractions, 1 - bias - fraction)
    found = np.where(exponents == 0, subnormal, normal)
    return found[found <= LARGEST[dtype]]


def midpoints(dtype: str) -> Array:
    """Return the numbers in the middle between two neighbouring codes, and beyond the last one."""
    found = magnitudes(dtype)
    middles = (found[1:] + found[:-1]) / 2
    return np.append(middles, found[-1] + (found[-1] - middles[-1]))


@np.errstate(invalid="ignore")  # signalling NaNs
def rounded(values: Array, dtype: str) -> Array:
    """Clamp values and round them to nearest even, by comparison with every midpoint."""
    middles, found = midpoints(dtype)[:-1], np.abs(values.astype(np.float64))
    below, upto = (np.searchsorted(middles, found, side) for side in ("left", "right"))
    code = np.where(below % 2 == 0, below, upto).astype(np.uint8)  # the two differ at a midpoint
    is_negative = np.signbit(values)
    negative = -code if dtype == "int8" else code | np.uint8(0x80)
    code = np.where(is_negative, negative, code)
    nan = np.uint8(0 if dtype == "int8" else 0x7F)
    return np.where(np.isnan(values), nan, code).view(CODES[dtype])


@cache
def interesting(dtype: str) -> Array:
    """Return all numbers of 16 bits, and every midpoint with its neighbours, as float32."""
    every = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore", over="ignore"):  # signalling NaNs
        patterns = [every.view(DTYPES[name]).astype(np.float32) for name in ("bfloat16", "float16")]
    near = np.concatenate([midpoints(dtype), magnitudes(dtype)]).astype(np.float32)
    near = [np.nextafter(near, np.float32(end)) for end in (-np.inf, np.inf)] + [near]
    return np.concatenate([*patterns, *near, *(-one for one in near)])


# --- calls ----------------------------------------------------------------------------------------

_OPERANDS = ("weight", "bias", "residual", "gate")
_OF_SCALE = ("dtype", "scale", "block", "scale_dtype", "absmax_bound")


class Expected(NamedTuple):
    """The results of the norm alone, and the oracle's q and scale of its y."""

    q: Array
    scale: Array | float
    y: Array
    residual: Array | None


def put(on: Any, array: Any) -> Any:
    """Place an array of any dtype; CuPy has 8-bit floats as views only."""
    return on.put(array) if isinstance(array, np.ndarray) else array


def get(on: Any, array: Any) -> Any:
    return on.get(array)


def expected_of(on: Any, arrays: dict[str, Any], **options: Any) -> Expected:
    """Return the right results of `normalize_quantized`; the arrays are those of `on`.

    y and residual are those of `normalize`, which has tests of its own.
    """
    of_scale = {name: options.pop(name) for name in _OF_SCALE if name in options}
    given = of_scale.get("scale")
    if given is not None and not isinstance(given, float):
        of_scale["scale"] = on.get(given)
    norm = cunorm.normalize_forward(**arrays, **options)
    y, stream = (None if one is None else on.get(one) for one in (norm.y, norm.residual))
    axes = {name: options[name] for name in ("axis", "groups") if name in options}
    q, scale = reference.quantize(y, **of_scale, **axes)
    return Expected(q, scale, y, stream)


def check_results(on: Any, result: QuantizedNorm[Any], expected: Expected, given: Any) -> None:
    """Compare all bits of q, scale, y and the stream; a given scale is returned as it is."""
    assert_same_bits(on.get(result.q), expected.q, "q")
    if given is None:
        assert_same_bits(on.get(result.scale), expected.scale, "scale")
    else:
        assert result.scale is given
    for name in ("y", "residual"):
        array, right = getattr(result, name), getattr(expected, name)
        if array is not None:
            assert_same_numbers(on.get(array), right, name)
    assert (result.residual is None) == (expected.residual is None)


def assert_same_numbers(actual: Array, expected: Array, what: str) -> None:
    """Compare bits, but not those of NaNs."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    are_nan = np.isnan(actual.astype(np.float64)) & np.isnan(expected.astype(np.float64))
    different = (bits(actual) != bits(expected)) & ~are_nan
    assert not different.any(), f"{what}: {np.argwhere(different)[:3]} differ"
