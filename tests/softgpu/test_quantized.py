# SPDX-License-Identifier: MIT
"""What quantised results need: 8-bit floats, maxima of 16-bit floats, bytes, shuffles."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests import softgpu
from tests.softgpu.launching import cupy, launch
from tests.softgpu.test_arithmetic import run
from tests.support.internals import _cuda

# For each 8-bit float of PTX: its dtype.
FLOAT8 = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}
CONVERT = """const float* x, unsigned short* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) asm("cvt.rn.satfinite.%s.f32 %%0, %%1, %%2;"
                   : "=h"(y[i]) : "f"(x[i]), "f"(x[n - 1 - i])); }"""


def many_floats(dtype: np.dtype) -> np.ndarray:
    """Return all numbers of 16-bit types, the midpoints of an 8-bit type, and their neighbours."""
    patterns = np.arange(2**16, dtype="u2")
    codes = np.arange(2**8, dtype="u1").view(dtype).astype("f4")
    codes = np.unique(codes[np.isfinite(codes)])
    exact = np.concatenate([codes, (codes[1:] + codes[:-1]) / 2])
    around = [np.nextafter(exact, np.float32(to)) for to in (-np.inf, np.inf)]
    halves = [patterns.view(kind).astype("f4") for kind in ("f2", ml_dtypes.bfloat16)]
    return np.concatenate([*halves, exact, *around])


@pytest.mark.parametrize("name", FLOAT8)
def test_floats_become_the_nearest_8_bit_float_or_the_largest(name):
    """The first operand becomes the upper byte, and the second one the lower byte."""
    dtype = np.dtype(FLOAT8[name])
    x = many_floats(dtype)
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    y = cupy.zeros(x.size, "u2")
    launch(CONVERT % name, cupy.asarray(x), y, np.int32(x.size), grid=-(-x.size // 256), block=256)
    numbers = np.where(np.isnan(x), 0, np.clip(x, -largest, largest))
    codes = np.where(np.isnan(x), 0x7F, numbers.astype(dtype).view("u1")).astype("u2")
    np.testing.assert_array_equal(y.get(), codes << 8 | codes[::-1])


# For each type of 16 bits in PTX: its dtype, and how the C++ header of the type names it.
FLOAT16 = {
    "f16x2": (np.dtype("f2"), "__half2", "cuda_fp16.h"),
    "bf16x2": (np.dtype(ml_dtypes.bfloat16), "__nv_bfloat162", "cuda_bf16.h"),
}
PAIRS = """const unsigned* a, const unsigned* b, unsigned* y, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {statement} }}"""
INSTRUCTION = 'asm("{}.{} %0, %1, %2;" : "=r"(y[i]) : "r"(a[i]), "r"(b[i]));'


def pairs_of_floats(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs of some special bits, and then random ones. An even number in all."""
    one, infinity = (int(np.array(v, dtype).view("u2")) for v in (1, np.inf))
    some = [0, 1, 2, one - 1, one, one + 1, infinity - 1, infinity, infinity + 1, 0x7E00, 0x7FFF]
    some = np.array([v | sign for v in some for sign in (0, 0x8000)], "u2")
    drawn = np.random.default_rng(5).integers(0, 2**16, (2, 2**14), "u2")
    special = (v.ravel() for v in np.meshgrid(some, some))
    return tuple(np.concatenate(both) for both in zip(special, drawn, strict=True))


