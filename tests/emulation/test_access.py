# SPDX-License-Identifier: MIT
"""The emulator reports accesses outside the arrays, and counts those inside."""

import re
import struct

import numpy as np
import pytest

from .emulator import ORDERS, EmulationError, guarded, unavailable
from .probes import compile_body, problem_of, run_body

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("if (i == 70) a.out[i] = a.in[1];", "thread 6 of block 1"),
        ("if (i == 70) a.out[i] = a.in[-1 - 4096];", "thread 6 of block 1"),
        ("if (i == 127) a.out[i + 1] = 0;", "thread 63 of block 1"),
        ("if (i == 127) a.out[-100000] = 0;", "thread 63 of block 1"),
        ("a.out[i] = *reinterpret_cast<int*>(a.n);", "thread 0 of block 0, at 0x0"),
    ],
)
def test_an_access_past_a_guard_page_is_reported(body, text):
    error = problem_of(body, grid=2)
    assert error.kind == "signal"
    assert text in str(error)
    assert re.search("SIG(SEGV|BUS)", str(error))


def test_a_store_to_an_input_is_reported():
    error = problem_of("a.in[0] = 1;")
    assert error.kind == "signal"


def test_a_stack_overflow_is_reported():
    declarations = """
      __attribute__((noinline)) int deep(int n) {
        volatile int local[256];
        local[n % 256] = n;
        return n == 0 ? 0 : deep(n - 1) + local[n % 256];
      }
    """
    assert (run_body("a.out[i] = deep(a.n);", n=10, declarations=declarations) == 55).all()
    error = problem_of("a.out[i] = deep(a.n);", n=1000, declarations=declarations)
    assert error.kind == "stack overflow"


# Accesses through access.cuh, to named arrays.
@pytest.fixture
def named():
    x = np.arange(100, dtype=np.int32)
    return {"x": guarded(x, alignment=16), "y": guarded(x, role="output", alignment=16)}


def run_named(body, named, grid=1, block=64, **options):
    arguments = struct.pack("qqq", named["x"].pointer, named["y"].pointer, 100)
    return compile_body(body).run(grid, block, arguments, ranges=named, **options)


WIDE = "struct alignas(16) Wide { int item[4]; };"


@pytest.mark.parametrize("order", ORDERS)
def test_bytes_are_counted_by_access_and_once_each(named, order):
    body = f"""
      {WIDE}
      if (i < 25) {{
        const Wide v = global_load(reinterpret_cast<const Wide*>(a.in) + i);
        const int first = global_load(a.in + 7);
        global_store(reinterpret_cast<Wide*>(a.out) + i, v);
        if (i == 3) global_store(a.out + 12, global_load(a.out + 12) + first);
      }}
    """
    result = run_named(body, named, order=order)
    assert result.loaded == {"x": 25 * 16 + 25 * 4, "y": 4}
    assert result.stored == {"x": 0, "y": 25 * 16 + 4}
    assert result.bytes == {"x": 500, "y": 408}
    assert result.distinct == {"x": 400, "y": 400}
    want = np.arange(100)
    want[12] += 7
    np.testing.assert_array_equal(named["y"].array, want)


def test_distinct_bytes_are_those_touched(named):
    result = run_named("if (i < 10) global_store(a.out + 2 * i, global_load(a.in));", named)
    assert result.bytes == {"x": 40, "y": 40}
    assert result.distinct == {"x": 4, "y": 40}


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (
            "if (i == 5) global_load(a.in + 100);",
            "outside",
            r"thread 5 of block 0 loads 4 bytes at 0x\w+, 0 bytes past the end of x \(400 bytes",
        ),
        (
            "if (i == 5) global_store(a.out - 1, 0);",
            "outside",
            r"thread 5 of block 0 stores 4 bytes at 0x\w+, 4 bytes before y",
        ),
        (
            WIDE + "if (i == 5) global_load(reinterpret_cast<Wide*>(a.in + 98));",
            "misaligned",
            r"thread 5 of block 0 loads 16 bytes at 0x\w+, byte 392 of x",
        ),
        ("int local = 1; global_load(&local);", "outside", "loads 4 bytes at 0x"),
        ("global_store(a.in + i, 1);", "signal", r"SIG(SEGV|BUS).*byte 0 of x \(400 bytes, input"),
    ],
)
def test_an_access_outside_its_array_is_reported_by_operand(named, body, kind, text):
    with pytest.raises(EmulationError, match=text) as error:
        run_named(body, named)
    assert error.value.kind == kind


def test_an_access_that_straddles_the_end_of_an_array_is_reported():
    body = "struct Two { int item[2]; }; global_load(reinterpret_cast<Two*>(a.in + 98 + t % 2));"
    named = {"x": guarded(np.zeros(100, np.int32), at="start"), "y": guarded(np.zeros(1))}
    with pytest.raises(EmulationError, match="thread 1 of block 0 loads 8 bytes") as error:
        run_named(body, named)
    assert error.value.kind == "outside"


def test_an_uncounted_store_beside_an_array_is_reported(named):
    named["y"] = guarded(np.zeros(99, np.int32), role="output", alignment=16)
    with pytest.raises(EmulationError, match=r"a store at 0x.*0 bytes past the end of y") as error:
        run_named("if (i == 0) a.out[99] = 1;", named)
    assert error.value.kind == "outside"


def test_outputs_are_nan_bytes_at_each_launch_and_inouts_are_kept(named):
    named["y"].array[...] = 1
    run_named("", named)
    assert (named["y"].array == -1).all()
    kept = {"x": named["x"], "y": guarded(np.arange(64, dtype=np.int32), role="inout")}
    run_named("global_store(a.out + i, global_load(a.out + i) + 1);", kept)
    np.testing.assert_array_equal(kept["y"].array, np.arange(64) + 1)
