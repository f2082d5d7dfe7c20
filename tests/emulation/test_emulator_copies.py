# SPDX-License-Identifier: MIT
"""Under emulation an asynchronous copy arrives when it is waited for, and wrong ones are caught."""

import struct

import numpy as np
import pytest

from . import build
from .emulator import ORDERS, EmulationError, guarded, unavailable
from .probes import compile_body, run_body

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

ASYNC_COPY = (build.INCLUDE / "async_copy.cuh").read_text(encoding="utf-8")
CLUSTER = (build.INCLUDE / "cluster.cuh").read_text(encoding="utf-8")

POISON = -1  # an int of NaN bytes
SHARED = "alignas(16) __shared__ int held[256];"


def run_copies(body, values=None, **options):
    """What the kernel of that body writes to `out`."""
    values = np.arange(1024, dtype=np.int32) if values is None else values
    declarations = ASYNC_COPY + options.pop("declarations", "")
    return run_body(f"{SHARED} {body}", values=values, declarations=declarations, **options)


def problem_of_copies(body, **options):
    """The EmulationError that the kernel of that body ends with."""
    with pytest.raises(EmulationError) as error:
        run_copies(body, **options)
    return error.value


@pytest.mark.parametrize("order", ORDERS)
def test_a_copy_arrives_when_it_is_waited_for_and_not_before(order):
    body = """
      held[t] = 7;
      async_copy<4>(&held[t], a.in + i);
      const bool at_first = held[t] == -1;
      async_commit();
      const bool after_commit = held[t] == -1;
      async_wait<0>();
      a.out[i] = at_first && after_commit && held[t] == i;
    """
    assert run_copies(body, grid=3, order=order).all()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_copy_of_each_width_brings_these_bytes_alone(count):
    body = f"""
      for (int k = t; k < 256; k += 64) held[k] = 1000 + k;
      __syncthreads();
      if (t == 0) async_copy<{4 * count}>(held + 4, a.in + 8);
      async_commit();
      async_wait<0>();
      __syncthreads();
      a.out[i] = held[t];
    """
    want = 1000 + np.arange(64)
    want[4 : 4 + count] = 8 + np.arange(count)
    np.testing.assert_array_equal(run_copies(body), want)


PIPELINE = """
  async_copy<4>(&held[t], a.in + i);
  async_commit();
  async_copy<4>(&held[64 + t], a.in + 64 + i);
  async_commit();
  {wait}
  a.out[i] = held[t] == i ? held[64 + t] : -2;
  async_wait<0>();
"""


def test_a_wait_with_one_pending_brings_the_older_of_two_groups_alone():
    run = {wait: run_copies(PIPELINE.format(wait=wait)) for wait in ("async_wait<1>();", "")}
    np.testing.assert_array_equal(run["async_wait<1>();"], np.full(64, POISON))
    np.testing.assert_array_equal(run[""], np.full(64, -2))
    both = run_copies(PIPELINE.format(wait="async_wait<0>();"))
    np.testing.assert_array_equal(both, 64 + np.arange(64))


def test_groups_are_counted_whether_or_not_they_hold_copies():
    wait = "async_commit(); async_wait<1>();"
    np.testing.assert_array_equal(run_copies(PIPELINE.format(wait=wait)), 64 + np.arange(64))


def test_a_wait_does_not_cover_copies_that_are_in_no_group():
    body = """
      async_copy<4>(&held[t], a.in + i);
      async_wait<0>();
      a.out[i] = held[t];
      async_commit();
      async_wait<0>();
    """
    np.testing.assert_array_equal(run_copies(body), np.full(64, POISON))


# Rows in turn through two buffers, the next one under way while one is summed.
ROWS = """
  const int rows = 8;
  async_copy<4>(&held[t], a.in + t);
  async_commit();
  int sum = 0;
  for (int row = 0; row < rows; ++row) {
    if (row + 1 < rows) async_copy<4>(&held[(row + 1) % 2 * 64 + t], a.in + (row + 1) * 64 + t);
    async_commit();
    async_wait<1>();
    __syncthreads();
    sum += (row + 1) * held[row % 2 * 64 + (t ^ 33)];
    __syncthreads();
  }
  async_wait<0>();
  a.out[i] = sum;
"""


def row_sums_are_right(body, order):
    """Whether the kernel of that body gives the sums of rows of random integers."""
    values = np.random.default_rng(1).integers(0, 1000, (8, 64)).astype(np.int32)
    want = (np.arange(1, 9)[:, None] * values).sum(axis=0)[np.arange(64) ^ 33]
    try:
        got = run_copies(body, values, order=order)
    except EmulationError:
        return False
    return np.array_equal(got, want)


@pytest.mark.parametrize("order", ORDERS)
def test_a_pipeline_of_two_buffers_is_right(order):
    assert row_sums_are_right(ROWS, order)


