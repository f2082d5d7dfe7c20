# SPDX-License-Identifier: MIT
"""One line of the logger `cunorm`, once in a process, if the user has to wait for the compiler."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from threading import Event

from cunorm._core.build import KernelBuild

PATIENCE = 2.0  # seconds

is_announced = Event()  # also set by callers that inform the user themselves


def announce_compile(builds: Sequence[KernelBuild]) -> None:
    """Log what is being compiled: on standard error, if the user has not set up logging."""
    if not is_announced.is_set():
        is_announced.set()
        names = " and ".join(dict.fromkeys(build.kernel for build in builds))
        text = "cunorm compiles %s, once for this machine; cunorm.warmup does so ahead"
        with suppress(OSError, ValueError):  # a stream that was closed
            logging.getLogger("cunorm").warning(text, names)
