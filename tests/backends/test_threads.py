# SPDX-License-Identifier: MIT
"""The CPU build disturbs no threads, forks, environments or floating-point modes."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import cunorm
from tests.support.caches import ANSWERS, check, compiles, copies, posix, script
from tests.support.calls import FUNCTIONS, assert_same, call_of, call_uncached, change
from tests.support.internals import KernelBuild, _compile, _threads
from tests.support.operands import assert_same_bits, at
from tests.support.processes import in_process

linux = pytest.mark.skipif(sys.platform != "linux", reason="counts threads in Linux's /proc")


@pytest.fixture
def set_threads():
    yield cunorm.set_num_threads
    cunorm.set_num_threads(None)


# --- several threads at once ----------------------------------------------------------------------

SMALL = [(name, None) for name in FUNCTIONS]
# Rows that threads share and rows that they do not share; the same for samples. The calls need
# different amounts of a thread's scratch memory.
LARGE = [("layer_norm_backward", shape) for shape in ((600, 257), (2, 70_000))]
LARGE += [("group_norm_forward", shape) for shape in ((2, 300, 40), (2, 4900, 8), (40, 30, 40))]
LARGE += [("group_norm_backward", (2, 4900, 8)), ("rms_norm", (600, 257))]


@pytest.mark.parametrize(
    ("kind", "calls", "threads", "turns"),
    [
        pytest.param("numpy", SMALL, 3, 300, id="small"),
        pytest.param("numpy", LARGE, 3, 24, id="large"),
        pytest.param("cupy", SMALL[::4], 3, 60, marks=pytest.mark.gpu, id="cupy"),
        pytest.param(
            "numpy", 4 * SMALL + LARGE, 8, 10_000, marks=pytest.mark.exhaustive, id="80,000 calls"
        ),
    ],
)
def test_threads_that_call_at_once_in_any_order_get_their_own_right_answers(
    kind, calls, threads, turns
):
    """The arrays of all threads have the same specs, so the threads share all cache entries."""
    start, of_threads = threading.Barrier(threads), []
    for thread in range(threads):
        mine = [call_of(name, shape, kind) for name, shape in calls]
        for call in mine:
            change(call.arrays, str(thread))
        of_threads.append([(call, call_uncached(call.make)) for call in mine])

    def work(thread):
        mine = of_threads[thread]
        start.wait()
        order = np.random.default_rng(thread).integers(len(mine), size=turns)
        for turn, number in enumerate(order):
            call, right = mine[number]
            with at(turn, call.name):
                assert_same(call.run() if turn % 3 == 0 else call.make(), right)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))


# --- how many threads -----------------------------------------------------------------------------

AGAIN = """
x = np.random.default_rng(0).standard_normal((600, 257)).astype(np.float32)
y, exact = np.empty_like(x), cunorm.reference.rms_norm(x)

