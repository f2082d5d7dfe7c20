# SPDX-License-Identifier: MIT
"""Threads, forks, environments and floating-point modes: the CPU build disturbs none of them."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cunorm
from cunorm import _cpu
from cunorm._cpu import _threads
from tests.support.bounds import check_backward, check_forward
from tests.support.operands import assert_same_bits, draw, optional
from tests.support.processes import in_process

ROWS, WIDTH = 600, 257  # enough work for all threads

linux = pytest.mark.skipif(sys.platform != "linux", reason="counts threads in Linux's /proc")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")


# --- several threads at once ----------------------------------------------------------------------


def test_two_threads_calling_at_once_get_their_own_right_answers():
    start = threading.Barrier(2)

    def work(name):
        x, dy = (draw(f"{o} of {name}", (ROWS, WIDTH), "float32") for o in ("x", "dy"))
        weight, bias = (optional(o, WIDTH, "float32") for o in ("weight", "bias"))
        start.wait()
        expected = None
        for _ in range(60):
            forward = cunorm.layer_norm_forward(x, weight, bias)
            statistics = {"rstd": forward.rstd, "mean": forward.mean}
            grads = cunorm.layer_norm_backward(dy, x, weight, bias, **statistics)
            if expected is None:
                check_forward(forward, x, weight, bias, center=True, eps=1e-5)
                check_backward(grads, dy, x, weight, bias, center=True, eps=1e-5)
                expected = forward, grads
            for one, first in zip((*forward, *grads), (*expected[0], *expected[1]), strict=True):
                np.testing.assert_array_equal(one, first)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, ["one", "other"]))


def test_threads_of_different_shapes_and_operators_do_not_mix_up_their_arguments():
    def work(number):
        width = 100 + 37 * number
        x = draw(f"x {number}", (50 + number, width), "float32")
        function = (cunorm.rms_norm_forward, cunorm.l2_norm_forward)[number % 2]
        first = function(x)
        for _ in range(100):
            np.testing.assert_array_equal(function(x).y, first.y)
        if number % 2 == 0:
            check_forward(first, x, None, None, eps=1e-6)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


# --- how many threads -----------------------------------------------------------------------------


@linux
def test_omp_num_threads_may_change_while_python_runs():
    script = """
check(0)
before = tasks()
os.environ["OMP_NUM_THREADS"] = "3"
check(1)
assert tasks() == before + 2, (before, tasks())
os.environ["OMP_NUM_THREADS"] = "1"
check(2)
os.environ["OMP_NUM_THREADS"] = "2"
check(3)
"""
    in_process(script, OMP_NUM_THREADS="1")


AGAIN = """
rng = np.random.default_rng(0)
x = rng.standard_normal((600, 257)).astype(np.float32)
y, exact = np.empty_like(x), cunorm.reference.rms_norm(x)

def again():
    y.fill(np.nan)
    cunorm.rms_norm(x, out=y)
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-4)

again()
"""


@linux
def test_a_call_that_is_made_again_follows_omp_num_threads():
    script = """
again()
before = tasks()
os.environ["OMP_NUM_THREADS"] = "3"
again()
assert tasks() == before + 2, (before, tasks())
"""
    in_process(AGAIN + script, OMP_NUM_THREADS="1")


def test_gradients_are_the_same_to_the_bit_for_any_omp_num_threads():
    script = """
import hashlib
rng = np.random.default_rng(0)
x, dy = (rng.standard_normal((3000, 257)).astype(np.float32) for _ in range(2))
weight = np.ones(257, np.float32)
rstd = cunorm.rms_norm_forward(x, weight).rstd
grads = cunorm.rms_norm_backward(dy, x, weight, rstd=rstd)
digest = hashlib.sha256(grads.dx.tobytes() + grads.dweight.tobytes()).hexdigest()
print(cunorm._cpu.thread_count(), digest)
"""
    printed = [in_process(script, OMP_NUM_THREADS=str(n)).split() for n in (1, 2, 3)]
    assert [threads for threads, _ in printed] == ["1", "2", "3"]
    assert len({digest for _, digest in printed}) == 1


@linux
def test_little_work_wakes_no_thread():
    script = """