def pairwise(name: str, statement: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return bits, as arguments, and the results of a statement, two of them in each word."""
    a, b = pairs_of_floats(FLOAT16[name][0])
    y = cupy.zeros(a.size // 2, "u4")
    words = [cupy.asarray(v.view("u4")) for v in (a, b)]
    text = PAIRS.format(statement=statement)
    launch(text, *words, y, np.int32(y.size), grid=-(-y.size // 256), block=256)
    return a, b, y.get().view("u2")


def larger_bits(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the bits of the larger number, 0 rather than -0, or the canonical NaN."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide = [v.view(dtype).astype("f8") for v in (a, b)]
    a_is_larger = np.where(wide[0] == wide[1], a < b, wide[0] > wide[1])
    return np.where(np.isnan(wide).any(axis=0), 0x7FFF, np.where(a_is_larger, a, b)).astype("u2")


@pytest.mark.parametrize("name", FLOAT16)
def test_the_larger_16_bit_float_of_each_pair_is_found_unless_one_is_nan(name):
    a, b, found = pairwise(name, INSTRUCTION.format("max.NaN", name))
    np.testing.assert_array_equal(found, larger_bits(a, b, FLOAT16[name][0]))


@pytest.mark.parametrize("name", FLOAT16)
def test_the_larger_magnitude_has_the_sign_of_the_product_unless_one_is_nan(name):
    a, b, found = pairwise(name, INSTRUCTION.format("max.NaN.xorsign.abs", name))
    wanted = larger_bits(a & 0x7FFF, b & 0x7FFF, FLOAT16[name][0])
    wanted = np.where(wanted == 0x7FFF, wanted, wanted | (a ^ b) & 0x8000)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", FLOAT16)
def test_the_sign_of_each_16_bit_float_is_cleared(name):
    a, _, found = pairwise(name, f'asm("abs.{name} %0, %1;" : "=r"(y[i]) : "r"(a[i]));')
    np.testing.assert_array_equal(found, a & 0x7FFF)


def test_set_gives_1_or_0():
    some = np.array([1, -2, np.nan, 0.0, -0.0, np.inf])
    a, b = (v.ravel() for v in np.meshgrid(some, some))
    wanted = {"eq": a == b, "ge": a >= b, "nan": np.isnan(a) | np.isnan(b)}
    for kind, dtype, names in (("f32", "f4", wanted), ("f16", "f2", ["nan"])):
        asked = [f"set.{name}.{kind}.{kind}" for name in names]
        found = run(kind, kind, [f"{name} %0, %1, %2" for name in asked], *np.array([a, b], dtype))
        for name, y in zip(names, found, strict=True):
            np.testing.assert_array_equal(y, wanted[name].astype(dtype), f"{name}.{kind}")


OF_HEADER = """#include <{header}>
extern "C" __global__ void k(const {pair}* a, const {pair}* b, {pair}* y, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __hmax2_nan({of}(a[i]), {of}(b[i])); }}"""
INCLUDES = tuple(f"-I{folder}" for folder in _cuda.cuda_include_folders())


@pytest.mark.parametrize("capability", [75, 80])
@pytest.mark.parametrize("name", FLOAT16)
def test_headers_find_the_larger_16_bit_float_on_gpus_with_few_instructions_for_it(
    name, capability
):
    dtype, pair, header = FLOAT16[name]
    a, b = pairs_of_floats(dtype)
    words = [cupy.asarray(v.view("u4")) for v in (a, b)]
    for of, mask in {"": 0xFFFF, "__habs2": 0x7FFF}.items():
        y = cupy.zeros(a.size // 2, "u4")
        with softgpu.settings(capability=capability):
            code = OF_HEADER.format(pair=pair, header=header, of=of)
            kernel = cupy.RawKernel(code, "k", options=INCLUDES)
            kernel((-(-y.size // 256),), (256,), (*words, y, np.int32(y.size)))
        found = y.get().view("u2")
        np.testing.assert_array_equal(found, larger_bits(a & mask, b & mask, dtype), of)


STORE = """unsigned* x, unsigned char* y) {{ unsigned v = x[threadIdx.x];
    asm volatile("{{.reg .pred p; setp.lt.u32 p, %5, 20; {guard} st{space}.{kind} [%0], {value};}}"
    :: "l"(y + {size} * threadIdx.x), {registers}, "r"(threadIdx.x) : "memory"); }}"""


@pytest.mark.parametrize("kind", ["u8", "u16", "u32"])
@pytest.mark.parametrize("elements", [1, 2, 4])
def test_stores_write_the_low_bytes_of_each_element(kind, elements):
    x = np.random.default_rng(5).integers(0, 2**32, 32, "u8").astype("u4")
    letter, cast = ("h", "(unsigned short)") if kind == "u16" else ("r", "")
    names = ", ".join(f"%{k + 1}" for k in range(elements))
    text = {
        "kind": kind if elements == 1 else f"v{elements}.{kind}",
        "value": names if elements == 1 else f"{{{names}}}",
        "size": elements * int(kind[1:]) // 8,
        "registers": ", ".join(f'"{letter}"({cast}(v * {2 * k + 1}))' for k in range(4)),
    }
    wanted = np.stack([x * np.uint32(2 * k + 1) for k in range(elements)], axis=1)
    wanted = wanted.astype(f"u{int(kind[1:]) // 8}")
    first = np.arange(32)[:, None] < 20
    ways = [(".global", "", True), (".global", "@p", first), (".global", "@!p", ~first)]
    for space, guard, stored in [*ways, ("", "", True)]:
        y = cupy.zeros(wanted.shape, wanted.dtype)
        launch(STORE.format(space=space, guard=guard, **text), cupy.asarray(x), y)
        np.testing.assert_array_equal(y.get(), np.where(stored, wanted, 0), f"{space} {guard}")


BYTES = """const unsigned char* x, unsigned* y) { unsigned short low, high;
    const unsigned char* at = x + 2 * threadIdx.x;
    asm("ld%s.u8 %%0, [%%1];" : "=h"(low) : "l"(at));
    asm("ld%s.s8 %%0, [%%1+1];" : "=h"(high) : "l"(at));
    asm("mov.b32 %%0, {%%1, %%2};" : "=r"(y[threadIdx.x]) : "h"(low), "h"(high)); }"""


@pytest.mark.parametrize("space", [".global", "", ".volatile"])
def test_loaded_bytes_are_extended_and_packed_into_words(space):
    x = np.random.default_rng(5).integers(0, 256, 64, "u1")
    y = cupy.zeros(32, "u4")
    launch(BYTES % (space, space), cupy.asarray(x), y)
    found = y.get().view("u2")
    np.testing.assert_array_equal(found[::2], x[::2])
    np.testing.assert_array_equal(found[1::2].view("i2"), x[1::2].view("i1"))


def test_bytes_are_picked_from_two_words_with_or_without_their_sign():
    a, b, how = np.random.default_rng(5).integers(0, 2**32, (3, 256), "u8").astype("u4")
    (found,) = run("u32", "u32", ["prmt.b32 %0, %1, %2, %3"], a, b, how)
    for y, *words, h in zip(found.tolist(), a.tolist(), b.tolist(), how.tolist(), strict=True):
        of_bytes = b"".join(word.to_bytes(4, "little") for word in words)
        picked = [(of_bytes[h >> k & 7], h >> k & 8) for k in (0, 4, 8, 12)]
        assert [*y.to_bytes(4, "little")] == [255 * (n >> 7) if sign else n for n, sign in picked]


# Which lanes take part, and the mask of each.
MASKS = [
    (0xFFFFFFFF, "~0u"),
    (0x0000FF00, "0xff00"),
    (0xFF00FF00, "0xff00ff00"),
    (0xFFFFFFFF, "0xffu << (t & 24)"),
]
EXCHANGE = """const int* x, int* y) {{ unsigned t = threadIdx.x;
    if ({lanes}u >> t & 1) asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, %3;"
        : "=r"(y[t]) : "r"(x[t]), "r"({by}), "r"({mask})); }}"""


@pytest.mark.parametrize(("lanes", "mask"), MASKS)
def test_the_lanes_of_a_mask_exchange_values(lanes, mask):
    t = np.arange(32)
    for by in (1, 2, 4):
        y = cupy.zeros(32, "i")
        launch(EXCHANGE.format(lanes=lanes, by=by, mask=mask), cupy.asarray(t.astype("i")), y)
        np.testing.assert_array_equal(y.get(), np.where(lanes >> t & 1, t ^ by, 0))


def test_cupy_makes_no_arrays_of_8_bit_floats_but_views_bytes_so():
    dtype = np.dtype(ml_dtypes.float8_e4m3fn)
    for make in (cupy.empty, cupy.ndarray, cupy.zeros):
        with pytest.raises(TypeError, match="dtype"):
            make(3, dtype)
    x = cupy.asarray(np.array([0x38, 0xB8, 0x7E], "u1")).view(dtype)
    assert x.dtype == dtype
    assert x.get().astype("f4").tolist() == [1, -1, 448]


VARIABLE = """struct S { static constexpr float value = 448; };
extern "C" __global__ void k(float* y) { *y = *(const volatile float*)&S::value; }"""


def test_a_variable_of_a_module_may_begin_as_a_float():
    """NVRTC makes variables of a struct's static members, even of those that nothing reads."""
    y = cupy.zeros(1, "f4")
    cupy.RawKernel(VARIABLE, "k")((1,), (1,), (y,))
    assert y.get().tolist() == [448]
