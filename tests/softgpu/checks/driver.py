# SPDX-License-Identifier: MIT
"""Kernels work on the software GPU, and those that are wrong are found out."""

import os
import sys

import cupy
import numpy as np

bad = 0


def check(what, ok):
    global bad
    bad += not ok
    print("ok   " if ok else "WRONG", what, flush=True)


def launch(body, arguments, *, block=64, grid=1, shared=0, head=""):
    """Return the error of a launch, or an empty text."""
    kernel = cupy.RawKernel(f'extern "C" __global__ void {head} k({body}', "k")
    try:
        kernel((grid,), (block,), arguments, shared_mem=shared)
    except RuntimeError as error:
        return str(error).split(":")[0]
    return ""


random = np.random.default_rng(0)
n = 100003
x, y = random.random(n, "f"), random.random(n, "f")
dx, dy = cupy.asarray(x), cupy.asarray(y)
body = "float a, const float* x, float* y, int n) {"
body += "int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = fmaf(a, x[i], y[i]); }"
error = launch(body, (np.float32(2.5), dx, dy, np.int32(n)), block=256, grid=-(-n // 256))
exact = (2.5 * x.astype("d") + y).astype("f")
check("saxpy", error == "" and np.array_equal(dy.get(), exact))

NAMES = {
    "f4": "float",
    "f8": "double",
    "i2": "short",
    "i4": "int",
    "i8": "long long",
    "u4": "unsigned",
}
given = np.r_[random.standard_normal(500) * 10.0 ** random.integers(-3, 9, 500), 0.5, 1.5, -2.5]
for a, b in ((a, b) for a in NAMES for b in NAMES):
    with np.errstate(all="ignore"):
        v = given.astype("i8").astype(a) if a[0] != "f" else given.astype(a)
        if a[0] == "f" and b[0] != "f":
            low, high = (0 if b == "u4" else -30000), 30000
            v = np.clip(v, low, high)
        out = cupy.zeros(len(v), b)
        launch(
            f"const {NAMES[a]}* x, {NAMES[b]}* y, int n) {{ int i = threadIdx.x; if (i < n) y[i] = ({NAMES[b]})x[i]; }}",
            (cupy.asarray(v), out, np.int32(len(v))),
            block=512,
        )
        check(f"{a} to {b}", np.array_equal(out.get(), v.astype(b)))
i, j = random.integers(-(2**40), 2**40, 512), random.integers(1, 2**20, 512)
out = cupy.zeros(512, "i8")
launch(
    "const long long* x, const long long* y, long long* z) { int i = threadIdx.x; long long a = x[i], b = y[i];"
    "z[i] = a / b + a % b * 3 + __popcll(a) + __clzll(b) + (a >> (b & 63)) + (int)__umulhi((unsigned)a, (unsigned)b); }",
    (cupy.asarray(i), cupy.asarray(j), out),
    block=512,
)
quotient = (np.abs(i) // j) * np.sign(i)
bits = np.array([bin(int(v) & (2**64 - 1)).count("1") for v in i])
zeros = np.array([64 - int(v).bit_length() for v in j])
high = (
    (((i & 0xFFFFFFFF).astype("u8") * (j & 0xFFFFFFFF).astype("u8")) >> 32)
    .astype("u4")
    .astype("i4")
)
check(
    "integers",
    np.array_equal(
        out.get(), quotient + (i - quotient * j) * 3 + bits + zeros + (i >> (j & 63)) + high
    ),
)
out = cupy.zeros(64, "i")
launch(
    "int* x) { int v = threadIdx.x; for (int k = 16; k; k /= 2) v += __shfl_down_sync(~0u, v, k);"
    "__shared__ int s[2]; if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v; __syncthreads();"
    "x[threadIdx.x] = s[0] + s[1] + __ballot_sync(~0u, threadIdx.x % 2) * 0 + __syncthreads_count(threadIdx.x < 5); }",
    (out,),
)
check("shuffles and barriers", np.array_equal(out.get(), np.full(64, 63 * 32 + 5)))
out = cupy.zeros(3, "i")
launch(
    "int* x) { atomicAdd(x, 1); atomicMax(x + 1, (int)threadIdx.x); atomicCAS(x + 2, 0, 7); }",
    (out,),
    grid=3,
)
check("atomics", out.get().tolist() == [192, 63, 7])
out = cupy.zeros(64, "i")
launch(
    "int* x) { int v[8]; for (int k = 0; k < 8; ++k) v[k] = k * threadIdx.x; x[threadIdx.x] = v[x[threadIdx.x] + threadIdx.x % 8]; }",
    (out,),
)
check("local memory", np.array_equal(out.get(), np.arange(64) % 8 * np.arange(64)))

v = cupy.zeros(128, "f")
few = np.int32(40)
outside, aligned = "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_MISALIGNED_ADDRESS"
failed, refused = "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_INVALID_VALUE"
shared = "float* x) { extern __shared__ float s[]; s[threadIdx.x] = 1; x[0] = s[3]; }"
for what, expected, error in (
    (
        "beyond memory by an element",
        outside,
        launch("float* x) { x[threadIdx.x] = 1; }", (v,), block=129),
    ),
    (
        "misaligned",
        aligned,
        launch("float* x) { *(float4*)(x + 1) = float4{1, 2, 3, 4}; }", (v,), block=1),
    ),
    (
        "beyond shared memory",
        outside,
        launch(
            "float* x) { __shared__ float s[32]; volatile float* p = s; p[threadIdx.x] = 1; __syncthreads(); x[0] = p[threadIdx.x ^ 1]; }",
            (v,),
            block=128,
        ),
    ),
    (
        "barriers apart",
        failed,
        launch(
            "float* x, int n) { if (threadIdx.x < n) __syncthreads(); else { x[threadIdx.x] = 1; __syncthreads(); } x[threadIdx.x] = 1; }",
            (v, few),
        ),
    ),
    (
        "for ever",
        failed,
        launch(
            'float* x, int n) { if (threadIdx.x < n) asm volatile("barrier.sync 1, 64;"); x[threadIdx.x] = 1; }',
            (v, few),
        ),
    ),
    ("too many threads", refused, launch("float* x) {}", (v,), block=2048)),
    ("too much shared memory", refused, launch(shared, (v,), shared=50000)),
    (
        "clusters that do not divide the grid",
        refused,
        launch("float* x) { x[0] = 1; }", (v,), grid=3, head="__cluster_dims__(2, 1, 1)"),
    ),
    (
        "a cluster of 16 that is not asked for",
        "CUDA_ERROR_INVALID_CLUSTER_SIZE",
        launch(
            "float* x) { x[blockIdx.x] = 1; }",
            (v,),
            grid=16,
            block=1,
            head="__cluster_dims__(16, 1, 1)",
        ),
    ),
):
    check(what, error == expected)

# Threads that need each other and do not wait: seen if they do not run in step, or as a race.
step = (
    os.environ.get("SOFTGPU_SCHEDULE", "lockstep") == "lockstep"
    and os.environ.get("SOFTGPU_RACES") != "1"
)
for wait, distance, right in (
    ("", 1, step),
    ("__syncwarp();", 1, True),
    ("", 32, False),
    ("__syncthreads();", 32, True),
):
    w = cupy.zeros(64, "i")
    body = "int* x) { __shared__ int s[64]; s[threadIdx.x] = threadIdx.x; %s x[threadIdx.x] = s[threadIdx.x ^ %d]; }"
    launch(body % (wait, distance), (w,))
    found = np.array_equal(w.get(), np.arange(64) ^ distance)
    check(
        f"neighbours at {distance}, '{wait}': {'right' if right else 'wrong'} numbers",
        found == right,
    )

if cupy.cuda.runtime.getDeviceCount() > 1:
    with cupy.cuda.Device(1):
        u = cupy.zeros(10, "f")
    check("another device's memory", launch("float* x) { x[0] = 1; }", (u,), block=1) == outside)
print("wrong:", bad)
sys.exit(bad > 0)
