# SPDX-License-Identifier: MIT
"""Prints a line to standard error, once in a process, if the user has to wait for the compiler."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from threading import Event

from cunorm._core.build import KernelBuild

PATIENCE = 2.0  # seconds

is_announced = Event()  # also set by callers that inform the user themselves


def announce_compile(builds: Sequence[KernelBuild]) -> None:
    """Print what is being compiled."""
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
