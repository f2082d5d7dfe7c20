# SPDX-License-Identifier: MIT
"""Skips the tests marked gpu where there is no GPU; compiles quickly where told; counts builds."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.support")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Look for doctests in the package alone: what tests share has none."""
    is_shared = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if is_shared else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if needy and (reason := why_no_gpu()):
        for item in needy:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config: pytest.Config) -> None:
    """Make a folder for compiled headers, which the processes of this run share."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="cunorm-headers-")
        config.add_cleanup(folder.cleanup)
        os.environ["CUNORM_TEST_HEADERS"] = folder.name  # where precompiled.py looks


def why_no_gpu() -> str | None:
    """Say what is missing for a test on a GPU, if anything is."""
    try:
        import cupy
    except ImportError as error:
        return f"needs a GPU and CuPy: {error}"
    try:
        cupy.cuda.runtime.getDevice()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"needs an NVIDIA GPU: {error}"
    return None


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """Compile without optimisation, which takes a third of the time: for what is around kernels."""
    yield from _quick_compiles()


@pytest.fixture
def is_quick(request: pytest.FixtureRequest) -> Iterator[None]:
    """Do so, or not, in one test alone: the parameter says which."""
    if request.param:
        yield from _quick_compiles()
    else:
        yield


def _quick_compiles() -> Iterator[None]:
    from tests.support import described

    with pytest.MonkeyPatch.context() as patch:
        described.with_quick_compiles(patch)
        described.with_empty_caches(patch)
        yield


@pytest.fixture
def record_builds(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Note which builds the test was the first in its process to load, for the summary's count."""
    from cunorm._cpu import _compile

    before = set(_compile._loaded)
    yield
    record_property("builds", [str(build) for build in set(_compile._loaded) - before])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many different builds the tests with `record_builds` compiled and ran."""
    builds = {
        build
        for reports in terminalreporter.stats.values()
        for report in reports  # the fixture's note is in that of the teardown
        for name, value in getattr(report, "user_properties", ())
        if name == "builds"
        for build in value
    }
    if builds:
        kernels = Counter(build.partition(" ")[0] for build in builds)
        counts = ", ".join(f"{count} of {kernel}" for kernel, count in sorted(kernels.items()))
        terminalreporter.write_line(f"{len(builds)} CPU builds: {counts}")
