# SPDX-License-Identifier: MIT
"""A run on a real GPU ends where the GPU is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

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
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}
    kwargs = {"capture_output": True, "text": True, "cwd": folder, "env": env, "check": False}
    return subprocess.run([*command, *options, "test_it.py"], **kwargs, timeout=100)


@pytest.mark.parametrize(
    ("options", "failed"),
    [
        # Two tests, and the end of the worker; another worker runs the test that is left.
        pytest.param(("-n", "1"), "3 failed, 1 passed in", id="with workers"),
        pytest.param(("-p", "no:xdist"), "2 failed in", id="without workers"),
    ],
)
def test_a_process_that_has_lost_the_gpu_ends_and_another_runs_the_tests_that_are_left(
    tmp_path, options, failed
):
    if "-n" in options:
        pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    done = run_with_a_lost_gpu(tmp_path, *options)
    lost = "after test_it.py::test_2_loses_the_gpu this process cannot use the GPU any more: cudaE"
    assert lost in done.stdout + done.stderr
    assert "assert not cupy.is_lost" in done.stdout  # the failure itself is reported
    assert failed in done.stdout
    assert ("PASSED test_it.py::test_3_comes_after" in done.stdout) == ("-n" in options)
    assert done.returncode == 1
