# SPDX-License-Identifier: MIT
"""Kernels that are right give NumPy's numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.softgpu.launching import cupy, launch

NAMES = {
    "f4": "float",
    "f8": "double",
    "i1": "signed char",
    "i2": "short",
    "i4": "int",
    "i8": "long long",
    "u4": "unsigned",
}


def result(body: str, dtype: str, count: int, *arrays: np.ndarray, **told) -> np.ndarray:
    """Run a kernel whose first parameter is the result."""
    out = cupy.zeros(count, dtype)
    launch(body, out, *map(cupy.asarray, arrays), **told)
    return out.get()


def ends(dtype: str) -> tuple[float, float]:
    found = np.iinfo(dtype) if dtype[0] != "f" else np.finfo("f4")
    return float(found.min), float(found.max) * (1 - 2**-12)


@pytest.mark.parametrize("given", NAMES)
def test_every_type_is_converted_to_every_other_as_numpy_does(given):
    rng = np.random.default_rng(0)
    exact = rng.standard_normal(509) * 10.0 ** rng.integers(-3, 25, 509)
    exact = np.r_[exact, 0.5, 1.5, -2.5]
    for wanted in NAMES:
        low, high = np.array([ends(given), ends(wanted)]).T
        v = np.clip(exact, low.max(), high.min()).astype(given)
        x, y = NAMES[given], NAMES[wanted]
        body = f"{y}* y, const {x}* x) {{ int i = threadIdx.x; y[i] = ({y})x[i]; }}"
        found = result(body, wanted, 512, v, block=512)
        np.testing.assert_array_equal(found, v.astype(wanted), f"{given} to {wanted}")


RNG = np.random.default_rng(1)
A, B = RNG.integers(-(2**40), 2**40, 512), RNG.integers(1, 2**20, 512)
LOW = [(v & 0xFFFFFFFF).astype("u8") for v in (A, B)]
QUOTIENT = np.abs(A) // B * np.sign(A)
INTEGERS = {
    "a / b": QUOTIENT,
    "a % b": A - QUOTIENT * B,
    "a * b": A * B,
    "a >> (b & 63)": A >> (B & 63),
    "(unsigned long long)a >> (b & 63)": A.view("u8") >> (B & 63).astype("u8"),
    "__popcll(a)": np.bitwise_count(A.view("u8")),
    "__clzll(b)": np.array([64 - int(v).bit_length() for v in B]),
    "__brevll(b) >> 32": np.array([int(f"{v:064b}"[::-1], 2) >> 32 for v in B]),
    "__umulhi((unsigned)a, (unsigned)b)": LOW[0] * LOW[1] >> np.uint64(32),
    "min(a, b) + max(a, b) * 3": np.minimum(A, B) + np.maximum(A, B) * 3,
    "__byte_perm((int)a, (int)b, 0x5214) & 0xffff": (LOW[1] & 0xFF) | (LOW[0] >> 8 & 0xFF) << 8,
}  # fmt: skip


@pytest.mark.parametrize("what", INTEGERS)
def test_integers_are_those_of_numpy(what):
    body = "long long* z, const long long* x, const long long* y) { int i = threadIdx.x;"
    body += f"long long a = x[i], b = y[i]; z[i] = {what}; }}"
    found = result(body, "i8", 512, A, B, block=512)
    np.testing.assert_array_equal(found, INTEGERS[what].astype("i8"))


def test_shuffles_votes_and_barriers_join_threads():
    body = """int* x) { __shared__ int s[2]; int v = threadIdx.x;
        for (int k = 16; k; k /= 2) v += __shfl_down_sync(~0u, v, k);
        if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v; __syncthreads();
        x[threadIdx.x] = s[0] + s[1] + __popc(__ballot_sync(~0u, threadIdx.x % 2)) * 10000
            + __syncthreads_count(threadIdx.x < 5) * 1000000; }"""
    assert set(result(body, "i4", 64, block=64)) == {63 * 32 + 16 * 10000 + 5 * 1000000}


def test_atomics_of_all_blocks_are_counted():
    body = """int* x, int) { atomicAdd(x, 1); atomicMax(x + 1, (int)threadIdx.x);
        atomicCAS(x + 2, 0, 7); atomicExch(x + 3, 5); atomicAdd((float*)x + 4, 0.5f); }"""
    out = cupy.zeros(5, "i4")
    launch(body, out, np.int32(0), block=64, grid=3)
    assert out.get()[:4].tolist() == [192, 63, 7, 5]
    assert out.view("f4")[4].item() == 96


def test_local_memory_is_of_each_thread():
    body = """int* x) { int v[8]; for (int k = 0; k < 8; ++k) v[k] = k * threadIdx.x;
        x[threadIdx.x] = v[x[threadIdx.x] + threadIdx.x % 8]; }"""
    found = result(body, "i4", 64, block=64)
    np.testing.assert_array_equal(found, np.arange(64) % 8 * np.arange(64))


def test_memory_begins_as_no_number():
    body = "float* x) { extern __shared__ float s[]; float v[9]; x[1] = s[0] + v[int(x[0]) + 1]; }"
    out = cupy.empty(3, "f4")
    out[0] = 0
    launch(body, out, block=1, shared=4)
    assert np.isnan(out.get()).tolist() == [False, True, True]
