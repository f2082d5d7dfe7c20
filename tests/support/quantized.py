# SPDX-License-Identifier: MIT
"""The codes of quantised results by their definition, and calls whose results are quantised."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cunorm
from cunorm import QuantizedNorm, reference
from tests.support import cases
from tests.support.cases import Call, call_of
from tests.support.covers import Case
from tests.support.operands import DTYPES, Array, assert_same_bits, bits
from tests.support.placed import ROW_LAYOUTS, Placed

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


def around(numbers: Array, dtype: np.dtype[Any]) -> Array:
    """Return numbers with three neighbours on each side, in a dtype."""
    found = [numbers.astype(dtype)]
    for end in (0, np.inf):
        near = found[0]
        for _ in range(3):
            near = np.nextafter(near, dtype.type(end))
            found.append(near)
    return np.concatenate(found)


@np.errstate(invalid="ignore", over="ignore")  # signalling NaNs
def conversions(y: str, q: str, scale: float) -> Array:
    """Return rows of 1024 numbers of a dtype: all of 16 bits, or every midpoint times the scale."""
    dtype = DTYPES[y]
    if dtype.itemsize == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(-1, 1024)
    near = around(np.float32(scale) * np.append(midpoints(q), magnitudes(q)), dtype)
    values = np.concatenate([interesting(q).astype(dtype), near, -near])
    return np.resize(values, (-(-values.size // 1024), 1024))


@np.errstate(invalid="ignore", over="ignore")
def norm_of_ones(on: Any, values: Array, **options: Any) -> tuple[Array, Array, Array | None]:
    """Return q, y and scale of rows of ones, whose y are the rows of their weight."""
    x, weight = on.put(np.ones_like(values)), on.put(values)
    result = cunorm.rms_norm_quantized(x, weight, eps=0.0, return_y=True, **options)
    q, y = on.get(result.q), on.get(result.y)
    is_kept = ~np.isnan(values)
    assert_same_bits(np.isnan(y), ~is_kept)
    if on.is_gpu and values.dtype != np.float64:  # subnormal numbers become 0
        is_kept &= (np.abs(values.astype(np.float32)) >= 2.0**-126) | (values == 0)
    assert_same_bits(y[is_kept], values[is_kept], "y")
    return q, y, None if isinstance(result.scale, float) else on.get(result.scale)


# --- calls ----------------------------------------------------------------------------------------

# A case has these fields besides those of a forward's case (see cases.py). `given_scale` is None, a
# number, "one" for an array of one element, or "rows" for one number for each row; `scales` says
# how the array of scales lies in memory. `out` has the names of the results that get arrays.
DEFAULTS = cases.DEFAULTS | {
    **{"q": "float8_e4m3fn", "given_scale": None, "block": None, "scale_dtype": "float32"},
    **{"absmax_bound": None, "return_y": True, "out": (), "scales": "contiguous"},
    **{"given": (), "bias": None},
}
SCALE_LAYOUTS: dict[str, Any] = {
    "contiguous": np.empty,
    # The scales of the rows side by side, for each block.
    "columns": lambda shape, dtype: np.moveaxis(np.empty((shape[-1], *shape[:-1]), dtype), 0, -1),
    "apart": lambda shape, dtype: np.empty((*shape[:-1], 3 * shape[-1]), dtype)[..., ::3],
    "reversed": lambda shape, dtype: np.empty(shape, dtype)[::-1, :, :, ::-1],
}


class QuantizedCall(NamedTuple):
    """A call with a quantised result, and the call of the same norm that returns y alone."""

    norm: Call
    call: Call
    of_scale: dict[str, Any]  # what the oracle needs besides y

    def expected(self) -> QuantizedNorm[Any]:
        """Return the norm's own y and stream, and the oracle's q and scale of this y.

        With a weight of float64, y may be float64 though it is computed in float32.
        """
        norm = self.norm.run()
        y, inputs = norm.y, (self.norm.inputs["x"], self.norm.inputs["residual"])
        if not any(one and one.host.dtype == np.float64 for one in inputs):
            y = y.astype(min(y.dtype, np.dtype(np.float32), key=lambda one: one.itemsize))
        q, scale = reference.quantize(y, **self.of_scale)
        return QuantizedNorm(q, scale, norm.y, norm.residual)

    def run(self) -> QuantizedNorm[Any]:
        """Make the call, and return its results; a number as scale is no result."""
        result, given = self.call.run(), self.call.options.get("scale")
        if given is None:
            return result
        assert result.scale is given
        return result._replace(scale=None)

    def check(self) -> QuantizedNorm[Any]:
        """Make the call, compare all bits of its results, and return them."""
        expected, call, result = self.expected(), self.call, self.run()
        assert_same_bits(result.q, expected.q, "q")
        if result.scale is not None:
            assert_same_numbers(result.scale, expected.scale, "scale")
        assert (result.y is not None) == bool(call.options["return_y"] or call.out.y)
        if result.y is not None:
            assert_same_numbers(result.y, expected.y, "y")
        assert (result.residual is None) == (expected.residual is None)
        if result.residual is not None:
            assert_same_numbers(result.residual, expected.residual, "residual")
        return result


def quantized_call(case: Case, on: Any) -> QuantizedCall:
    """Place the arrays of a call, those of the norm's call and those of its own results."""
    case = DEFAULTS | case
    norm = call_of("row_norm_forward", case, on)
    x = norm.inputs["x"].host
    of_scale = {name: case[name] for name in ("block", "scale_dtype", "absmax_bound")}
    options = norm.options | of_scale | {"dtype": case["q"], "return_y": case["return_y"]}
    of_scale |= {"dtype": case["q"], "axis": case["axis"], "groups": case["groups"]}
    arrays, layout = [*norm.arrays], SCALE_LAYOUTS[case["scales"]]

    def placed(like: Array, values: Array | None = None) -> Placed:
        arrays.append(Placed(on, like, values, case["offset"]))
        return arrays[-1]

    inputs, out = dict(norm.inputs), {"y": norm.out.y, "residual": norm.out.residual}
    given = _given_scale(case, x)
    of_scale["scale"] = given
    if isinstance(given, np.ndarray):
        is_one = given.size == 1
        inputs["scale"] = placed(given if is_one else layout(given.shape, given.dtype), given)
    else:
        options["scale"] = given
    like_x = _layout_of_results(case)
    if "q" in case["out"]:
        out["q"] = placed(like_x(x.shape, CODES[case["q"]]))
    if "scale" in case["out"]:
        shape = reference.quantize(np.zeros(x.shape, np.float32), **of_scale)[1].shape
        out["scale"] = placed(layout(shape, SCALES[case["scale_dtype"]]))
    if "y" in case["out"] and not out["y"]:
        out["y"] = placed(like_x(x.shape, _y_dtype(case)))
    results = QuantizedNorm(*(out.get(name) for name in QuantizedNorm._fields))
    own = norm._replace(
        **{"function": cunorm.normalize_quantized, "inputs": inputs, "options": options},
        **{"out": results, "arrays": arrays},
    )
    return QuantizedCall(norm, own, of_scale)


