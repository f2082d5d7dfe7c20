# SPDX-License-Identifier: MIT
"""The emulator runs right kernels rightly, in every order, and catches wrong ones."""

import ctypes
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from . import build
from .emulator import ORDERS, CompileError, compile_emulated, guarded, unavailable
from .probes import compile_body, problem_of, run_body

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

# Sums of rows: two rows in turn go through the same shared array.
ROW_SUMS = """
struct Arguments { const float* x; float* sums; long long rows, width; };

extern "C" __global__ void row_sums(const Arguments a) {
  __shared__ float partial[32];
  for (long long row = blockIdx.x; row < a.rows; row += gridDim.x) {
    float sum = 0;
    for (long long i = threadIdx.x; i < a.width; i += blockDim.x) sum += a.x[row * a.width + i];
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : 0;
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (threadIdx.x == 0) a.sums[row] = sum;
    __syncthreads();
  }
}
"""


def run_row_sums(kernel, block, order, seed=0):
    """The sums that the kernel finds and the right ones, of small integers: both are exact."""
    x = np.random.default_rng(1).integers(-8, 9, (7, 1500)).astype(np.float32)
    x_in, sums = guarded(x), guarded(np.empty(7, np.float32), role="output")
    arguments = struct.pack("qqqq", x_in.pointer, sums.pointer, *x.shape)
    kernel.run(3, block, arguments, order=order, seed=seed)
    return sums.array, x.sum(axis=1)


@pytest.mark.parametrize("options", [(), ("-DEMULATION_UCONTEXT",)], ids=["default", "ucontext"])
@pytest.mark.parametrize("block", [32, 96, 256, 1024])
def test_a_block_reduction_is_right_in_every_order(block, options):
    kernel = compile_emulated(ROW_SUMS, "row_sums", scheduler_options=options)
    for order in ORDERS:
        for seed in range(5 if order == "random" else 1):
            np.testing.assert_array_equal(*run_row_sums(kernel, block, order, seed))


@pytest.mark.parametrize("deleted", [0, 1])
def test_a_missing_barrier_shows_in_some_order(deleted):
    start = [m.start() for m in re.finditer(r"__syncthreads\(\);", ROW_SUMS)][deleted]
    mutant = ROW_SUMS[:start] + ROW_SUMS[start:].replace("__syncthreads();", "", 1)
    kernel = compile_emulated(mutant, "row_sums")
    wrong = []
    for order in ORDERS:
        got, want = run_row_sums(kernel, 256, order)
        wrong.append(not np.array_equal(got, want))
    assert any(wrong)


def test_a_missing_syncwarp_shows_in_some_order():
    body = """
      __shared__ int values[64];
      values[t] = t;
      __syncwarp();
      a.out[i] = values[t ^ 1];
    """
    want = np.arange(64) ^ 1
    for order in ORDERS:
        np.testing.assert_array_equal(run_body(body, order=order), want)
    mutant = body.replace("__syncwarp();", "")
    assert any(not np.array_equal(run_body(mutant, order=order), want) for order in ORDERS)


@pytest.mark.parametrize("order", ORDERS)
def test_a_shuffle_does_not_overwrite_what_other_lanes_have_yet_to_read(order):
    body = """
      unsigned v = t;
      for (int k = 0; k < a.n; ++k) v = 3 * __shfl_xor_sync(0xffffffffu, v, 1 << k % 5) + t;
      a.out[i] = static_cast<int>(v);
    """
    rounds, thread = 101, np.arange(96, dtype=np.uint32)
    want = thread.copy()
    for k in range(rounds):
        want = 3 * want[thread ^ (1 << k % 5)] + thread
    got = run_body(body, block=96, n=rounds, order=order, seed=3)
    np.testing.assert_array_equal(got.view(np.uint32), want)


@pytest.mark.parametrize(
    ("type_name", "value"),
    [("float", "t * 0.1f"), ("double", "t * 0.1"), ("int", "-t"), ("unsigned", "0x80000000u + t")],
)
def test_a_shuffle_carries_every_bit_of_each_type(type_name, value):
    body = f"""
      const auto value = [](int t) -> {type_name} {{ return {value}; }};
      a.out[i] = __shfl_xor_sync(0xffffffffu, value(t), 5) == value(t ^ 5);
    """
    assert run_body(body).all()


@pytest.mark.parametrize("order", ORDERS)
def test_shared_arrays_hold_nan_bytes_before_each_block(order):
    body = """
      __shared__ double values[64];
      unsigned long long bits;
      __builtin_memcpy(&bits, &values[t], 8);
      a.out[i] = bits == ~0ull;
      values[t] = 1.0;
    """
    assert run_body(body, grid=4, order=order).all()


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("if (t < 40) __syncthreads();", "lanes diverge", "thread 40 has ended"),
        ("if (t < 32) __syncthreads();", "warps diverge", "thread 32 has ended"),
        (
            "if (t != 3) __syncthreads(); else __syncwarp();",
            "lanes diverge",
            "thread 0 of block 0 waits at __syncthreads, thread 3 waits at __syncwarp",
        ),
        (
            "if (t != 3) __syncwarp(); else __shfl_xor_sync(0xffffffffu, 1, 1);",
            "lanes diverge",
            "thread 3 waits at a shuffle",
        ),
        (
            "if (t % 2) __shfl_xor_sync(~0u, 1.0, 1); else __shfl_xor_sync(~0u, 1.0f, 1);",
            "lanes diverge",
            "another type or distance",
        ),
        (
            "__shfl_xor_sync(~0u, 1, 1 << t % 2);",
            "lanes diverge",
            "another type or distance",
        ),
        ("if (t < 16) __shfl_xor_sync(0xffffu, 1, 1);", "partial mask", "0xffffffff"),
        ("__syncwarp(1u << t % 32);", "partial mask", "0xffffffff"),
        ("__shfl_xor_sync(~0u, 1, 32);", "bad distance", "0 to 31"),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_divergence_is_reported(body, kind, text, order):
    error = problem_of(body, order=order)
    assert error.kind == kind
    if order == "forward":
        assert text in str(error)


