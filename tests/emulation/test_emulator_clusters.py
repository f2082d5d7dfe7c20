# SPDX-License-Identifier: MIT
"""The emulator runs the blocks of a cluster together, and catches wrong use of them."""

import re
import struct

import numpy as np
import pytest

from . import build
from .emulator import ORDERS, compile_emulated, guarded, unavailable
from .probes import compile_body, problem_of, run_body

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

CLUSTER = (build.INCLUDE / "cluster.cuh").read_text(encoding="utf-8")

# Sums of rows, each by one cluster. Two rows in turn go through the same shared variable.
ROW_SUMS = f"""{CLUSTER}
struct Arguments {{ const float* x; float* sums; long long rows, width; }};

extern "C" __global__ void row_sums(const Arguments a) {{
  __shared__ float partial;
  const int clusters = gridDim.x / BLOCKS, rank = cluster_rank();
  for (long long row = blockIdx.x / BLOCKS; row < a.rows; row += clusters) {{
    float sum = 0;
    for (long long i = rank * 32 + threadIdx.x; i < a.width; i += BLOCKS * 32)
      sum += a.x[row * a.width + i];
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (threadIdx.x == 0) partial = sum;
    cluster_barrier();
    sum = threadIdx.x < BLOCKS ? cluster_load(&partial, threadIdx.x) : 0;
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (threadIdx.x == 0) a.sums[row * BLOCKS + rank] = sum;
    cluster_barrier();
  }}
}}
"""


def run_row_sums(source, blocks, order, seed=0, **options):
    """The sums that each block finds and the right ones, of small integers: both are exact."""
    kernel = compile_emulated(source, "row_sums", (("BLOCKS", str(blocks)),), **options)
    x = np.random.default_rng(1).integers(-8, 9, (7, 1500)).astype(np.float32)
    x_in, sums = guarded(x), guarded(np.empty((7, blocks), np.float32), role="output")
    arguments = struct.pack("qqqq", x_in.pointer, sums.pointer, *x.shape)
    kernel.run(2 * blocks, 32, arguments, cluster=blocks, order=order, seed=seed)
    return sums.array, np.repeat(x.sum(axis=1, keepdims=True), blocks, axis=1)


@pytest.mark.parametrize("options", [(), ("-DEMULATION_UCONTEXT",)], ids=["default", "ucontext"])
@pytest.mark.parametrize("blocks", [1, 2, 8, 16])
def test_a_sum_over_a_cluster_is_right_in_every_order(blocks, options):
    for order in ORDERS:
        for seed in range(5 if order == "random" else 1):
            got, want = run_row_sums(ROW_SUMS, blocks, order, seed, scheduler_options=options)
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("blocks", [2, 8])
@pytest.mark.parametrize("deleted", [0, 1])
def test_a_missing_cluster_barrier_shows_in_some_order(deleted, blocks):
    calls = [m.start() for m in re.finditer(r" cluster_barrier\(\);", ROW_SUMS)]
    assert len(calls) == 2
    start = calls[deleted]
    mutant = ROW_SUMS[:start] + ROW_SUMS[start:].replace("cluster_barrier();", "", 1)
    wrong = []
    for order in ORDERS:
        try:
            got, want = run_row_sums(mutant, blocks, order)
        except RuntimeError:
            wrong.append(True)
        else:
            wrong.append(not np.array_equal(got, want))
    assert any(wrong)


def run_cluster(body, blocks=4, clusters=2, block=64, **options):
    """What the kernel of that body writes to `out`, by cluster, block and thread."""
    out = run_body(body, clusters * blocks, block, declarations=CLUSTER, cluster=blocks, **options)
    return out.reshape(clusters, blocks, block)


def problem_of_cluster(body, blocks=4, clusters=2, **options):
    """The EmulationError that the kernel of that body ends with."""
    return problem_of(body, clusters * blocks, declarations=CLUSTER, cluster=blocks, **options)


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_count_the_blocks_of_each_cluster(order):
    ranks = run_cluster("a.out[i] = cluster_rank();", blocks=4, clusters=3, order=order)
    np.testing.assert_array_equal(ranks, np.arange(4)[None, :, None] + np.zeros_like(ranks))
    blocks = run_cluster("a.out[i] = blockIdx.x;", blocks=4, clusters=3, order=order)
    np.testing.assert_array_equal(blocks[:, :, 0], np.arange(12).reshape(3, 4))


