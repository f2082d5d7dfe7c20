# SPDX-License-Identifier: MIT
"""What quantised results need: 8-bit floats, bytes in memory, shuffles of some lanes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.softgpu.launching import cupy, launch
from tests.softgpu.test_arithmetic import run

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


STORE = """unsigned* x, unsigned char* y) {{ unsigned v = x[threadIdx.x];
    asm volatile("{{.reg .pred p; setp.lt.u32 p, %5, 20; {guard} st.global.{kind} [%0], {value};}}"
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
    for guard, stored in {"": True, "@p": first, "@!p": ~first}.items():
        y = cupy.zeros(wanted.shape, wanted.dtype)
        launch(STORE.format(guard=guard, **text), cupy.asarray(x), y)
        np.testing.assert_array_equal(y.get(), np.where(stored, wanted, 0), guard)


BYTES = """const unsigned char* x, unsigned* y) { unsigned short low, high;
    const unsigned char* at = x + 2 * threadIdx.x;
    asm("ld.global.u8 %0, [%1];" : "=h"(low) : "l"(at));
    asm("ld.global.s8 %0, [%1+1];" : "=h"(high) : "l"(at));
    asm("mov.b32 %0, {%1, %2};" : "=r"(y[threadIdx.x]) : "h"(low), "h"(high)); }"""


def test_loaded_bytes_are_extended_and_packed_into_words():
    x = np.random.default_rng(5).integers(0, 256, 64, "u1")
    y = cupy.zeros(32, "u4")
    launch(BYTES, cupy.asarray(x), y)
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