before = tasks()
cunorm.rms_norm(np.ones((8, 32), np.float32))
assert tasks() == before, (before, tasks())
"""
    in_process(script, OMP_NUM_THREADS="4")


@pytest.mark.parametrize(
    ("value", "threads"), [("3", 3), ("5,2", 5), ("", None), ("0", None), ("many", None)]
)
def test_omp_num_threads_is_followed_where_it_is_a_number(monkeypatch, value, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    cunorm.set_num_threads(None)  # what other tests in this process, as of examples, said lasts
    count = _cpu.thread_count()
    assert count == threads if threads else 1 <= count <= (os.cpu_count() or 1)


def test_set_num_threads_comes_before_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    cunorm.set_num_threads(5)
    try:
        assert _cpu.thread_count() == 5
    finally:
        cunorm.set_num_threads(None)
    assert _cpu.thread_count() == 3


@pytest.mark.parametrize("n", [0, -1, True, 1.0, "2"], ids=repr)
def test_set_num_threads_refuses_what_is_no_number_of_threads(n):
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


@linux
def test_the_default_number_of_threads_respects_affinity():
    script = """
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
os.environ.pop("OMP_NUM_THREADS", None)
before = tasks()
check(0)
assert tasks() == before, (before, tasks())
"""
    in_process(script)


# --- forks ----------------------------------------------------------------------------------------


@forks
def test_a_forked_child_gives_right_answers_after_its_parent_used_openmp():
    script = """
import traceback
check(0)
child = os.fork()
if child == 0:
    try:
        check(1)
        cunorm.layer_norm(np.ones((600, 257), np.float32))  # a build that the parent has not loaded
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
check(2)
"""
    in_process(script, OMP_NUM_THREADS="2")


@forks
def test_a_forked_child_makes_its_parents_call_again():
    script = """
child = os.fork()
if child == 0:
    try:
        before = tasks()
        again()
        os._exit(tasks() - before)
    except BaseException:
        os._exit(99)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
again()
"""
    in_process(AGAIN + script, OMP_NUM_THREADS="2")


@forks
def test_a_pool_of_forked_workers_gives_right_answers():
    script = """
check(0)
with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map(check, range(8))
check(9)
"""
    in_process(script, OMP_NUM_THREADS="2")


@forks
def test_a_child_forked_while_another_thread_compiles_does_not_wait_for_it(tmp_path):
    compiler = tmp_path / "slow"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) ;; *) sleep 3;; esac\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    script = """
import time
x = np.ones((4, 8), np.float32)
thread = threading.Thread(target=cunorm.rms_norm, args=(x,))
thread.start()
time.sleep(1)
child = os.fork()
if child == 0:
    cunorm.rms_norm(x)
    os._exit(0)
thread.join()
for _ in range(200):
    if os.waitpid(child, os.WNOHANG) != (0, 0):
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
    raise SystemExit("the child hangs")
"""
    in_process(script, CXX=os.fspath(compiler), CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"))


# --- the caller's floating-point mode -------------------------------------------------------------


def test_loading_a_build_leaves_subnormals_alive():
    script = """
def alive():
    small, tiny = np.full(8, 1e-40, np.float32), np.full(8, 1e-38, np.float32)
    return (small * np.float32(1) != 0).all() and (tiny * np.float32(0.1) != 0).all()

assert alive()
check(0)
assert alive()
seen = []
thread = threading.Thread(target=lambda: (seen.append(alive()), check(1), seen.append(alive())))
thread.start()
thread.join()
assert seen == [True, True]
"""
    in_process(script, OMP_NUM_THREADS="2")


@pytest.mark.parametrize("threads", [1, 2])
def test_subnormal_results_are_kept(threads):
    x = np.full((ROWS, WIDTH), 1e-40, np.float32)
    cunorm.set_num_threads(threads)
    try:
        y = cunorm.rms_norm(x, eps=1.0)
    finally:
        cunorm.set_num_threads(None)
    assert_same_bits(y, x)  # to flushed numbers, a subnormal and zero are equal
