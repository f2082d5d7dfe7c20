# SPDX-License-Identifier: MIT
"""Memory of quantised results: given arrays, in place, overlaps, plans for other rows."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

import cunorm
from cunorm import QuantizedNorm, reference
from tests.support.calls import call_uncached
from tests.support.gpu_arrays import CPU, GPUS
from tests.support.operands import DTYPES, assert_same_bits, at, draw
from tests.support.placed import ROW_LAYOUTS
from tests.support.quantized import CODES, SCALE_LAYOUTS, SCALES, quantized_call

BFLOAT16 = {"x": "bfloat16", "weight": "bfloat16"}
ROWS = BFLOAT16 | {"stream": "+ bfloat16", "shape": (2, 1, 5, 100)}
RESULTS = ("q", "scale", "y", "residual")


@pytest.fixture(params=[CPU, GPUS[0]])
def device(request):
    """Return the CPU with NumPy arrays, or a GPU with CuPy arrays."""
    return request.param()


def empty(device, shape, dtype):
    return device.put(np.zeros(shape, np.uint8)).view(dtype)


# --- given arrays ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(5))
def test_results_are_written_to_given_arrays_and_others_are_allocated(device, count):
    for names in combinations(RESULTS, count):
        norm = [name for name in names if name in ("y", "residual")]
        made = quantized_call(ROWS | {"out": names, "given": norm}, device)
        with at(names):
            made.check()
            call = made.call
            result = call.function(**call.arguments())
            for name in names:
                assert getattr(result, name) is getattr(call.out, name).array


@pytest.mark.parametrize("scales", SCALE_LAYOUTS)
def test_scales_of_blocks_may_lie_anywhere(device, scales):
    case = BFLOAT16 | {"block": 32, "scale_dtype": "float8_e8m0fnu", "shape": (2, 3, 4, 100)}
    for more in ({}, {"groups": 3}, {"shape": (1, 1, 9, 260)}):
        quantized_call(case | {"out": ("scale",), "scales": scales} | more, device).check()


@pytest.mark.parametrize("over", ["x", "all"])
def test_y_and_the_stream_may_be_written_over_their_inputs(device, over):
    expected = quantized_call(ROWS, device).check()
    for more in ({}, {"layouts": "padded"}, {"shape": (1, 1, 2, 100), "picked": None}):
        result = quantized_call(ROWS | {"in_place": over} | more, device).check()
        if not more:
            assert_same_bits(result.q, expected.q, "q")


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
def test_q_may_have_any_layout_of_rows(device, layout):
    case = ROWS | {"layouts": layout, "out": ("q", "scale"), "shape": (2, 3, 4, 100)}
    quantized_call(case | {"scales": "apart", "offset": 1}, device).check()


def test_a_result_that_overlaps_another_array_is_refused():
    memory = np.zeros(1 << 12, np.uint8)

    def at_byte(first, dtype, width=64):
        size = 4 * width * np.dtype(dtype).itemsize
        return memory[first : first + size].view(dtype).reshape(4, width)

    x = at_byte(0, np.float32)
    right = {"q": at_byte(1024, np.int8), "scale": at_byte(1280, np.float32, 1)}
    cunorm.rms_norm_quantized(x, dtype="int8", out=QuantizedNorm(**right, y=x))
    wrong = [("q", at_byte(1023, np.int8)), ("q", x.view(np.int8)[:, :64])]
    wrong += [("scale", at_byte(1276, np.float32, 1)), ("y", at_byte(4, np.float32))]
    for name, array in wrong:
        given, before = right | {name: array}, memory.copy()
        with at(name), pytest.raises(ValueError, match=r"^rms_norm_quantized: out\.\w+ overlaps"):
            cunorm.rms_norm_quantized(x, dtype="int8", out=QuantizedNorm(**given))
        assert_same_bits(memory, before, name)


# --- no rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_rows_have_empty_results(device, shape):
    x = device.put(np.zeros(shape, np.float32))
    lead = shape[:-1]
    rows = device.put(np.ones((*lead, 1), np.float32))
    one = device.put(np.ones(1, np.float32))
    for scale in (None, 0.5, one, rows):
        result = cunorm.rms_norm_quantized(x, residual=x, scale=scale, return_y=True)
        assert result.q.shape == result.y.shape == result.residual.shape == shape
        assert result.q.dtype == CODES["float8_e4m3fn"]
        if scale is None:
            assert result.scale.shape == (*lead, 1)
        else:
            assert result.scale is scale
    options = {"block": 32, "scale_dtype": "float8_e8m0fnu"}
    out = QuantizedNorm(empty(device, shape, CODES["float8_e5m2"]))
    result = cunorm.rms_norm_quantized(x, dtype="float8_e5m2", **options, out=out)
    assert result.q is out.q
    assert (result.scale.shape, result.scale.dtype) == ((*lead, 2), SCALES["float8_e8m0fnu"])


# --- plans for other rows -------------------------------------------------------------------------

OPTIONS = {
    "rows": {},
    "blocks": {"block": 128},
    "number": {"scale": 0.25},
    "one": {"scale": "one"},
    "each row": {"scale": "each"},
}
KEPT = {"rows": "bfloat16", "blocks": "bfloat16"}  # other x are float32


def arrays_of(device, name, rows, **more):
    """Return the arguments of a call on contiguous rows."""
    dtype = DTYPES[KEPT.get(name, "float32")]
    x = draw(f"x {rows}", (rows, 164), "float32").astype(dtype)
    given = {"x": x, "weight": x[0].copy()} | OPTIONS[name] | more
    if given.get("scale") == "one":
        given["scale"] = np.full(1, 0.25, np.float32)
    elif given.get("scale") == "each":
        given["scale"] = (1 + np.arange(rows, dtype=np.float32))[:, None] / 64
    if name == "rows":
        given["residual"] = x[::-1].copy()
    found = {k: device.put(one) if isinstance(one, np.ndarray) else one for k, one in given.items()}
    return given, found


def check_same(device, result, given, expected):
    """Compare a result with that of a call that is planned, and q with the oracle."""
    for name in ("q", "residual"):
        one, other = getattr(result, name), getattr(expected, name)
        if other is not None:
            assert_same_bits(device.get(one), device.get(other), name)
    if given.get("scale") is None:
        assert_same_bits(device.get(result.scale), device.get(expected.scale), "scale")


@pytest.mark.parametrize("name", OPTIONS)
def test_a_new_number_of_rows_is_not_planned_and_has_the_results_of_its_own_plan(
    device, name, planned
):
    _, first = arrays_of(device, name, 40)
    cunorm.rms_norm_quantized(**first)
    for rows in (41, 16, 100, 17, 40):
        given, arrays = arrays_of(device, name, rows)
        count = len(planned)
        result = cunorm.rms_norm_quantized(**arrays)
        assert len(planned) == count
        assert result.q.shape == (rows, 164)
        with at(rows):
            expected = call_uncached(cunorm.rms_norm_quantized, **arrays)
            check_same(device, result, given, expected)


@pytest.mark.parametrize("name", ["rows", "blocks"])
def test_given_results_of_another_number_of_rows_are_checked_and_written(device, name):
    for rows in (40, 41, 23):
        given, arrays = arrays_of(device, name, rows)
        expected = call_uncached(cunorm.rms_norm_quantized, **arrays)
        scale = device.put(np.zeros(expected.scale.shape, np.float32))
        out = QuantizedNorm(empty(device, (rows, 164), CODES["float8_e4m3fn"]), scale)
        for _ in range(2):
            result = cunorm.rms_norm_quantized(**arrays, out=out)
            assert result.q is out.q and result.scale is scale
            check_same(device, result, given, expected)
        wrong = QuantizedNorm(scale=device.put(np.zeros((rows + 1, 1), np.float32)))
        with pytest.raises(ValueError, match=r"^rms_norm_quantized: out\.scale has shape"):
            cunorm.rms_norm_quantized(**arrays, out=wrong)


@pytest.mark.parametrize("first", ["one", "each"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_single_scale_is_not_taken_for_the_scales_of_rows(device, axis, first, planned):
    """Both have the same shape behind the axes before a row."""
    kinds = ("one", "each") if first == "one" else ("each", "one")
    for rows, kind in ((6, kinds[0]), (6, kinds[1]), (7, kinds[0]), (7, kinds[1])):
        shape = (rows, 164) if axis == -1 else (rows, 2, 82)
        x = draw(f"x {rows}", shape, "float32")
        weight, ones = x[0].copy(), (1,) * -axis
        scale = np.float32(0.125).reshape(ones)
        if kind == "each":
            scale = (1 + np.arange(rows, dtype=np.float32)).reshape(rows, *ones) / 16
        arrays = [device.put(array) for array in (x, weight)]
        y = device.get(cunorm.rms_norm(*arrays, axis=axis))
        result = cunorm.rms_norm_quantized(*arrays, axis=axis, scale=device.put(scale))
        q, _ = reference.quantize(y, scale=scale, axis=axis)
        with at(rows, kind):
            assert_same_bits(device.get(result.q), q, "q")


def test_a_result_may_lie_right_behind_a_single_scale_for_any_number_of_rows():
    memory = np.zeros(50 * 164 + 4, np.uint8)
    scale = memory[:4].view(np.float32)
    scale[0] = 0.25
    for rows in (40, 41):
        x = draw(f"x {rows}", (rows, 164), "float32")
        q = memory[4 : 4 + rows * 164].reshape(rows, 164).view(CODES["float8_e4m3fn"])
        result = cunorm.rms_norm_quantized(x, x[0].copy(), scale=scale, out=QuantizedNorm(q))
        assert result.q is q
