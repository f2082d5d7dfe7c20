# SPDX-License-Identifier: MIT
"""Operations of several threads together, local memory, and shared memory."""

from __future__ import annotations

import numpy as np

from tests.softgpu.launching import cupy, launch


def test_shuffles_and_barriers_pass_values_between_threads():
    body = """int* x) { __shared__ int s[2]; int v = threadIdx.x;
        for (int k = 16; k; k /= 2) v += __shfl_down_sync(~0u, v, k);
        if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v; __syncthreads();
        x[threadIdx.x] = s[0] + s[1] + 10000 * __shfl_xor_sync(~0u, threadIdx.x, 3, 16); }"""
    out = cupy.zeros(64, "i4")
    launch(body, out, block=64)
    np.testing.assert_array_equal(out.get(), 63 * 32 + 10000 * (np.arange(64) ^ 3))


LANE = np.arange(32)
JOINED = {
    "__ballot_sync(~0u, i % 3 == 0)": sum(1 << k for k in range(0, 32, 3)),
    "__any_sync(~0u, i == 5) + 2 * __any_sync(~0u, i > 31)": 1,
    "__all_sync(~0u, i < 32) + 2 * __all_sync(~0u, i < 31)": 1,
    "__uni_sync(~0u, i > 31) + 2 * __uni_sync(~0u, i < 31)": 1,
    "i < 7 ? __activemask() : 5": np.where(LANE < 7, 127, 5),
    "__syncthreads_count(i < 5)": 5,
    "__syncthreads_and(i < 32) + 2 * __syncthreads_and(i < 31)": 1,
    "__syncthreads_or(i == 5) + 2 * __syncthreads_or(i > 31)": 1,
}


def test_lanes_of_warps_and_threads_of_blocks_vote():
    body = "".join(f"x[{32 * k} + i] = {what};" for k, what in enumerate(JOINED))
    out = cupy.zeros((len(JOINED), 32), "u4")
    launch(f"unsigned* x) {{ int i = threadIdx.x; {body} }}", out)
    for (what, wanted), y in zip(JOINED.items(), out.get(), strict=True):
        np.testing.assert_array_equal(y, np.broadcast_to(wanted, 32), what)


def test_atomic_operations_of_all_blocks_are_done():
    body = """int* x) { atomicAdd(x, 1); atomicMax(x + 1, (int)threadIdx.x); atomicMin(x + 2, -3);
        atomicCAS(x + 3, 0, 7); atomicExch(x + 4, 5); atomicOr(x + 5, 1 << threadIdx.x % 8);
        atomicAnd(x + 6, 3); atomicXor(x + 7, 2); atomicAdd((float*)x + 8, 0.5f);
        atomicAdd((double*)(x + 10), 0.25); }"""
    out = cupy.zeros(12, "i4")
    launch(body, out, block=64, grid=3)
    assert out.get()[:8].tolist() == [192, 63, -3, 7, 5, 255, 0, 0]
    assert (out.get().view("f4")[8], out.get().view("f8")[5]) == (96, 48)


def test_each_thread_has_local_memory_and_each_block_dynamic_shared_memory():
    body = """int* x) { extern __shared__ int s[]; __shared__ int t[3]; int v[8];
        for (int k = 0; k < 8; ++k) v[k] = k * threadIdx.x; t[threadIdx.x % 3] = 0;
        s[threadIdx.x] = v[x[threadIdx.x] + threadIdx.x % 8]; __syncthreads();
        x[threadIdx.x] = s[threadIdx.x ^ 33]; }"""
    out = cupy.zeros(64, "i4")
    launch(body, out, block=64, shared=256)
    np.testing.assert_array_equal(
        out.get(), (np.arange(64) % 8 * np.arange(64))[np.arange(64) ^ 33]
    )


def test_memory_begins_as_nans():
    out = cupy.empty(3, "f4")
    out[0] = 0
    body = "float* x) { extern __shared__ float s[]; float v[9]; x[1] = s[0] + v[int(x[0]) + 1]; }"
    launch(body, out, block=1, shared=4)
    assert np.isnan(out.get()).tolist() == [False, True, True]
