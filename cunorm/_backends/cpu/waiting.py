# SPDX-License-Identifier: MIT
"""One line on standard error, once in a process, for a user who waits for the compiler."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Timer

from cunorm._core.build import KernelBuild

_PATIENCE = 2.0  # seconds

is_announced = Event()  # set also by who tells its user itself


@contextmanager
def explained(builds: Sequence[KernelBuild]) -> Iterator[None]:
    """Say what is compiled, if that takes longer than two seconds."""
    timer = Timer(_PATIENCE, _say, (builds,))
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # no thread can be started, as when the interpreter ends
        yield
        return
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # nothing is left of it for a process that forks


def _say(builds: Sequence[KernelBuild]) -> None:
    if is_announced.is_set() or sys.stderr is None:
        return
    is_announced.set()
    names = " and ".join(dict.fromkeys(build.kernel for build in builds))
    with suppress(OSError, ValueError):  # a stream that was closed
        print(
            f"cunorm compiles {names}, once for this machine; cunorm.warmup does so ahead",
            file=sys.stderr,
            flush=True,
        )
