# SPDX-License-Identifier: MIT
"""Counters of launches, against numbers that follow from the kernel's text."""

from __future__ import annotations

from tests import softgpu
from tests.softgpu.counters import Range, counting
from tests.softgpu.launching import cupy, launch


def counts(body: str, *arrays, **told):
    """Return what the one launch did to each array."""
    with counting() as launches:
        launch(body, *arrays, **told)
    (made,) = launches
    found = [made.of(array.data.ptr) for array in arrays]
    assert {r.begin for r in made.ranges} <= {r.begin for r in found}
    assert made.kernel == "k"
    return found


def numbers(r: Range) -> tuple[int, ...]:
    return r.loaded, r.distinct_loaded, r.load_sectors, r.stored, r.distinct_stored, r.store_sectors


def test_bytes_and_sectors_of_each_array_are_counted():
    x, y = cupy.zeros(1024, "f"), cupy.zeros(1024, "f")
    body = (
        "const float4* x, float* y) { float4 v = x[threadIdx.x]; y[threadIdx.x * 8] = v.x + v.w; }"
    )
    read, written = counts(body, x, y, block=64)
    assert numbers(read) == (1024, 1024, 32, 0, 0, 0)
    assert numbers(written) == (0, 0, 0, 256, 256, 64)  # a sector for each float
    assert read.end - read.begin == 4096


def test_bytes_that_are_read_again_are_distinct_once():
    x, y = cupy.zeros(32, "f"), cupy.zeros(1, "f")
    body = "volatile float* x, float* y) { float v = x[threadIdx.x] + x[31]; if (v > 0) y[0] = v; }"
    read, written = counts(body, x, y, grid=3)
    assert numbers(read) == (3 * 256, 128, 3 * 5, 0, 0, 0)
    assert numbers(written) == (0,) * 6


def test_sectors_of_bfloat16_are_half_those_of_float32():
    x, y = cupy.zeros(64, "u2"), cupy.zeros(64, "u4")
    body = "const unsigned short* x, unsigned* y) { y[threadIdx.x] = x[threadIdx.x]; }"
    read, written = counts(body, x, y, block=64)
    assert (read.load_sectors, written.store_sectors) == (4, 8)


def test_atomic_operations_load_and_store():
    (made,) = counts("int* x) { atomicAdd(x, 1); }", cupy.zeros(4, "i"), grid=2)
    assert numbers(made) == (256, 4, 2, 256, 4, 2)


def test_asynchronous_copies_are_loads():
    body = """const float* x) { __shared__ float s[32];
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
        "cp.async.commit_group; cp.async.wait_group 0;" ::
        "r"((unsigned)__cvta_generic_to_shared(s + threadIdx.x)), "l"(x + threadIdx.x)); }"""
    (read,) = counts(body, cupy.zeros(32, "f"))
    assert numbers(read)[:3] == (128, 128, 4)


def test_nothing_is_counted_otherwise():
    with counting() as launches:
        pass
    launch("int* x) { x[0] = 1; }", cupy.zeros(1, "i"))
    assert launches == []
    with softgpu.settings(streams="late"), counting() as launches:
        launch("int* x) { x[0] = 1; }", cupy.zeros(1, "i"))
    assert [made.kernel for made in launches] == ["k"]
