# SPDX-License-Identifier: MIT
"""A run on a real GPU says so, leaves room for other processes, and ends when the GPU is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import softgpu
from tests.support import real_gpu
from tests.support.processes import ROOT

JAX = ("XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_PLATFORMS")


class CUDARuntimeError(RuntimeError):
    pass


@pytest.fixture
def runtime(monkeypatch):
    """Replace CuPy by a fake with one device; return the fake's runtime."""
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda device: {"name": b"NVIDIA H200"},
    )
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(softgpu, "is_loaded", lambda: False)
    return runtime


def header():
    return real_gpu.header(real_gpu.why_no_gpu())


def test_the_head_of_a_run_names_the_gpu_of_this_machine_where_there_is_one(runtime):
    assert header() == "GPU: that of this machine, NVIDIA H200"


def test_the_head_of_a_run_names_no_gpu_of_this_machine_where_there_is_none(runtime, monkeypatch):
    runtime.getDeviceCount = lambda: 0
    assert header() == "GPU: needs an NVIDIA GPU: CuPy finds no device"

    def fail():
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    runtime.getDeviceCount = fail
    assert header() == "GPU: needs an NVIDIA GPU: cudaErrorInsufficientDriver"
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert header().startswith("GPU: needs a GPU and CuPy: ")


@pytest.mark.parametrize("is_there", [False, True])
def test_the_head_of_a_run_on_the_software_gpu_says_if_there_is_a_driver(
    is_there, monkeypatch, tmp_path
):
    control = tmp_path / "nvidiactl"
    if is_there:
        control.touch()
    monkeypatch.setattr(real_gpu, "_CONTROL", control)
    monkeypatch.setattr(softgpu, "is_loaded", lambda: True)
    assert header().startswith("GPU: the software GPU, on which the tests marked gpu run")
    assert (f"although there is {control}" in header()) == is_there


@pytest.mark.parametrize(
    ("plugin", "is_there", "platforms"),
    [
        ("xla_cuda13", True, "cpu,cuda"),
        ("xla_cuda12", False, None),
        ("a_tpu", True, None),  # JAX without CUDA refuses "cuda"
    ],
)
def test_jax_shares_a_gpu_and_computes_on_the_cpu_by_default(
    plugin, is_there, platforms, monkeypatch
):
    for name in JAX:
        monkeypatch.setenv(name, "")  # so that it is restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(real_gpu, "entry_points", lambda group: [SimpleNamespace(name=plugin)])
    monkeypatch.setattr(softgpu, "real_gpu", lambda: is_there)
    real_gpu.prepare_jax()
    assert [os.environ.get(name) for name in JAX] == ["false", platforms]
    for name in JAX:
        monkeypatch.setenv(name, "the user's")
    real_gpu.prepare_jax()
    assert [os.environ.get(name) for name in JAX] == ["the user's"] * 2


# --- a GPU that has failed ------------------------------------------------------------------------

CUPY = """
from types import SimpleNamespace

class CUDARuntimeError(RuntimeError):
    pass

is_lost = False

def deviceSynchronize():
    if is_lost:
        raise CUDARuntimeError("cudaErrorIllegalAddress")

runtime = SimpleNamespace(deviceSynchronize=deviceSynchronize, CUDARuntimeError=CUDARuntimeError)
cuda = SimpleNamespace(runtime=runtime)
"""
TESTS = """
import cupy
import pytest

@pytest.mark.gpu
def test_1_is_wrong_and_leaves_the_gpu_as_it_is():
    assert False

@pytest.mark.gpu
def test_2_loses_the_gpu():
    assert not cupy.is_lost
    cupy.is_lost = True
    assert False

def test_3_comes_after():
    assert not cupy.is_lost
"""


def run_with_a_lost_gpu(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "cupy.py").write_text(CUPY)
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.support.real_gpu"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}
    del env["PYTEST_CURRENT_TEST"]
    for name in [name for name in env if name.startswith("PYTEST_XDIST")]:
        del env[name]
    kwargs = {"capture_output": True, "text": True, "cwd": folder, "env": env, "check": False}
    return subprocess.run([*command, *options, "test_it.py"], **kwargs, timeout=100)


LOST = "after test_it.py::test_2_loses_the_gpu this process cannot use the GPU any more: cudaError"


def test_a_worker_that_has_lost_the_gpu_ends_and_another_runs_the_tests_that_are_left(tmp_path):
    pytest.importorskip("xdist")
    done = run_with_a_lost_gpu(tmp_path, "-n", "1")
    assert LOST in done.stderr
    assert "assert not cupy.is_lost" in done.stdout  # the failure itself is reported
    assert "crashed while running 'test_it.py::test_2_loses_the_gpu'" in done.stdout
    assert "[gw1] [100%] PASSED test_it.py::test_3_comes_after" in done.stdout
    assert "3 failed, 1 passed in" in done.stdout  # two tests, and the end of the worker
    assert done.returncode == 1


def test_a_run_without_workers_ends_where_the_gpu_is_lost(tmp_path):
    done = run_with_a_lost_gpu(tmp_path, "-p", "no:xdist")
    assert f"Exit: {LOST}" in done.stdout
    assert "2 failed in" in done.stdout
    assert "test_3_comes_after" not in done.stdout
    assert done.returncode == 1
