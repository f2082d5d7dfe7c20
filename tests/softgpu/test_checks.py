# SPDX-License-Identifier: MIT
"""Wrong kernels and launches raise errors that name the place."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest

from tests import softgpu
from tests.softgpu.launching import cupy, kernel, launch, raises

FEW = np.int32(40)
LINE = r"(?s)kernel k, block \d+ of .* thread \d+ of .*{}.*PTX line \d+: .*{}"
RANK = 'unsigned rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));'
REMOTE = """float v; asm volatile("{ .reg .b32 a; mapa.shared::cluster.u32 a, %1, 0;"
    "ld.shared::cluster.f32 %0, [a]; }" : "=f"(v) : "r"((unsigned)__cvta_generic_to_shared(s)));"""

# For each mistake: the error, the instruction named in it, the number of threads, the kernel.
WRONG = {
    "a read past an array": ("outside of any allocation; .* after 504", "ld.*global", 129,
        "volatile float* x) { x[threadIdx.x]; }"),
    "a vector that begins in an array and ends behind it": ("outside of any", "st.global.v4", 1,
        "float* x) { *(float4*)(x + 124) = float4{1, 2, 3, 4}; }"),
    "a write before an array": ("outside of any allocation", "st.global", 1,
        "float* x) { x[-1] = 1; }"),
    "a misaligned number": ("misaligned", "st.global", 1,
        "char* x) { *(float*)(x + 2) = 1; }"),
    "a misaligned vector": ("write of 16 bytes at .* misaligned", "st.global.v4", 1,
        "float* x) { *(float4*)(x + 2) = float4{1, 2, 3, 4}; }"),
    "a write past shared memory": ("outside of the block's 128 bytes", "st.*shared", 64,
        "float* x) { __shared__ float s[32]; ((volatile float*)s)[threadIdx.x] = 1; }"),
    "a read past dynamic shared memory": ("outside of the block's 252 bytes", "ld.*shared", 64,
        "float* x) { extern __shared__ volatile float s[]; x[threadIdx.x] = s[threadIdx.x]; }"),
    "a barrier in each branch of a warp": ("different barriers", "bar", 64,
        "float* x, int n) { if (threadIdx.x < n) __syncthreads();"
        "else { x[threadIdx.x] = 1; __syncthreads(); } x[threadIdx.x] = 1; }"),
    "a lane that is not in its own mask": ("not in its own mask", "warp.sync", 32,
        "float* x) { if (threadIdx.x == 0) __syncwarp(2); x[threadIdx.x] = 1; }"),
    "a lane that is not in the mask of its reduction": ("not in its own mask", "redux", 32,
        "unsigned* x) { x[threadIdx.x] = __reduce_max_sync(0xfffffff7, threadIdx.x); }"),
    "a generic address before an array": ("outside of any allocation", "st.b32", 1,
        'float* x) { asm volatile("st.b32 [%0], 0;" :: "l"(x - 1) : "memory"); }'),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_kernel_is_reported_with_its_line(what):
    error, instruction, block, body = WRONG[what]
    arguments = (cupy.zeros(126, "f"), *[FEW] * ("int n" in body))
    with raises(LINE.format(error, instruction)):
        launch(body, *arguments, block=block, shared=252 * ("extern" in body))


def test_threads_that_wait_for_ever_are_reported():
    body = "float* x) { if (threadIdx.x == 0) __syncwarp(3); else __syncthreads(); x[0] = 1; }"
    with raises(r"(?s)wait for each other for ever.*PTX line \d+: .*bar.warp.sync"):
        launch(body, cupy.zeros(1, "f"))
    body = """float* x) { if (threadIdx.x < 32) __syncthreads();
        else asm volatile("barrier.cluster.arrive; barrier.cluster.wait;"); x[0] = 1; }"""
    with raises(r"(?s)wait for each other for ever.*PTX line \d+: .*bar"):
        launch(body, cupy.zeros(1, "f"), block=64)


def test_reading_shared_memory_of_a_block_that_has_ended_is_an_error():
    body = "float* x) { __shared__ float s[1]; s[0] = 1; %s if (rank == 0) return; %s x[0] = v; }"
    with raises(LINE.format("which has ended", "ld.shared::cluster")):
        launch(body % (RANK, REMOTE), cupy.zeros(1, "f"), grid=2, head="__cluster_dims__(2, 1, 1)")


def test_memory_begins_as_nans():
    out = cupy.empty(2, "f4")
    launch("float* x) { extern __shared__ float s[]; x[1] = s[0]; }", out, block=1, shared=4)
    assert np.isnan(out.get()).all()


def test_accessing_memory_of_another_device_is_an_error():
    with softgpu.settings(devices=2):
        with cupy.cuda.Device(1):
            there = cupy.zeros(10, "f")
        with raises("memory of device 1 by a kernel on device 0"):
            launch("float* x) { x[0] = 1; }", there)
        stream = cupy.cuda.Stream()
        with cupy.cuda.Device(1), raises("INVALID_HANDLE.* the stream is of device 0"):
            launch("float* x) { x[0] = 1; }", there, stream=stream)


OF_64 = "__launch_bounds__(64)"
TWO, SIXTEEN = "__cluster_dims__(2, 1, 1)", "__cluster_dims__(16, 1, 1)"
PLAIN = "float* x) { x[0] = 1; }"
REFUSED = {
    "too many threads": ("a block of 1025", PLAIN, {"block": 1025}),
    "no threads": ("a block of 0", PLAIN, {"block": 0}),
    "more threads than compiled for": ("at most 64", PLAIN, {"block": 96, "head": OF_64}),
    "no blocks": ("a grid of 0", PLAIN, {"grid": 0}),
    "two dimensions": ("more than one dim", PLAIN, {"grid": (2, 2)}),
    "too much shared memory": ("49153 bytes of dynamic", PLAIN, {"shared": 49153}),
    "clusters that do not divide the grid": ("in clusters of 2", PLAIN, {"grid": 3, "head": TWO}),
    "clusters of 16 not enabled": ("CLUSTER_SIZE", PLAIN, {"grid": 16, "head": SIXTEEN}),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_launch_that_a_gpu_refuses_is_refused(what):
    error, body, options = REFUSED[what]
    with softgpu.settings(streams="late"), raises(error):  # at the launch, even if streams are late
        launch(body, cupy.zeros(1, "f"), **options)


EARLY = """float* x) { __shared__ float s[32];
    asm volatile("griddepcontrol.launch_dependents;"); %s }"""
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
ASYNC = """asm volatile("cp.async.ca.shared.global [%%0], [%%1], 4;" ::
    "r"((unsigned)__cvta_generic_to_shared(s)), "l"(x) : "memory");""".replace("%%", "%")
NOT_WAITED = {
    "a read": ("touches an array", "ld", f"s[0] = ((volatile float*)x)[0]; {WAIT}"),
    "a write": ("touches an array", "st", f"x[threadIdx.x] = 1; {WAIT}"),
    "a copy": ("touches an array", "cp.async", f"{ASYNC} {WAIT}"),
    "a prefetch": ("touches an array", "prefetch",
        f'asm volatile("prefetch.global.L2 [%0];" :: "l"(x)); {WAIT}'),
    "a wait in another thread": ("touches an array", "st",
        f"if (threadIdx.x == 0) {{ {WAIT} }} __syncthreads(); x[threadIdx.x] = 1;"),
    "a thread that ends": ("ends without griddepcontrol.wait", "ret",
        f"if (threadIdx.x < 31) {{ {WAIT} x[threadIdx.x] = 1; }}"),
}  # fmt: skip


def launch_early(body: str, x, attribute: int = 6) -> None:
    """Launch a kernel that may begin while the previous one runs."""
    value = ctypes.create_string_buffer(struct.pack("@I4xI60x", attribute, 1))
    config = struct.pack("@7IPPI0P", 1, 1, 1, 32, 1, 1, 0, 0, ctypes.addressof(value), 1)
    arguments = ctypes.c_char_p(struct.pack("@P", x.data.ptr))
    function = ctypes.c_void_p(kernel(body).kernel.ptr)
    if status := softgpu.load().cuLaunchKernelEx(config, function, ctypes.byref(arguments), None):
        raise cupy.cuda.driver.CUDADriverError(status)


@pytest.mark.parametrize("what", NOT_WAITED)
def test_a_thread_of_an_early_launch_must_wait_before_it_touches_an_array_or_ends(what):
    error, instruction, body = NOT_WAITED[what]
    x = cupy.zeros(32, "f")
    with raises(LINE.format(error, instruction)):
        launch_early(EARLY % body, x)
    launch(EARLY % body, x)  # an ordinary launch need not wait
    launch_early(EARLY % f"{WAIT} {body}", x)


def test_early_launches_need_capability_9_0_and_other_attributes_are_refused():
    x, body = cupy.zeros(32, "f"), EARLY % WAIT
    with raises("INVALID_VALUE.* attribute 4 "):
        launch_early(body, x, attribute=4)
    with softgpu.settings(capability=80), raises("NOT_PERMITTED.* need compute capability 9.0"):
        launch_early("float* x) {}", x)


def test_parameters_of_another_size_are_refused():
    with raises("8 bytes for a parameter of 4"):
        launch("float* x, int n) { x[0] = n; }", cupy.zeros(1, "f"), np.int64(1))


def test_clusters_of_16_run_if_they_are_enabled_and_there_is_room():
    compiled, x = kernel("int* x) { x[blockIdx.x] = 1; }", SIXTEEN), cupy.zeros(32, "i")
    cupy.cuda.driver.funcSetAttribute(compiled.kernel.ptr, 14, 1)
    compiled((32,), (1,), (x,))
    assert x.get().all()
    with softgpu.settings(largest_cluster=8), raises("no room for a cluster of 16"):
        compiled((32,), (1,), (x,))


def test_more_shared_memory_is_available_once_it_is_enabled():
    compiled, x = (
        kernel("int* x) { extern __shared__ int s[]; s[50000] = x[0]; x[1] = s[50000]; }"),
        cupy.ones(2, "i"),
    )
    most = cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
    with raises(f"{most} bytes of dynamic"):
        compiled((1,), (1,), (x,), shared_mem=most)
    compiled.max_dynamic_shared_size_bytes = most
    assert (compiled.shared_size_bytes, compiled.max_dynamic_shared_size_bytes) == (0, most)
    compiled((1,), (1,), (x,), shared_mem=most)
    with raises(f"{most + 4} bytes of dynamic"):
        compiled((1,), (1,), (x,), shared_mem=most + 4)
    with raises(f"{most + 4} bytes of shared memory"):
        compiled.max_dynamic_shared_size_bytes = most + 4


@pytest.mark.parametrize(
    ("name", "statement"),
    {
        "dp4a": "x[0] = __dp4a(x[1], x[2], x[3]);",
        "(atom|red)": "atomicAdd(x, 1);",
        "vote": "x[0] = __any_sync(~0u, x[1]);",
        "shfl.sync.down": "x[0] = __shfl_down_sync(~0u, x[1], 1);",
        "popc": "x[0] = __popc(x[1]);",
        "cvt.rzi": "x[0] = (int)((float*)x)[1];",
        "fma.rn.bf16": 'asm("{.reg .b16 a; mov.b16 a, 0; fma.rn.bf16 a, a, a, a;}");',
        "local": "int v[9]; ((volatile int*)v)[x[0]] = 1;",
    }.items(),
)
def test_an_instruction_that_is_not_known_is_named(name, statement):
    with raises(rf"(?s)INVALID_PTX.*kernel k.*PTX line \d+.*{name}"):
        launch(f"int* x) {{ {statement} }}", cupy.zeros(4, "i"))


def test_only_the_barrier_of_all_threads_is_supported():
    with raises(LINE.format("only barrier 0", "bar.sync")):
        launch('float* x) { asm volatile("bar.sync 1;"); x[0] = 1; }', cupy.zeros(1, "f"))


COPY = """float* x) { __shared__ float s[64];
    unsigned to = __cvta_generic_to_shared(s + threadIdx.x);
    asm volatile("cp.async.ca.shared.global [%%0], [%%1], 4; cp.async.commit_group;"
    "cp.async.ca.shared.global [%%2], [%%3], 4; cp.async.commit_group; cp.async.wait_group %d;"
    :: "r"(to), "l"(x + threadIdx.x), "r"(to + 128), "l"(x + threadIdx.x + 32) : "memory");
    x[threadIdx.x] = s[threadIdx.x + 32]; }"""


@pytest.mark.parametrize("copies", ["early", "late"])
def test_a_wait_for_too_few_copies_gives_wrong_results_if_copies_are_late(copies):
    with softgpu.settings(copies=copies):
        for left in (0, 1):
            x = cupy.asarray(np.arange(64, dtype="f"))
            launch(COPY % left, x)
            is_right = np.array_equal(x.get()[:32], np.arange(32, 64))
            assert is_right == (copies == "early" or left == 0)
