# SPDX-License-Identifier: MIT
"""Compile and load many builds in parallel, with a progress bar."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from cunorm._backends import cuda
from cunorm._backends.cpu import compile as cpu_compile
from cunorm._backends.cpu.processes import Stop, use_stop
from cunorm._core.build import KernelBuild
from cunorm._core.tensor import Device


def compile_concurrently(
    builds: Sequence[KernelBuild],
    device: Device,
    workers: int,
    step: Callable[[], object],
) -> int:
    """Compile and load builds with a pool of workers; return how many are new.

    Call `step` after each. If builds fail, finish the others, then raise a RuntimeError about the
    first failure.
    """
    on_gpu = device.kind == "cuda"
    prepare = partial(cuda.prepare, device=device) if on_gpu else cpu_compile.prepare
    stop = Stop()
    with ThreadPoolExecutor(workers, initializer=use_stop, initargs=(stop,)) as pool:
        tasks: dict[Future[bool], KernelBuild] = {}
        try:
            for build in builds:
                tasks[pool.submit(prepare, build)] = build
            left = set(tasks)
            while left:  # in slices: a signal just before an endless wait would not interrupt it
                done, left = wait(left, 0.5, FIRST_COMPLETED)
                for _ in done:
                    step()
        except BaseException:  # an interrupt: the user does not want to wait
            stop.set()  # first: a second interrupt may end this handler
            for task in tasks:
                task.cancel()
            raise
    failed = [(build, error) for task, build in tasks.items() if (error := task.exception())]
    if failed:
        build, error = failed[0]
        text = str(error) if str(build) in str(error) else f"{build}: {error}"
        counts = f"{len(failed)} of {len(tasks)} builds failed, the first of them"
        raise RuntimeError(f"{counts}: {text}") from error
    return sum(task.result() for task in tasks)


def progress_bar(total: int, **options: Any) -> Any:
    """Return a tqdm bar for `total` builds, None if tqdm is not installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    # tqdm's monitor thread would live as long as the process.
    unwatched = type("Bar", (tqdm,), {"monitor_interval": 0})
    return unwatched(total=total, unit="build", miniters=1, **options)
