# SPDX-License-Identifier: MIT
"""Quantised results have the bits of "norm, then clamp, then cast", on a CPU and on a GPU."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import cunorm
from cunorm import reference
from tests.support.covers import Case, pairwise
from tests.support.operands import DTYPES, assert_same_bits, at, draw
from tests.support.placed import ROW_LAYOUTS
from tests.support.quantized import (
    LARGEST,
    QUANTIZED,
    SCALE_LAYOUTS,
    around,
    conversions,
    midpoints,
    norm_of_ones,
    quantized_call,
    rounded,
)

EPS = 2.0**-23  # of float32


def each(names: str, cases, in_ci) -> pytest.MarkDecorator:
    """Parametrize a test; each case is a build for a CPU, so CI has some of them."""
    marks = {case: () if case in in_ci else pytest.mark.exhaustive for case in cases}
    return pytest.mark.parametrize(names, [pytest.param(*c, marks=m) for c, m in marks.items()])


# --- every conversion -----------------------------------------------------------------------------

CONVERTED = (("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2"), ("float64", "int8"))
CONVERTED += (("float32", "int8"), ("float64", "float8_e4m3fn"))
FOUND = (("float8_e4m3fn", None), ("float8_e4m3fn", 32), ("float8_e5m2", 32), ("int8", None))
each_found = each("q, block", product(QUANTIZED, (None, 32)), FOUND)


@each("y, q", product(DTYPES, QUANTIZED), CONVERTED)
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 0.3])
@np.errstate(over="ignore", invalid="ignore")  # signalling NaNs
def test_every_number_of_16_bits_and_every_midpoint_is_converted_right(device, y, q, scale):
    """A GPU holds rows of 1024, and streams a single row."""
    values = conversions(y, q, scale)
    for rows in (values, values.reshape(1, -1)) if device.is_gpu else (values,):
        got, found, _ = norm_of_ones(device, rows, dtype=q, scale=scale)
        assert_same_bits(got, reference.quantize(found, dtype=q, scale=scale)[0])
        if scale != 0.3:  # quotients are exact
            assert_same_bits(got, rounded(found.astype(np.float64) / scale, q))


@each_found
@pytest.mark.parametrize("power", [0, 5, -12])
def test_midpoints_are_rounded_to_even_under_a_scale_that_is_found(device, q, block, power):
    """In each block the first number, which is the largest, makes the scale a power of two."""
    scale, columns = 2.0**power, block or 512
    near = around(midpoints(q)[:-1], np.dtype(np.float32))
    values = np.resize(np.concatenate([near, -near]), (-(-2 * near.size // 480), 480))
    values = np.resize(values, (values.size // (columns - 1) + 1, columns - 1))
    values = np.insert(values, 0, LARGEST[q], axis=-1) * np.float32(scale)
    values = np.resize(values, (-(-values.size // 512), 512))
    got, found, _ = norm_of_ones(device, values, dtype=q, block=block)
    assert_same_bits(got, rounded(found / scale, q))


# --- drawn calls ----------------------------------------------------------------------------------

# Each has a build or two for a CPU, besides that of the norm alone.
BFLOAT16 = {"x": "bfloat16", "weight": "bfloat16"}
CONFIGS: dict[str, Case] = {
    "rows, e4m3": BFLOAT16 | {"stream": "+ bfloat16"},
    "blocks of 128, e4m3": BFLOAT16 | {"block": 128},
    "MXFP8": BFLOAT16 | {"block": 32, "scale_dtype": "float8_e8m0fnu"},
    "centred rows, int8": {"q": "int8", "bias": "float32", "center": True, "return_y": False},
    "float64, powers of two": {
        **{"x": "float64", "weight": "float32", "q": "float8_e5m2", "return_y": False},
        **{"scale_dtype": "float8_e8m0fnu", "groups": 3},
    },
    "bounded blocks of 64, int8": {
        **{"q": "int8", "block": 64, "absmax_bound": 1.5, "groups": 2},
        **{"center": True, "weight": None, "far": True},
    },
    "given for rows, gated": {
        **{"x": "float16", "gate": "float32", "given_scale": "rows", "q": "float8_e5m2"},
        **{"round_before_weight": True, "weight": "float16"},
    },
    "given, rows of two axes": {"given_scale": "one", "axis": -2, "return_y": False},
}
BOTH = ("rows, e4m3", "blocks of 128, e4m3")  # with and without y
common = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@st.composite
def calls(draw, config: Case):
    """Draw what makes no other build: shapes, layouts, numbers, and arrays for some results."""
    pick = lambda *choices: draw(st.sampled_from(choices))  # noqa: E731
    width = 4 * draw(st.integers(1, 50)) if config.get("block") else draw(st.integers(1, 200))
    case = config | {"shape": (pick(1, 2, 3), pick(1, 2), pick(1, 5, 16), width)}
    layouts = [
        name for name in ROW_LAYOUTS if (case.get("groups", 1), name) != (2, "three strides")
    ]
    case["layouts"] = "contiguous" if case.get("axis") == -2 else pick(*layouts)
    if case.get("groups", 1) > 1 and case["layouts"] == "three strides":
        case["layouts"] = "padded"
    case |= {"offset": pick(0, 0, 1, 2, 4), "scales": pick(*SCALE_LAYOUTS)}
    case |= {"values": pick("normal", "tails", "equal", "zeros"), "scale": pick(1.0, 1e-6, 1e4)}
    names = ("q", "y", "residual") if case.get("return_y", True) else ("q",)
    names += () if "given_scale" in case else ("scale",)
    case["out"] = tuple(name for name in names if draw(st.booleans()))
    special = (None, np.nan, np.inf, -np.inf)
    return case, pick(*special), draw(st.integers(0, 1 << 20))


@np.errstate(all="ignore")
def check(device, drawn):
    case, value, index = drawn
    call = quantized_call(case, device)
    if value is not None:
        x = call.norm.inputs["x"].host
        x[np.unravel_index(index % x.size, x.shape)] = value
    with at(case, value):
        call.check()


@pytest.mark.parametrize("name", CONFIGS)
def test_drawn_calls_have_the_bits_of_the_norm_and_then_the_oracle(device, name):
    configs = [CONFIGS[name]]
    if name in BOTH:
        configs += [CONFIGS[name] | {"return_y": False}]
    for config in configs:

        @settings(common, max_examples=3 if device.is_gpu else 8)
        @given(drawn=calls(config))
        def check_examples(drawn):
            check(device, drawn)

        check_examples()


FACTORS = {
    "x": tuple(DTYPES),
    "weight": (None, "float32", "bfloat16", "float64"),
    "bias": (None, "float32"),
    "gate": (None, "float32", "bfloat16"),
    "gate_position": ("post", "pre", "branch"),
    "stream": (None, "+ float32", "as bfloat16"),
    "center": (False, True),
    "c": (None, 1.0),
    "weight_offset": (0.0, 1.0),
    "round_before_weight": (False, True),
    "groups": (1, 3),
    "q": QUANTIZED,
    "of_scale": ("row", "e8m0", "32", "64 e8m0", "128", "bound", "number", "one", "rows"),
    "return_y": (False, True),
}


def configs(number: int) -> list[Case]:
    """Return valid configurations from a cover of all pairs of choices."""
    names = random.Random(number).sample([*FACTORS], len(FACTORS))
    found = []
    for case in pairwise({name: FACTORS[name] for name in names}):
        kind, block = case.pop("of_scale").split(), None
        if kind[0].isdigit():
            block = int(kind[0])
        case |= {"block": block, "absmax_bound": 0.7 if kind == ["bound"] else None}
        if "e8m0" in kind and case["q"] != "int8":
            case["scale_dtype"] = "float8_e8m0fnu"
        if kind[0] in ("number", "one", "rows"):
            case["given_scale"] = 0.04 if kind == ["number"] else kind[0]
        if block and case["x"] == "float64":
            case["x"] = "float16"
        if case["weight"] is None:
            case |= {"weight_offset": 0.0, "round_before_weight": False}
        found.append(case)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(8))
def test_drawn_calls_of_all_pairs_of_options_have_the_right_bits(device, number):
    for index, config in enumerate(configs(number)):

        @seed(number)
        @settings(common, max_examples=4)
        @given(drawn=calls(config))
        def check_examples(drawn):
            check(device, drawn)

        with at(number, index):
            check_examples()


# --- the formulas of others -----------------------------------------------------------------------


def stream(device, width, dtype="bfloat16"):
    """Return x, residual and weight; some rows are zeros, tiny, or have a large element."""
    x = draw("x", (7, width), "float32", deviation=2.0)
    x[1], x[2], x[3, width // 2] = 0, x[2] * 1e-9, 90
    arrays = (x, 0.5 * np.roll(x, 3, -1), draw("weight", (width,), "float32", mean=1.0))
    return [device.put(array.astype(DTYPES[dtype])) for array in arrays]


def vllm(y, dtype, bound=np.inf):
    """Return q and scale of rows as vLLM's kernel for each token, computed in float64.

    scaled_fp8: scale = max(min(absmax, scale_ub) / 448, 1 / (448 * 512)), q = clamp(y / scale)
    int8: scale = max(absmax / 127, epsilon), q = round(y * (1 / scale))
    Each result is rounded to float32, because the kernel computes in float.
    """
    y = y.astype(np.float64)
    absmax = np.abs(y).max(-1, keepdims=True)
    if dtype == "int8":
        scale = np.maximum(absmax / 127, EPS).astype(np.float32)
        q = y * (1 / scale.astype(np.float64)).astype(np.float32)
        q = np.clip(np.rint(q.astype(np.float32)), -127, 127).astype(np.int8)
        return q, scale
    scale = np.maximum(np.minimum(absmax, bound) / 448, 1 / (448 * 512)).astype(np.float32)
    return rounded((y / scale.astype(np.float64)).astype(np.float32), dtype), scale


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float8_e4m3fn", None), ("float8_e4m3fn", 1.5), ("int8", None)]
)
def test_scales_of_rows_are_those_of_vllm_for_each_token(device, dtype, bound):
    x, residual, weight = stream(device, 200)
    options = {"dtype": dtype, "return_y": True, "absmax_bound": bound}
    result = cunorm.rms_norm_quantized(x, weight, residual=residual, **options)
    q, scale = vllm(device.get(result.y), dtype, bound or np.inf)
    assert_same_bits(device.get(result.scale), scale, "scale")
    assert_same_bits(device.get(result.q), q, "q")


@each("dtype", [("float8_e4m3fn",), ("int8",)], [("float8_e4m3fn",)])
def test_scales_of_blocks_are_those_of_vllm_for_each_group_of_128(device, dtype):
    x, _, weight = stream(device, 512)
    result = cunorm.rms_norm_quantized(x, weight, block=128, dtype=dtype, return_y=True)
    q, scale = vllm(device.get(result.y).reshape(-1, 128), dtype)
    assert_same_bits(device.get(result.scale), scale.reshape(7, 4), "scale")
    assert_same_bits(device.get(result.q), q.reshape(7, 512), "q")


@each("dtype", [("float8_e4m3fn",), ("float8_e5m2",)], [("float8_e4m3fn",)])
@pytest.mark.parametrize("width", [96, 100])
def test_mxfp8_has_the_least_powers_of_two_with_which_no_element_is_clamped(device, dtype, width):
    x, _, weight = stream(device, width)
    options = {"block": 32, "scale_dtype": "float8_e8m0fnu", "dtype": dtype, "return_y": True}
    result = cunorm.rms_norm_quantized(x, weight, **options)
    y, q = device.get(result.y).astype(np.float64), device.get(result.q)
    codes = device.get(result.scale).view(np.uint8)
    assert codes.shape == (7, -(-width // 32))
    for row, block in np.ndindex(codes.shape):
        columns = slice(32 * block, 32 * block + 32)
        largest = Fraction(np.abs(y[row, columns]).max())
        power = -127
        while Fraction(2) ** power * LARGEST[dtype] < largest:
            power += 1
        assert int(codes[row, block]) - 127 == power
        assert_same_bits(q[row, columns], rounded(y[row, columns] / 2.0**power, dtype))


@each("dtype", [("float8_e4m3fn",), ("float8_e5m2",)], [("float8_e4m3fn",)])
def test_a_scale_that_is_a_power_of_two_is_rounded_up_only_if_it_must(device, dtype):
    """Each block of bfloat16 has another largest element, the largest code times a power of two.

    Or it is a neighbour of that, or 0, subnormal, infinite or NaN.
    """
    powers = np.ldexp(float(LARGEST[dtype]), np.arange(-145, 112)).astype(DTYPES["bfloat16"])
    powers = powers[np.isfinite(powers) & (powers > 0)]
    near = [powers, np.nextafter(powers, 0), np.nextafter(powers, powers.dtype.type(np.inf))]
    special = np.array([0, 1, np.inf, -np.inf, np.nan], powers.dtype)
    largest = np.concatenate([*near, special])
    largest = largest[~np.isinf(largest) | np.isin(largest, special)]
    values = np.zeros((largest.size, 32), powers.dtype)
    values[:, 7], values[:, 20] = largest / powers.dtype.type(3), -largest
    options = {"block": 32, "scale_dtype": "float8_e8m0fnu", "dtype": dtype}
    got, found, scale = norm_of_ones(device, values.reshape(-1), **options)
    expected = reference.quantize(found, **options)
    assert_same_bits(got, expected[0])
    assert_same_bits(scale, expected[1])


# --- what results do not depend on ----------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_no_bit_of_a_row_depends_on_other_rows_or_on_where_it_lies(device, name):
    case = CONFIGS[name] | {"shape": (2, 2, 3, 100), "scale": 1e3, "axis": -1}
    if "given_scale" in case:
        case["given_scale"] = 0.037
    expected = quantized_call(case, device).check()
    arranged = [{"offset": 1}, {"layouts": "misaligned", "out": ("q", "scale"), "scales": "apart"}]
    if "given_scale" in case:
        arranged[1]["out"] = ("q",)
    for more in arranged:
        result = quantized_call(case | more, device).run()
        with at(more):
            assert_same_bits(result.q, expected.q, "q")
    picked = [7, 3, 3]
    result = quantized_call(case | {"picked": picked}, device).run()
    for field in ("q", "scale", "y"):
        whole, some = getattr(expected, field), getattr(result, field)
        if isinstance(whole, np.ndarray):
            rows = whole.reshape(12, -1)[picked]
            assert_same_bits(some.reshape(rows.shape), rows, field)


@each_found
def test_special_values_are_quantised_as_documented(device, q, block):
    values = np.ones((6, 64), np.float32)
    values[0], values[1, 5], values[2, 5], values[3, 7] = 0, np.nan, np.inf, -np.inf
    values[4], values[5] = 2.0**-149, 3e38
    x, weight = device.put(np.ones_like(values)), device.put(values)
    options = {"dtype": q, "block": block, "eps": 0.0, "return_y": True}
    result = cunorm.rms_norm_quantized(x, weight, **options)
    codes, scales = (device.get(array) for array in (result.q, result.scale))
    nan, numbers = 0 if q == "int8" else 0x7F, codes.astype(np.float32)
    first, codes = slice(block), codes.view(np.uint8)
    least = np.float32(EPS if q == "int8" else 1 / (448 * 512))
    assert (scales[0] == least).all() and (scales[4] == least).all()
    assert not codes[0].any() and not codes[4].any()
    assert np.isnan(scales[1, 0]) and (codes[1, first] == nan).all()
    assert scales[2, 0] == scales[3, 0] == np.inf
    assert codes[2, 5] == codes[3, 7] == nan
    assert not np.delete(numbers[2, first], 5).any()  # 1 / infinity
    assert (numbers[5] == LARGEST[q]).all()
    if block:
        assert (scales[1:4, 1] == np.float32(1) / np.float32(LARGEST[q])).all()
        assert (numbers[1:4, block:] == LARGEST[q]).all()


@each("q", [(q,) for q in QUANTIZED], [("int8",)])
def test_a_given_scale_saturates_infinity_and_keeps_each_nan_to_itself(device, q):
    values = np.float32([[1, np.nan, np.inf, -np.inf, 3e38, -2], [1, 2, 3, 4, 5, 6]])
    x, weight = device.put(np.ones_like(values)), device.put(values)
    options = {"dtype": q, "scale": 0.5, "eps": 0.0, "return_y": True}
    codes = device.get(cunorm.rms_norm_quantized(x, weight, **options).q)
    assert codes.view(np.uint8)[0, 1] == (0 if q == "int8" else 0x7F)
    numbers, largest = codes.astype(np.float32), LARGEST[q]
    assert numbers[0, [0, 2, 3, 4, 5]].tolist() == [2, largest, -largest, largest, -4]
    assert numbers[1].tolist() == [2, 4, 6, 8, 10, 12]
