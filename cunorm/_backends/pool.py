# SPDX-License-Identifier: MIT
"""Compile and load many builds in parallel, with a progress bar."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cunorm._backends import cuda
from cunorm._backends.cpu import compile as cpu_compile
from cunorm._backends.cpu.processes import call_concurrently
from cunorm._core.build import KernelBuild
from cunorm._core.tensor import Device


def compile_concurrently(
    builds: Sequence[KernelBuild], device: Device, workers: int, step: Callable[[int], object]
) -> int:
    """Compile and load builds, as many at once as there are workers; return how many are new.

    Call `step` with the number of builds ended since the last time. If some fail, finish the
    others, then raise a RuntimeError about the first failure.
    """
    calls: list[Callable[[], tuple[Any, bool]]]
    calls = [partial(cuda.prepare, build, device) for build in builds]
    if device.kind == "cpu":
        calls = [partial(cpu_compile.prepare, build) for build in builds]
    futures = call_concurrently(calls, workers, step)
    tried = zip(builds, futures, strict=True)
    failed = [(build, error) for build, future in tried if (error := future.exception())]
    if failed:
        build, error = failed[0]
        text = str(error) if str(build) in str(error) else f"{build}: {error}"
        counts = f"{len(failed)} of {len(builds)} builds failed, the first of them"
        raise RuntimeError(f"{counts}: {text}") from error
    return sum(future.result()[1] for future in futures)


def progress_bar(total: int, **options: Any) -> Any:
    """Return a tqdm bar for `total` builds, None if tqdm is not installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    # tqdm's monitor thread would live as long as the process.
    unwatched = type("Bar", (tqdm,), {"monitor_interval": 0})
    return unwatched(total=total, unit="build", miniters=1, **options)