@pytest.mark.parametrize("order", ORDERS)
def test_each_block_has_shared_arrays_of_its_own(order):
    body = """
      __shared__ int before[64], mine[64];
      const bool poison = before[t] == -1 && mine[t] == -1;
      mine[t] = i;
      __syncthreads();
      const int first = mine[t ^ 33];
      cluster_barrier();
      a.out[i] = poison && first == (i ^ 33) && mine[t ^ 33] == (i ^ 33);
      __syncthreads();
      mine[t] = before[t] = 0;
    """
    assert run_cluster(body, order=order, seed=1).all()


@pytest.mark.parametrize(
    ("type_name", "value"), [("float", "0.1f"), ("double", "0.1"), ("int", "-3"), ("long", "-3l")]
)
@pytest.mark.parametrize("order", ORDERS)
def test_a_load_gives_what_the_other_block_has(order, type_name, value):
    body = f"""
      const auto value = [](int i) -> {type_name} {{ return i * {value}; }};
      __shared__ {type_name} values[64];
      values[t] = value(i);
      cluster_barrier();
      bool right = true;
      for (int rank = 0; rank < 4; ++rank)
        right &= cluster_load(&values[t ^ 5], rank) == value(i / 256 * 256 + rank * 64 + (t ^ 5));
      a.out[i] = right;
      cluster_barrier();
    """
    assert run_cluster(body, order=order).all()


LOAD_WITHOUT_LAST_BARRIER = """
  __shared__ int value;
  value = 1;
  cluster_barrier();
  a.out[i] = cluster_load(&value, {rank});
"""


def test_a_load_from_a_block_that_has_ended_is_reported():
    for order, rank in [("forward", 0), ("reverse", 3)]:
        body = LOAD_WITHOUT_LAST_BARRIER.format(rank=rank)
        error = problem_of_cluster(body, order=order)
        assert error.kind == "not running"
        loading, ended = (1, 0) if order == "forward" else (6, 7)
        assert f"block {loading} loads from the shared memory of block {ended}, which has end" in (
            str(error)
        )


def test_a_load_from_a_block_that_has_not_started_is_reported():
    for order, rank in [("forward", 3), ("reverse", 0)]:
        body = LOAD_WITHOUT_LAST_BARRIER.format(rank=rank).replace("cluster_barrier();", "")
        error = problem_of_cluster(body, order=order)
        assert error.kind == "not running"
        assert "which has not started" in str(error)


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("if (cluster_rank() == 2 && t == 5) cluster_load(&value, 4);", "bad rank", "from rank 4"),
        ("if (cluster_rank() == 2 && t == 5) cluster_load(&value, -1);", "bad rank", "rank -1"),
        (
            "int local = 1; if (i == 133) cluster_load(&local, 0);",
            "outside shared",
            "loads 4 bytes of another block's shared memory, at 0x",
        ),
        ("if (i == 133) cluster_load(&value + 1, 0);", "outside shared", "loads 4 bytes"),
        ("if (i == 133) cluster_load(&value - 1, 0);", "outside shared", "loads 4 bytes"),
        ("if (i == 133) cluster_load((double*)&value, 0);", "outside shared", "loads 8 bytes"),
        (
            "if (i == 133) cluster_load((int*)((char*)&value + 2), 0);",
            "misaligned",
            "loads 4 bytes",
        ),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_a_wrong_load_is_reported(body, kind, text, order):
    setup = "alignas(8) __shared__ int value; value = 1; cluster_barrier();"
    error = problem_of_cluster(f"{setup} {body} cluster_barrier();", clusters=1, order=order)
    assert error.kind == kind
    assert "thread 5 of block 2 loads" in str(error)
    assert text in str(error)


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (
            "if (cluster_rank() != 1) cluster_barrier();",
            "blocks diverge",
            "thread 0 of block 0 waits at a cluster barrier, thread 0 of block 1 has ended",
        ),
        (
            "if (cluster_rank() == 0) cluster_barrier(); cluster_barrier();",
            "blocks diverge",
            "thread 0 of block 0 waits at a cluster barrier, thread 0 of block 1 has ended",
        ),
        (
            "if (t < 32) cluster_barrier();",
            "warps diverge",
            "thread 0 of block 0 waits at a cluster barrier, thread 32 has ended",
        ),
        (
            "if (t < 32) cluster_barrier(); else __syncthreads();",
            "warps diverge",
            "cluster barrier, thread 32 waits at __syncthreads",
        ),
        (
            "if (cluster_rank() == 2 && t == 7) cluster_barrier(); else __syncthreads();",
            "lanes diverge",
            "thread 0 of block 2 waits at __syncthreads, thread 7 waits at a cluster barrier",
        ),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_a_cluster_barrier_that_not_all_threads_reach_is_reported(body, kind, text, order):
    error = problem_of_cluster(body, order=order)
    assert error.kind == kind
    if order == "forward":
        assert "in clusters of 4 in forward order" in str(error)
        assert text in str(error)


