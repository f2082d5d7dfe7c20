# SPDX-License-Identifier: MIT
"""Setup and hooks for tests on a real GPU; conftest.py imports the hooks."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import softgpu

_CONTROL = Path("/dev/nvidiactl")  # there if the driver's kernel module is loaded
_failed = pytest.StashKey[bool]()
# These flags shorten the time to compile, which is most of the time of the tests of JAX.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if find_spec("jaxlib") and version("jaxlib").startswith("0.10."):  # a later one refuses this flag
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"


def prepare_jax() -> None:
    """Set environment variables of JAX that the user has not set, before JAX starts.

    Without the first variable, the first process of a run takes three quarters of the GPU's memory.
    The second variable makes the CPU the default device, as most tests of JAX need; tests of a GPU
    ask for `jax.devices("cuda")`. A JAX without CUDA would refuse the second variable; XLA then
    gets the flags above.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    has_cuda = any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))
    if has_cuda and softgpu.real_gpu():
        os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda")
    else:
        os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)


def why_no_gpu() -> str | None:
    """Return what is missing for a test on a GPU (real or software); None if nothing is missing."""
    try:
        import cupy
    except ImportError as error:
        return f"needs a GPU and CuPy: {error}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"needs an NVIDIA GPU: {error}"
    return None if count else "needs an NVIDIA GPU: CuPy finds no device"


def header(reason: str | None) -> str:
    """Return a line for a run's head: the GPU for tests marked gpu, or why there is none."""
    if softgpu.is_loaded():
        text = "GPU: the software GPU, on which the tests marked gpu run"
        there = f", although there is {_CONTROL}: libcuda.so.1 is not found, or shows no device"
        return text + there if _CONTROL.exists() else text
    if reason:
        return f"GPU: {reason}"
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return f"GPU: that of this machine, {name}"


# --- a GPU that has failed ------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """If a failed test leaves the GPU unusable, end the process after the report of the test."""
    done = yield
    if item.stash.get(_failed, False) and item.get_closest_marker("gpu"):
        _end_if_lost(item.nodeid)
    return done


def _end_if_lost(test: str) -> None:
    """End this process if no later test can use the GPU, for example after a wrong address.

    CUDA then refuses every call of the process. xdist starts another process for the remaining
    tests; without xdist the run ends.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None or softgpu.is_loaded():
        return
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        text = f"after {test} this process cannot use the GPU any more: {error}"
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(f"{text}; with -n 1 the tests that are left would run", returncode=1)
        print(f"\n{text}; xdist starts another", file=sys.__stderr__, flush=True)
        os._exit(1)
