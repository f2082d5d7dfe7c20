# SPDX-License-Identifier: MIT
"""Hooks: load the software GPU if there is no GPU, set optimisation levels, count builds."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from importlib.util import find_spec
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.support")

# By default, waiting threads spin on cores that other processes and their compilers need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the same, for NumPy's matrix products

from tests import softgpu  # noqa: E402
from tests.support import internals, levels, real_gpu, shares  # noqa: E402

# pytest finds these hooks because this module has their names.
from tests.support.real_gpu import (  # noqa: E402, F401
    pytest_runtest_makereport,
    pytest_runtest_protocol,
)

ON_GPU = ("gpu", True)
_no_software_gpu = ""  # why the software GPU is not available


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Collect no doctests in tests/: their collector would skip modules that fail to import."""
    found = yield
    return [collector for collector in found if type(collector) is pytest.Module]


@pytest.hookimpl(tryfirst=True)  # before the tests that are marked exhaustive are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    shares.leave_out(items)
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if needy and (reason := why_no_gpu()):
        for item in needy:
            item.add_marker(pytest.mark.skip(reason=reason))
    for item in needy:
        item.user_properties.append(ON_GPU)  # for the summary
    for item in items:
        if softgpu.is_loaded() and (mark := item.get_closest_marker("real_gpu")):
            item.add_marker(pytest.mark.skip(reason=f"not on the software GPU: {mark.args[0]}"))
        if item.name.startswith("cunorm.torch.") and not find_spec("torch"):
            item.add_marker(pytest.mark.skip(reason="PyTorch is not installed"))  # a doctest


def pytest_report_header() -> str:
    return real_gpu.header(why_no_gpu())


def why_no_gpu() -> str | None:
    """Return what is missing for a test marked gpu; None if nothing is missing."""
    reason = real_gpu.why_no_gpu()
    return reason and "; ".join(filter(None, (reason, _no_software_gpu)))


def pytest_configure(config: pytest.Config) -> None:
    """If there is no real GPU, load the software GPU, for this process and its children."""
    global _no_software_gpu
    shares.note(config)
    real_gpu.prepare_jax()
    _no_software_gpu = softgpu.unavailable()
    if softgpu.real_gpu() or _no_software_gpu:
        return
    try:
        os.environ.update(softgpu.subprocess_environment())
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        _no_software_gpu = f"the software GPU is not built: {error}"
    else:
        internals._driver._LIBRARY = os.environ["SOFTGPU_LIBRARY"]  # instead of libcuda.so.1


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set the optimisation level that the test is marked with, before its fixtures run."""
    marker = item.get_closest_marker("compiled")
    levels.use(marker.args[0] if marker else "O0")


def pytest_sessionstart(session: pytest.Session) -> None:
    levels.count_builds()
    if not (hasattr(session.config, "workerinput") or session.config.option.collectonly):
        levels.prepare()  # before there are workers


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the builds of a worker process to the builds of this process."""
    levels.builds.update(map(tuple, getattr(node, "workeroutput", {}).get("builds", ())))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run with more builds than its budget."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["builds"] = sorted(levels.builds)
    elif _is_over_budget(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _is_over_budget(config: pytest.Config) -> bool:
    """Return whether a run of the whole suite has more builds than its budget."""
    is_ordinary = shares.is_whole() and config.getoption("markexpr") != "exhaustive"
    return is_ordinary and not levels.account(levels.builds)[1]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    text, _ = levels.account(levels.builds)
    terminalreporter.write_line(f"{text}: too many" if _is_over_budget(config) else text)
    passed = terminalreporter.stats.get("passed", ())
    if softgpu.is_loaded() and (count := sum(ON_GPU in r.user_properties for r in passed)):
        terminalreporter.write_line(f"{count} tests marked gpu passed on the software GPU")
