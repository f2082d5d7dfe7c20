# SPDX-License-Identifier: MIT
"""Counters of launches have the numbers that follow from a kernel's text."""

from __future__ import annotations

import pytest

from tests import softgpu
from tests.softgpu.counters import Range, Shared, counting
from tests.softgpu.launching import cupy, launch


def counts(body: str, *arrays, **options):
    """Run a kernel; return its counted launch, and the accesses to each array."""
    with counting() as launches:
        launch(body, *arrays, **options)
    (recorded,) = launches
    found = [recorded.range_at(array.data.ptr) for array in arrays]
    assert {r.begin for r in recorded.ranges} <= {r.begin for r in found}
    assert recorded.kernel == "k"
    return recorded, *found


def numbers(r: Range) -> tuple[int, ...]:
    return r.loaded, r.distinct_loaded, r.load_sectors, r.stored, r.distinct_stored, r.store_sectors


def test_bytes_and_sectors_of_each_array_are_counted():
    x, y = cupy.zeros(1024, "f"), cupy.zeros(1024, "f")
    body = (
        "const float4* x, float* y) { float4 v = x[threadIdx.x]; y[threadIdx.x * 8] = v.x + v.w; }"
    )
    _, read, written = counts(body, x, y, block=64)
    assert numbers(read) == (1024, 1024, 32, 0, 0, 0)
    assert numbers(written) == (0, 0, 0, 256, 256, 64)  # a sector for each float
    assert read.end - read.begin == 4096


def test_bytes_that_are_read_again_count_once_as_distinct():
    x, y = cupy.zeros(32, "f"), cupy.zeros(1, "f")
    body = "volatile float* x, float* y) { float v = x[threadIdx.x] + x[31]; if (v > 0) y[0] = v; }"
    _, read, written = counts(body, x, y, grid=3)
    assert numbers(read) == (3 * 256, 128, 3 * 5, 0, 0, 0)
    assert numbers(written) == (0,) * 6


def test_arrays_of_16_bits_have_half_the_sectors_of_arrays_of_32_bits():
    x, y = cupy.zeros(64, "u2"), cupy.zeros(64, "u4")
    body = "const unsigned short* x, unsigned* y) { y[threadIdx.x] = x[threadIdx.x]; }"
    _, read, written = counts(body, x, y, block=64)
    assert (read.load_sectors, written.store_sectors) == (4, 8)


def test_atomic_operations_load_and_store():
    _, recorded = counts("int* x) { atomicAdd(x, 1); }", cupy.zeros(4, "i"), grid=2)
    assert numbers(recorded) == (256, 4, 2, 256, 4, 2)


def test_asynchronous_copies_are_loads_and_stores_to_shared_memory():
    body = """const float* x) { __shared__ float s[32];
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
        "cp.async.commit_group; cp.async.wait_group 0;" ::
        "r"((unsigned)__cvta_generic_to_shared(s + threadIdx.x)), "l"(x + threadIdx.x)); }"""
    recorded, read = counts(body, cupy.zeros(32, "f"))
    assert numbers(read)[:3] == (128, 128, 4)
    assert recorded.shared_stores == Shared(1, 1, 1)


BANKS = {  # type, stride in elements: wavefronts without and with conflicts
    ("float", 1): (1, 1),
    ("float", 32): (1, 32),
    ("float", 33): (1, 1),
    ("double", 2): (2, 4),
    ("float4", 2): (4, 8),
    ("short", 1): (1, 1),
}


@pytest.mark.parametrize("access", BANKS)
def test_conflicts_of_banks_are_counted(access):
    kind, stride = access
    body = f"""int* x) {{ extern __shared__ double space[]; {kind}* s = ({kind}*)space;
        s[threadIdx.x * {stride}] = {kind}{{}}; }}"""
    recorded, _ = counts(body, cupy.zeros(1, "i"), shared=32768)
    ideal, busy = BANKS[access]
    assert recorded.shared_stores == Shared(1, busy, ideal)
    assert recorded.shared_stores.surplus == busy - ideal
    assert recorded.shared_loads == Shared(0, 0, 0)


def test_an_instruction_is_executed_only_by_lanes_that_take_part():
    plain, x = "int* x) { if (threadIdx.x < n) x[threadIdx.x] = 1; }", cupy.zeros(32, "i")
    all_lanes, _ = counts(plain.replace("n)", "32)"), x)
    one, _ = counts(plain.replace("n)", "1)"), x)
    assert all_lanes.executed == 32 * (all_lanes.issued - 1)  # no lane takes the branch
    assert one.executed < all_lanes.executed
    three, _ = counts(plain.replace("n)", "32)"), x, grid=3)
    assert (three.issued, three.threads) == (3 * all_lanes.issued, 96)


def test_launches_are_counted_only_within_the_block():
    with counting() as launches:
        pass
    launch("int* x) { x[0] = 1; }", cupy.zeros(1, "i"))
    assert launches == []
    with softgpu.settings(streams="late"), counting() as launches:
        launch("int* x) { x[0] = 1; }", cupy.zeros(1, "i"))
    assert [recorded.kernel for recorded in launches] == ["k"]