def test_a_warp_may_wait_at_another_barrier_than_its_neighbour():
    body = "if (t < 32) { a.out[i] = 1; __syncthreads(); } else { __syncthreads(); a.out[i] = 1; }"
    assert run_body(body).all()


def test_launches_after_errors_are_right():
    kernel = compile_emulated(ROW_SUMS, "row_sums")
    for _ in range(3):
        problem_of("if (t == 5) a.out[4096] = 1;", block=1024)
        np.testing.assert_array_equal(*run_row_sums(kernel, 1024, "forward"))
        problem_of("if (t != 5) __shfl_xor_sync(~0u, 1, 1);")
        np.testing.assert_array_equal(*run_row_sums(kernel, 64, "random"))


class SignalStack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def test_a_launch_leaves_the_callers_signal_stack_in_place():
    sigaltstack = ctypes.CDLL(None).sigaltstack
    memory = ctypes.create_string_buffer(1 << 16)
    mine = SignalStack(ctypes.addressof(memory), 0, len(memory))
    before, after = SignalStack(), SignalStack()
    assert sigaltstack(ctypes.byref(mine), ctypes.byref(before)) == 0
    try:
        run_body("")
        problem_of("if (t == 5) a.out[4096] = 1;")
    finally:
        assert sigaltstack(ctypes.byref(before), ctypes.byref(after)) == 0
    assert after.address == mine.address


def test_a_fault_outside_a_launch_still_ends_the_process():
    script = """
import ctypes, faulthandler, struct
faulthandler.enable()
from tests.emulation.emulator import EmulationError, compile_emulated
source = "struct A { int* p; }; extern \\"C\\" __global__ void k(const A a) { *a.p = 1; }"
try:
    compile_emulated(source, "k").run(1, 32, struct.pack("q", 8))
except EmulationError:
    print("reported", flush=True)
ctypes.string_at(8)
"""
    folder = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode < 0
    assert done.stdout == "reported\n"
    assert "Fatal Python error: Segmentation fault" in done.stderr


@pytest.mark.parametrize("block", [0, 16, 33, 1056])
def test_a_block_that_is_not_whole_warps_is_refused(block):
    with pytest.raises(ValueError, match=f"block is {block}, expected a multiple of 32 up to 1024"):
        run_body("", block=block)


def test_other_senseless_launches_are_refused():
    kernel = compile_body("")
    arguments = bytes(24)
    with pytest.raises(ValueError, match="grid is 0"):
        kernel.run(0, 32, arguments)
    with pytest.raises(ValueError, match="16 bytes of arguments, expected 24"):
        kernel.run(1, 32, arguments[:16])
    with pytest.raises(ValueError, match="order is 'sideways'"):
        kernel.run(1, 32, arguments, order="sideways")
    array = guarded(np.zeros(4))
    with pytest.raises(ValueError, match="'x' and 'y' overlap"):
        kernel.run(1, 32, arguments, ranges={"x": array, "y": array})


def test_a_source_that_does_not_compile_is_refused_with_the_compilers_words():
    with pytest.raises(CompileError, match="undeclared_name"):
        compile_body("undeclared_name = 1;")


def test_a_compiled_kernel_is_taken_from_the_cache(monkeypatch):
    source = 'struct A { long long n; }; extern "C" __global__ void cached(const A) {}'
    scheduler = build.compile_scheduler()
    first = build.compile_kernel(source, "cached", (("N", "1"),), scheduler)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert build.compile_kernel(source, "cached", (("N", "1"),), scheduler) == first


def test_macros_and_the_16_bit_types_reach_the_kernel():
    source = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
struct Arguments { const __half* x; __nv_bfloat16* y; };
extern "C" __global__ void cast(const Arguments a) {
  const float x = __half2float(a.x[threadIdx.x]);
  a.y[threadIdx.x] = __float2bfloat16_rn(sqrt(fma(x, x, FACTOR)));
}
"""
    x = np.arange(32, dtype=np.float16)
    x_in, y = guarded(x), guarded(np.empty(32, np.uint16), role="output")
    kernel = compile_emulated(source, "cast", (("FACTOR", "4.0f"),))
    kernel.run(1, 32, struct.pack("qq", x_in.pointer, y.pointer))
    got = (y.array.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(got, np.sqrt(x.astype(np.float32) ** 2 + 4), rtol=2**-8)
