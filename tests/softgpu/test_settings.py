# SPDX-License-Identifier: MIT
"""Settings change the properties of the software GPU, and the order of its threads."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

from tests import softgpu
from tests.softgpu.launching import cupy, kernel, launch
from tests.support.internals import KernelBuild, Launch, _driver

EXCHANGE = """int* x) { __shared__ int s[64]; s[threadIdx.x] = threadIdx.x; %s
    x[threadIdx.x] = s[threadIdx.x ^ %d]; }"""
FLAG = """int* x) { __shared__ volatile int s; if (threadIdx.x == 0) s = 0; __syncthreads();
    if (threadIdx.x == %d) s = 1; while (!s); x[threadIdx.x] = 1; }"""
TICKETS = """volatile int* x) { int ticket = x[0]; x[0] = ticket + 1;
    x[1 + ticket] = blockIdx.x * 64 + threadIdx.x; }"""


@pytest.mark.parametrize("schedule", ["lockstep", "serial", "reverse", "random"])
def test_a_missing_wait_between_threads_gives_wrong_results_in_some_schedule(schedule):
    in_step = schedule == "lockstep"
    waits = [("", 1, in_step), ("__syncwarp();", 1, True), ("__syncthreads();", 32, True)]
    with softgpu.settings(schedule=schedule):
        for wait, distance, is_right in (*waits, ("", 32, False)):
            x = cupy.zeros(64, "i")
            launch(EXCHANGE % (wait, distance), x, block=64)
            assert np.array_equal(x.get(), np.arange(64) ^ distance) == is_right, (wait, distance)


@pytest.mark.parametrize("schedule", ["lockstep", "serial", "reverse", "random"])
def test_a_warp_in_a_loop_lets_other_warps_run(schedule):
    with softgpu.settings(schedule=schedule):
        for thread in (0, 32):
            x = cupy.zeros(64, "i")
            launch(FLAG % thread, x, block=64)
            assert x.get().all()


def order(**settings):
    with softgpu.settings(**settings):
        x = cupy.zeros(129, "i")
        launch(TICKETS, x, grid=2, block=64)
        return x.get()[1:].tolist()


def test_schedules_and_seeds_give_different_orders():
    seeds = [order(schedule="random", seed=seed) for seed in (1, 2, 3)]
    assert seeds == [order(schedule="random", seed=seed) for seed in (1, 2, 3)]
    orders = [*seeds, order(), order(schedule="serial"), order(schedule="reverse")]
    assert len(set(map(tuple, orders))) == 6
    assert orders[4] == orders[5][::-1] == list(range(128))


def test_settings_are_restored_even_after_an_error():
    with pytest.raises(KeyError), softgpu.settings(devices=3, multiprocessors=5):
        assert cupy.cuda.runtime.getDeviceCount() == 3
        assert cupy.cuda.Device(2).attributes["MultiProcessorCount"] == 5
        raise KeyError
    assert cupy.cuda.runtime.getDeviceCount() == 1
    assert cupy.cuda.Device().attributes["MultiProcessorCount"] == 132


@pytest.mark.parametrize("wrong", [{"schedule": "any"}, {"seed": "x"}, {"devices": 0}, {"sms": 3}])
def test_settings_that_are_not_known_are_refused(wrong):
    with pytest.raises(ValueError, match="no setting"), softgpu.settings(**wrong):
        pass


@pytest.mark.parametrize("capability", ["75", "80", "86", "89", "90", "100"])
def test_kernels_are_compiled_for_the_compute_capability_that_is_set(capability):
    compiled, x = kernel("int* x) { x[0] = __CUDA_ARCH__; }"), cupy.zeros(1, "i")
    clusters = kernel("int* x) { x[0] = 1; }", "__cluster_dims__(2, 1, 1)")
    with softgpu.settings(capability=capability):
        assert cupy.cuda.Device().compute_capability == capability
        compiled((1,), (1,), (x,))
        assert x.item() == 10 * int(capability)
        if int(capability) >= 90:
            clusters((2,), (1,), (x,))
        else:
            with pytest.raises(Exception, match="cluster"):
                clusters((2,), (1,), (x,))


@pytest.mark.parametrize(
    ("size", "largest", "shared", "fit"),
    [(8, 16, 0, 33), (8, 8, 0, 33), (16, 16, 0, 16), (16, 8, 0, 0), (8, 16, 200 << 10, 16)],
)
def test_the_driver_says_how_many_clusters_fit(size, largest, shared, fit):
    """Two blocks of 1024 threads fit a multiprocessor; with much shared memory, one block fits."""
    compiled = kernel("int* x) { }", f"__cluster_dims__({size}, 1, 1)")
    _driver.allow_large_clusters(cupy, compiled.kernel)
    with (
        softgpu.settings(largest_cluster=largest),
        mock.patch.object(_driver, "_LIBRARY", os.environ["SOFTGPU_LIBRARY"]),
    ):
        compiled.max_dynamic_shared_size_bytes = shared
        wanted = Launch(KernelBuild("k", (("CLUSTER", str(size)),)), 64, 1024, shared=shared)
        assert _driver.clusters_that_fit(cupy, compiled.kernel, wanted) == fit


def test_a_child_process_uses_the_current_settings():
    script = "import cupy; print(cupy.cuda.runtime.getDeviceCount(), cupy.zeros(3).get())"
    with softgpu.settings(devices=4):
        environment = os.environ | softgpu.subprocess_environment()
    options = {"env": environment, "capture_output": True, "text": True, "check": True}
    assert subprocess.run([sys.executable, "-c", script], **options).stdout == "4 [0. 0. 0.]\n"
