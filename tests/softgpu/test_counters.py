# SPDX-License-Identifier: MIT
"""Counters of launches have the numbers that follow from a kernel's text."""

from __future__ import annotations

from tests import softgpu
from tests.softgpu.counters import Range, counting
from tests.softgpu.launching import cupy, launch


def counts(body: str, *arrays, **options):
    """Run a kernel; return its counted accesses to each array."""
    with counting() as launches:
        launch(body, *arrays, **options)
    (recorded,) = launches
    found = [recorded.range_at(array.data.ptr) for array in arrays]
    assert {r.begin for r in recorded.ranges} <= {r.begin for r in found}
    assert recorded.kernel == "k"
    return found


def numbers(r: Range) -> tuple[int, ...]:
    return r.loaded, r.distinct_loaded, r.load_sectors, r.stored, r.distinct_stored, r.store_sectors


def test_bytes_and_sectors_of_each_array_are_counted():
    x, y = cupy.zeros(1024, "f"), cupy.zeros(1024, "f")
    body = """const float4* x, float* y) { float4 v = x[threadIdx.x];
        y[threadIdx.x * 8] = v.x + v.w; }"""
    read, written = counts(body, x, y, block=64)
    assert numbers(read) == (1024, 1024, 32, 0, 0, 0)
    assert numbers(written) == (0, 0, 0, 256, 256, 64)  # a sector for each float
    assert read.end - read.begin == 4096


def test_bytes_that_are_read_again_count_once_as_distinct():
    x, y = cupy.zeros(32, "f"), cupy.zeros(1, "f")
    body = "volatile float* x, float* y) { float v = x[threadIdx.x] + x[31]; if (v > 0) y[0] = v; }"
    read, written = counts(body, x, y, grid=3)
    assert numbers(read) == (3 * 256, 128, 3 * 5, 0, 0, 0)
    assert numbers(written) == (0,) * 6


def test_asynchronous_copies_are_loads():
    body = """const float* x) { __shared__ float s[32];
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
        "cp.async.commit_group; cp.async.wait_group 0;" ::
        "r"((unsigned)__cvta_generic_to_shared(s + threadIdx.x)), "l"(x + threadIdx.x)); }"""
    (read,) = counts(body, cupy.zeros(32, "f"))
    assert numbers(read)[:3] == (128, 128, 4)


def test_launches_are_counted_only_within_the_block():
    with counting() as launches:
        pass
    launch("int* x) { x[0] = 1; }", cupy.zeros(1, "i"))
    assert launches == []
    with softgpu.settings(streams="late"), counting() as launches:
        launch("int* x) { x[0] = 1; }", cupy.zeros(1, "i"))
    assert [recorded.kernel for recorded in launches] == ["k"]