@pytest.mark.parametrize(
    ("line", "replacement"),
    [
        ("async_wait<1>();", ""),
        ("async_wait<1>();", "async_wait<2>();"),
        ("async_commit();\n    async_wait", "async_wait"),
        ("__syncthreads();\n    sum", "sum"),
        ("__syncthreads();\n  }", "}"),
    ],
)
def test_without_any_of_its_waits_and_barriers_the_pipeline_fails_in_some_order(line, replacement):
    mutant = ROWS.replace(line, replacement)
    assert mutant != ROWS
    assert not all(row_sums_are_right(mutant, order) for order in ORDERS)


@pytest.mark.parametrize("order", ORDERS)
def test_each_block_of_a_cluster_has_its_own_copies(order):
    body = """
      async_copy<4>(&held[t], a.in + i);
      async_commit();
      __syncthreads();
      async_wait<0>();
      const bool mine = held[t] == i;
      cluster_barrier();
      const int other = cluster_load(&held[t], cluster_rank() ^ 1);
      cluster_barrier();
      a.out[i] = mine && other == (i ^ 64);
    """
    assert run_copies(body, grid=4, cluster=2, declarations=CLUSTER, order=order).all()


@pytest.fixture
def named():
    x = np.arange(100, dtype=np.int32)
    return {"x": guarded(x, alignment=16), "y": guarded(x, role="output", alignment=16)}


def run_named(body, named):
    arguments = struct.pack("qqq", named["x"].pointer, named["y"].pointer, 100)
    kernel = compile_body(f"{SHARED} {body} async_commit(); async_wait<0>();", ASYNC_COPY)
    return kernel.run(1, 32, arguments, ranges=named)


def test_bytes_are_counted_by_copy_and_once_each(named):
    body = """
      if (t < 20) async_copy<16>(held + 4 * t, a.in + 4 * t);
      if (t < 10) async_copy<8>(held + 80 + 2 * t, a.in + 80 + 2 * t);
      if (t == 31) async_copy<4>(held + 100, a.in + 3);
    """
    moved = run_named(body, named)
    assert moved.loaded == {"x": 20 * 16 + 10 * 8 + 4, "y": 0}
    assert moved.stored == {"x": 0, "y": 0}
    assert moved.distinct == {"x": 400, "y": 0}


@pytest.mark.parametrize(
    ("copy", "kind", "text"),
    [
        ("async_copy<16>(held, a.in + 1)", "misaligned", r"loads 16 bytes at 0x\w+, byte 4 of x"),
        ("async_copy<8>(held, a.in + 3)", "misaligned", r"loads 8 bytes at 0x\w+, byte 12 of x"),
        ("async_copy<4>(held, (char*)a.in + 2)", "misaligned", r"loads 4 bytes at 0x\w+, byte 2"),
        ("async_copy<16>(held + 2, a.in)", "misaligned", "copies 16 bytes to 0x"),
        ("async_copy<4>((char*)held + 1, a.in)", "misaligned", "copies 4 bytes to 0x"),
        ("async_copy<4>(held, a.in + 100)", "outside", r"loads 4 bytes at 0x\w+, 0 bytes past the"),
        (
            "async_copy<16>(held, a.in - 4)",
            "outside",
            r"loads 16 bytes at 0x\w+, 16 bytes before x",
        ),
        ("async_copy<4>(held + 256, a.in)", "outside shared", "copies 4 bytes to 0x"),
        ("async_copy<16>(held - 4, a.in)", "outside shared", "copies 16 bytes to 0x"),
        ("async_copy<4>(a.out, a.in)", "outside shared", "copies 4 bytes to 0x"),
    ],
)
def test_a_wrong_copy_is_reported_when_it_is_made(named, copy, kind, text):
    with pytest.raises(EmulationError, match=f"thread 5 of block 0 {text}") as error:
        run_named(f"if (t == 5) {{ {copy}; __builtin_trap(); }}", named)
    assert error.value.kind == kind


def test_a_copy_from_where_there_is_no_memory_is_reported():
    error = problem_of_copies("if (t == 5) async_copy<4>(held, a.in - 4096);")
    assert error.kind == "signal"
    assert "thread 5 of block 0" in str(error)


@pytest.mark.parametrize(
    "end", ["", "async_commit();", "async_wait<0>();", "async_commit(); async_wait<1>();"]
)
@pytest.mark.parametrize("order", ORDERS)
def test_a_copy_that_is_never_waited_for_is_reported(end, order):
    error = problem_of_copies(f"if (i == 69) async_copy<8>(held, a.in); {end}", grid=2, order=order)
    assert error.kind == "never waited for"
    assert "thread 5 of block 1 has ended and never waited for its copy of 8 bytes" in str(error)


def test_a_source_that_is_written_before_the_wait_is_reported():
    body = """
      a.out[i] = 1;
      if (t == 3) async_copy<4>(held, a.out + 8);
      async_commit();
      __syncthreads();
      if (t == 8) a.out[i] = 2;
      __syncthreads();
      async_wait<0>();
    """
    error = problem_of_copies(body)
    assert error.kind == "source changed"
    assert "thread 3 of block 0 waits for a copy whose source was written" in str(error)


def test_a_launch_after_an_error_has_no_copies_under_way():
    problem_of_copies("async_copy<4>(&held[t], a.in); if (t == 40) __syncthreads();")
    assert run_copies("a.out[i] = 1;").all()
