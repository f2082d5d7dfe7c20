# SPDX-License-Identifier: MIT
"""`python -m bench builds`: compile the kernels of a check on a GPU in advance, on all cores.

`record`, which needs no GPU, writes the list of builds in two minutes: it runs the tests marked gpu
on the software GPU, which resembles an H200, and plans the calls of sanitize.py and of the quick
timings. `compile` compiles as calls do, so CuPy keeps the kernels on disk for later processes.
It prints how many builds fail. Builds that are not in the list are compiled at their first call.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from typing import Any
from unittest import mock

from bench.plans.planned import warmup_options
from bench.timing import gpu, grid, sanitize
from bench.timing.arguments import count, seconds
from bench.timing.cases import TIMED, Operator, Shape
from bench.timing.operands import checked_shape
from cunorm._backends import cuda, driver
from cunorm._backends.sources import kernel_folder
from cunorm._core.build import KernelBuild
from cunorm._core.tensor import Device
from cunorm._warmup import planned

LIST = Path(__file__).parents[1] / "results" / "gpu-builds.json"
# The tests of the list, which load the old list's builds, are left out.
_TESTS = ("-p", "bench.plans.builds", "-m", "gpu and not exhaustive", "-k", "not recorded_builds")
_NOTES = "BENCH_GPU_BUILDS"  # names the file to which tests append builds


def main(argv: list[str]) -> int:
    """Record the list, or compile it; return 1 if tests fail, or nothing compiles."""
    parser = argparse.ArgumentParser(prog="python -m bench builds", description=__doc__)
    add = parser.add_argument
    add("command", choices=["record", "compile"])
    add("--jobs", type=count, default=os.cpu_count(), help="processes; default: one for each core")
    add("--every", type=count, default=1, help="compile only every Nth build of the list")
    add("--seconds", type=seconds, default=math.inf, help="begin no build after so many seconds")
    options = parser.parse_args(argv)
    if options.command == "record":
        return record(options.jobs)
    return compile_all(read(LIST)[:: options.every], options.jobs, options.seconds)


# --- the list: for a kernel and its macros' names, the macros' values, a line for each build ------


def write(path: Path, builds: Iterable[KernelBuild]) -> None:
    """Write builds in sorted order."""
    lists: dict[str, list[str]] = {}
    for build in sorted(set(builds), key=str):
        names, values = zip(*build.macros, strict=True)
        if any(" " in value for value in values):
            raise ValueError(f"a value of a macro has a space: {build}")
        lists.setdefault(" ".join((build.kernel, *names)), []).append(" ".join(values))
    path.write_text(json.dumps(lists, indent=0) + "\n")


def read(path: Path) -> list[KernelBuild]:
    """Return the builds of a list."""
    return [
        KernelBuild(kernel, tuple(zip(macros, line.split(), strict=True)))
        for names, lines in json.loads(path.read_text()).items()
        for kernel, *macros in [names.split()]
        for line in lines
    ]


# --- compile --------------------------------------------------------------------------------------


def compile_all(builds: list[KernelBuild], jobs: int, limit: float) -> int:
    """Compile builds in `jobs` processes for `limit` seconds; return 1 if nothing compiles."""
    start, done, errors = time.perf_counter(), 0, []
    spawn = get_context("spawn")  # a forked process cannot use CUDA
    with ProcessPoolExecutor(jobs, spawn, initializer=signal, initargs=(SIGINT, SIG_IGN)) as pool:
        try:
            for error in pool.map(_error_of, builds):
                done += 1
                errors += [error] if error else []
                if time.perf_counter() - start > limit:
                    break
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    took = time.perf_counter() - start
    print(f"{done} of {len(builds)} builds in {took:.1f} s in {jobs} processes")
    if errors:
        print(f"{len(errors)} do not compile, the first of them: {errors[0]}")
    return int(len(errors) == done)


def _error_of(build: KernelBuild) -> str:
    try:
        cuda.prepare(build, Device("cuda", cuda.current_device()))
    except Exception as error:  # the other builds are still compiled
        return f"{type(error).__name__}: {error}"
    return ""


# --- record ---------------------------------------------------------------------------------------


def record(jobs: int) -> int:
    """Write the list; return 1 if a test fails: builds that it did not reach are then missing."""
    from tests import softgpu

    softgpu.load()
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        command = [sys.executable, "-m", "pytest", "-q", *_TESTS, "-n", str(jobs)]
        status = subprocess.run(command, env={**os.environ, _NOTES: str(notes)}).returncode
        noted = map(json.loads, notes.read_text().splitlines())
        builds = {KernelBuild(kernel, tuple(map(tuple, macros))) for kernel, macros in noted}
    builds |= set(_of_calls())
    write(LIST, builds)
    print(f"{LIST}: {len(builds)} builds, {LIST.stat().st_size} bytes")
    return int(status != 0)


def pytest_configure() -> None:
    """Note each build that this process loads; pytest calls this function of a plugin."""
    notes, load = os.environ.get(_NOTES), cuda._load

    def noted(build: KernelBuild) -> Any:
        function = load(build)
        if (kernel_folder() / f"{build.kernel}.cu").is_file():  # not a test's own kernel
            with open(notes, "a") as file:  # noqa: PTH123  # processes append whole lines
                file.write(json.dumps([build.kernel, build.macros]) + "\n")
        return function

    if notes:
        cuda._load = noted


def _of_calls() -> Iterable[KernelBuild]:
    """Yield the builds of sanitize.py and of the quick timings; compile and start nothing."""
    gpu.cupy()
    points = [(one, dtype, shape) for one in TIMED for dtype, shape in sanitize.points(one)]
    for point in grid.default_points("cuda", grid.quick_operators("cuda"), quick=True):
        shapes = (point.shape, checked_shape(point.shape))
        points += [(point.operator, point.dtype, shape) for shape in shapes]
    with (
        mock.patch.object(cuda, "_load", lambda build: build),
        mock.patch.object(driver, "clusters_that_fit", lambda *launch: 1),
    ):
        for point in points:
            yield from _builds_of(*point)


def _builds_of(operator: Operator, dtype: str, shape: Shape) -> list[KernelBuild]:
    """Return the builds of an operator's calls: inference, forward and backward."""
    sizes = shape[1:] if operator.of_images else shape[-1:]
    options = warmup_options(operator, True, *sizes)
    rows = math.prod(shape) // math.prod(sizes if operator.of_channels else sizes[:1])
    return planned(operator.functions, sizes[0], dtype, Device("cuda", 0), rows, options)