def again():
    y.fill(np.nan)
    cunorm.rms_norm(x, out=y)
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-4)
"""


@linux
def test_threads_are_as_many_as_affinity_work_and_omp_num_threads_say():
    """`OMP_NUM_THREADS` may change while Python runs, also for cached calls."""
    in_process(
        AGAIN + "os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])\n"
        "del os.environ['OMP_NUM_THREADS']\n"
        "again()\n"
        "before = tasks()\n"
        "again()\n"
        "assert tasks() == before, 'the one core has one thread'\n"
        "os.environ['OMP_NUM_THREADS'] = '4'\n"
        "cunorm.rms_norm(np.ones((8, 32), np.float32))\n"
        "assert tasks() == before, 'little work wakes no thread'\n"
        "os.environ['OMP_NUM_THREADS'] = '3'\n"
        "again()\n"
        "assert tasks() == before + 2, (before, tasks())\n"
        "os.environ['OMP_NUM_THREADS'] = '1'\n"
        "check(2)\n",
        OMP_NUM_THREADS="1",
    )


def test_omp_num_threads_is_followed_where_it_is_a_number(monkeypatch, set_threads):
    for value, threads in (("3", 3), ("5,2", 5), ("", None), ("0", None), ("many", None)):
        set_threads(None)
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        count = _threads.thread_count()
        assert count == threads if threads else 1 <= count <= (os.cpu_count() or 1)
        set_threads(7)
        assert _threads.thread_count() == 7


def test_set_num_threads_refuses_values_that_are_no_number_of_threads():
    for n in (0, -1, True, 1.0, "2"):
        text = f"^set_num_threads: n is {n!r}, expected a positive int or None$"
        with pytest.raises(ValueError, match=text):
            cunorm.set_num_threads(n)


@pytest.mark.parametrize(
    ("own", "quotas", "cores"),
    [
        ("0::/", {"": "250000 100000"}, 2),
        ("0::/", {"": "max 100000"}, None),
        ("0::/user/job", {"user": "300000 100000", "user/job": "max 100000"}, 3),
        ("1:cpu:/other\n0::/user/job", {"user": "300000 100000", "user/job": "50000 100000"}, 1),
        ("0::/not/seen/in/a/container", {"": "200000 100000"}, 2),
        ("1:cpu:/other", {"other": "200000 100000"}, None),
        ("0::/", {}, None),
    ],
)
def test_quotas_of_control_groups_count_as_cores(monkeypatch, tmp_path, own, quotas, cores):
    (tmp_path / "own").write_text(own + "\n")
    for group, quota in quotas.items():
        (tmp_path / "root" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / group / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(_threads, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(_threads, "_CGROUPS", tmp_path / "root")
    assert _threads._cgroup_cores() == cores


def test_subnormal_results_are_kept(set_threads):
    x = np.full((600, 257), 1e-40, np.float32)
    for threads in (1, 2):
        set_threads(threads)
        # Bits are compared: for a thread that flushes subnormals, every subnormal equals 0.
        assert_same_bits(cunorm.rms_norm(x, eps=1.0), x)


@posix
@pytest.mark.parametrize("chosen", [None, "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_openmp_is_loaded_with_short_waits_that_only_openmp_sees(chosen, monkeypatch, tmp_path):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv(chosen, "7")
    monkeypatch.setattr(_threads, "_is_loaded", threading.Event())
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, before, seen = ctypes.c_char_p, dict(os.environ), []
    monkeypatch.setattr(_compile, "_compiled", lambda build: (tmp_path, False))
    monkeypatch.setattr(_compile, "entry_of", lambda path: seen.append(getenv(b"GOMP_SPINCOUNT")))
    for _ in range(2):
        _compile._load(KernelBuild("any", ()))
    own = {None: [b"1000", None], "GOMP_SPINCOUNT": [b"7", b"7"], "OMP_WAIT_POLICY": [None, None]}
    assert seen == own[chosen]
    assert dict(os.environ) == before
    assert getenv(b"GOMP_SPINCOUNT") == own[chosen][1]


# --- forks and modes ------------------------------------------------------------------------------

AFTER_OPENMP = """
import time, traceback

def alive():
    small = np.full(8, 1e-40, np.float32)
    return (small * np.float32(1) != 0).all()

def as_child():
    before = tasks()
    again()
    check(1)
    cunorm.layer_norm(x)  # a build that the parent has not loaded
    end = time.monotonic() + 5
    while tasks() > before and time.monotonic() < end:
        time.sleep(0.001)  # the system still lists a joined thread for a moment
    return tasks() - before

again()
check(0)
seen = []
thread = threading.Thread(target=lambda: (check(1), seen.append(alive())))
thread.start()
thread.join()
assert alive() and seen == [True], "subnormals are flushed where a build was loaded"
child = os.fork()
if child == 0:
    try:
        os._exit(as_child())
    except BaseException:
        traceback.print_exc()
        os._exit(99)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
again()
with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map(check, range(8))
check(9)
"""


@linux
def test_forked_children_and_their_parents_give_right_answers_after_openmp_was_used():
    """A child also repeats its parent's call, and no call flushes subnormals."""
    in_process(AGAIN + AFTER_OPENMP, OMP_NUM_THREADS="2")


def call_and_exit() -> None:
    check()
    atexit._run_exitfuncs()  # those that a forked child has from its parent must not wait, either


def call_in_child(method: str, begun: str) -> None:
    """Make a call in a child process after the file `begun` shows that a thread compiles."""
    thread = threading.Thread(target=check)
    thread.start()
    while not Path(begun).exists():
        time.sleep(0.05)
    child = multiprocessing.get_context(method).Process(target=call_and_exit, daemon=True)
    child.start()
    thread.join()
    child.join(30)
    assert child.exitcode == 0


@posix
@compiles
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_started_while_a_thread_compiles_does_not_wait_for_the_thread(tmp_path, method):
    begun = os.fspath(tmp_path / "begun")
    in_process(
        "from tests.backends.test_threads import call_in_child\n"
        f"call_in_child({method!r}, {begun!r})",
        CXX=script(tmp_path, f'{ANSWERS}touch "{begun}"; sleep 1\n{copies()}'),
        CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"),
    )
