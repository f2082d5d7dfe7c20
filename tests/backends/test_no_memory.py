# SPDX-License-Identifier: MIT
"""Without memory a call fails or uses fewer threads; the next call is right, and nothing leaks.

Each test except the last limits the address space of a separate process.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.caches import compiles, copies, posix, script
from tests.support.processes import in_process

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
pytestmark = [posix, compiles, linux]

LIMITED = """
import resource
from contextlib import contextmanager

@contextmanager
def at_most(more):
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)

x = np.random.default_rng(0).standard_normal((600, 257)).astype(np.float32)
large = np.broadcast_to(x[:1, :64], (1 << 20, 64))
saved, y = cunorm.rms_norm_forward(x), np.empty_like(x)

def check_forward():
    y.fill(np.nan)
    cunorm.rms_norm(x, out=y)
    assert np.array_equal(y, saved.y)
"""

ARRAYS = """
def fails(call, **arrays):
    try:
        with at_most(1 << 20):
            call(**arrays)
    except MemoryError as error:
        assert "llocat" in str(error), error
    else:
        raise AssertionError(call)
    check_forward()
    check(0)

fails(cunorm.rms_norm, x=large)  # a result finds no memory
dy = np.ones((64, 1 << 18), np.float32)
out = cunorm.NormGrads(dx=dy, dweight=np.empty(1 << 18, np.float32))
call = {"dy": dy, "x": dy, "weight": dy[0].copy(), "rstd": np.ones(64, np.float32), "out": out}
workspace = np.empty(cunorm.workspace_size("rms_norm_backward", dy, call["weight"]), np.uint8)
cunorm.rms_norm_backward(**call, workspace=workspace)
fails(cunorm.rms_norm_backward, **call)  # a workspace for sums finds no memory
"""
THREADS = """
import time
before = tasks()
with at_most(1 << 20):
    cunorm.set_num_threads(40)
    check_forward()
few = tasks()
assert few - before < 10, "the system refuses threads"
check_forward()
assert tasks() >= before + 38
cunorm.set_num_threads(2)
check_forward()  # ends most threads
while tasks() > before + 2:  # else the limit below would leave room for what they still hold
    time.sleep(0.01)
cunorm.set_num_threads(40)
with at_most(1 << 20):
    check_forward()
    check_forward()
    assert tasks() < before + 38, "the system refuses threads"
cunorm.set_num_threads(None)
"""

# There are so many parts that memory does not suffice for their sums.
SUMS = """
from tests.support.internals import ArgsWriter, KernelCall, Launch, _compile, runner

(build, *_) = _compile.loaded.values
for work in 1, 1 << 20:
    call = KernelCall(Launch(build, 2, 1), ArgsWriter({}).finish(), work, parts=1 << 40)
    try:
        runner([call], 1)([0])
    except MemoryError as error:
        assert str(error).startswith("cunorm: there is no memory for the sums of"), error
    else:
        raise AssertionError(work)
    check_forward()
"""


# The tiles of long rows that lie side by side take 2 MiB for each thread.
TILES = """
images = np.random.default_rng(1).standard_normal((4, 16384, 64)).astype(np.float32)
results, few = np.empty_like(images), images[:, :64].copy()
for threads in 1, 2:
    cunorm.set_num_threads(threads)
    cunorm.rms_norm(few, axis=(1,))
    try:
        with at_most(1 << 20):
            cunorm.rms_norm(images, axis=(1,), out=results)
    except MemoryError as error:
        assert str(error).endswith("or for tiles"), error
    else:
        raise AssertionError(threads)
    check_forward()
cunorm.rms_norm(images, axis=(1,), out=results)
assert np.allclose(results, cunorm.reference.rms_norm(images, axis=(1,)), rtol=0, atol=1e-5)
cunorm.set_num_threads(None)
"""


def test_a_failed_allocation_raises_or_leaves_fewer_threads_and_the_next_call_is_right():
    # Without MALLOC_ARENA_MAX, calls could use memory that glibc reserved before the limit was set.
    in_process(LIMITED + SUMS + TILES + THREADS + ARRAYS, OMP_NUM_THREADS="2", MALLOC_ARENA_MAX="1")


def test_a_first_call_without_memory_is_right_or_an_error_and_does_not_hang(tmp_path):
    in_process(
        LIMITED + "from tests.support import caches\n"
        "for more in range(0, 20 << 20, 2 << 20):\n"
        "    cunorm.clear_cache()\n"
        "    try:\n"
        "        with at_most(more): caches.check()\n"
        "    except (MemoryError, OSError, RuntimeError) as error:\n"
        "        print(error)\n"
        "    caches.check()\n",
        timeout=60,
        CXX=script(tmp_path, copies()),
        CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"),
    )


GROWTH = """
import gc, random
from tests.support.processes import resident

choose, ones = random.Random(0), np.ones((64, 256), np.float32)

def calls(count):
    for _ in range(count // 4):
        x = ones[: choose.randint(1, 64), : 4 * choose.randint(1, 64)]
        saved = cunorm.rms_norm_forward(x, x[0])
        cunorm.rms_norm_backward(x, x, x[0], rstd=saved.rstd)
        cunorm.layer_norm(x)
        cunorm.group_norm(x, 2)
    gc.collect()
    return resident()

before, after = calls(20_000), calls(100_000)  # the first calls fill the caches, which have bounds
print(before, after)
assert after - before < 2 << 20
"""


@pytest.mark.exhaustive
def test_100_000_calls_of_changing_shapes_do_not_grow_the_process():
    in_process(GROWTH, timeout=600)