# The order in which threads pass a place, as a count.
COUNT = "static int count = 0;"


def counts(order, seed=0):
    """At which count each thread passed, first and after a wait, as (2, block, thread)."""
    body = f"""
      // {order} {seed}
      __syncwarp();
      a.out[i] = count++;
      cluster_barrier();
      a.out[i] |= count++ << 16;
    """
    declarations = CLUSTER + COUNT
    passed = run_body(
        body, 4, 64, declarations=declarations, cluster=4, order=order, seed=seed
    ).reshape(4, 64)
    return np.stack([passed & 0xFFFF, passed >> 16])


def test_blocks_run_up_to_a_cluster_barrier_in_forward_or_reverse_order():
    forward, reverse = counts("forward"), counts("reverse")
    np.testing.assert_array_equal(forward, np.arange(2 * 256).reshape(2, 4, 64))
    np.testing.assert_array_equal(reverse[:, ::-1, ::-1], forward)


def test_blocks_overtake_each_other_in_random_order_drawn_anew_in_every_round():
    first, second = counts("random", seed=3)
    begin, end = first.min(axis=1), first.max(axis=1)
    assert any(begin[a] < begin[b] < end[a] for a in range(4) for b in range(4)), "in order"
    assert first.max() < second.min(), "a cluster barrier does not hold all back"
    assert not np.array_equal(first.argsort(axis=None), second.argsort(axis=None))
    assert not np.array_equal(first, counts("random", seed=4)[0]), "the seed has no effect"


def test_the_largest_cluster_runs():
    body = """
      __shared__ int value;
      if (t == 0) value = blockIdx.x + 1;
      cluster_barrier();
      a.out[i] = cluster_load(&value, (cluster_rank() + t) % 16);
      cluster_barrier();
    """
    got = run_cluster(body, blocks=16, clusters=1, block=512, order="random")
    want = (np.arange(16)[:, None] + np.arange(512)) % 16 + 1
    np.testing.assert_array_equal(got[0], want)


def test_a_stack_overflow_in_the_last_block_is_reported():
    declarations = (
        CLUSTER
        + """
      __attribute__((noinline)) int deep(int n) {
        volatile int local[256];
        local[n % 256] = n;
        return n == 0 ? 0 : deep(n - 1) + local[n % 256];
      }
    """
    )
    body = "a.out[i] = deep(blockIdx.x == 15 && t == 511 ? 1000 : 1);"
    error = problem_of(body, 16, 512, declarations=declarations, cluster=16)
    assert error.kind == "stack overflow"
    assert "thread 511 of block 15" in str(error)


def test_launches_after_errors_start_from_the_beginning():
    for _ in range(2):
        problem_of_cluster("if (cluster_rank() != 1) cluster_barrier();")
        np.testing.assert_array_equal(*run_row_sums(ROW_SUMS, 8, "forward"))


@pytest.mark.parametrize("cluster", [0, 3, 17, 32])
def test_a_cluster_that_does_not_divide_the_grid_is_refused(cluster):
    with pytest.raises(
        ValueError, match=f"cluster is {cluster}, expected 1 to 16 blocks and a div"
    ):
        compile_body("").run(32, 64, bytes(24), cluster=cluster)


def test_a_cluster_of_too_many_threads_is_refused():
    with pytest.raises(ValueError, match="16 blocks of 544 threads, expected up to 8192 threads"):
        compile_body("").run(16, 544, bytes(24), cluster=16)