def _y_dtype(case: Case) -> np.dtype[Any]:
    """Return y's own dtype: that of x or, if x is rounded before the weight, of their product."""
    x, weight = case["x"], case["weight"]
    if not case["round_before_weight"] or weight in (None, x):
        return DTYPES[x]
    return DTYPES["float64" if "float64" in (x, weight) else "float32"]


def _layout_of_results(case: Case) -> Any:
    """Return the layout of q and y; it is contiguous if x's is not one of rows by name."""
    layout = case["layouts"] if isinstance(case["layouts"], str) else "contiguous"
    return ROW_LAYOUTS["contiguous" if layout == "expanded" else layout]


def _given_scale(case: Case, x: Array) -> Any:
    if case["given_scale"] == "one":
        return np.full((1, 1), 0.37, np.float32)
    if case["given_scale"] != "rows":
        return case["given_scale"]
    axis = case["axis"] % x.ndim
    shape = (*x.shape[:axis], *(1,) * (x.ndim - axis - 1), case["groups"])
    exponents = np.random.default_rng(0).uniform(-9, 3, shape)
    return np.exp2(exponents).astype(np.float32)


def assert_same_numbers(actual: Array, expected: Array, what: str) -> None:
    """Compare bits, but not those of NaNs."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    with np.errstate(invalid="ignore"):
        are_nan = np.isnan(actual.astype(np.float64)) & np.isnan(expected.astype(np.float64))
    different = (bits(actual) != bits(expected)) & ~are_nan
    assert not different.any(), f"{what}: {np.count_nonzero(different)} elements differ"
