# SPDX-License-Identifier: MIT
"""Run compilers; end each with its children after a time limit, or if the caller is interrupted.

Each compiler leads its own process group, so a Ctrl-C in the terminal does not reach it. The group
is killed as a whole: GCC's cc1plus goes on if only g++ is killed (tried with GCC 12).
"""

import atexit
import os
import shlex
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait  # no pools, which fail at exit
from contextlib import suppress
from functools import partial
from mmap import mmap
from threading import Event, Thread, local
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")

TIME_LIMIT = 10 * 60.0  # seconds, far more than a compile takes on a busy machine
_PATIENCE = 5.0  # seconds, for a killed process to end
# Bytes that must be free to start a thread, whose stack takes 8 MiB: CPython waits forever for a
# thread that finds no memory.
_ROOM = 16 << 20

_of_thread = local()  # its `stop` is an event that ends the compilers of the thread


class Stopped(RuntimeError):
    """A compiler that does not start, takes too long, or was ended with its caller."""


def run(
    command: Sequence[str], env: Mapping[str, str] | None = None, *, limit: float | None = None
) -> subprocess.CompletedProcess[str]:
    limit = TIME_LIMIT if limit is None else limit
    stop, end = getattr(_of_thread, "stop", None) or Event(), monotonic() + limit
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace"}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    try:
        process = subprocess.Popen(command, env=env, **options)
    except OSError as error:
        raise Stopped(
            f"cunorm cannot start the C++ compiler: {error}; if it is gone, install it again, or "
            f"let CXX name another\n  {shlex.join(command)}"
        ) from error
    try:
        while not stop.is_set() and monotonic() < end:
            with suppress(subprocess.TimeoutExpired):
                output, errors = process.communicate(timeout=min(0.1, limit))
                return subprocess.CompletedProcess(command, process.returncode, output, errors)
    finally:
        _end(process)
    if stop.is_set():
        raise Stopped("cunorm: a compile was interrupted")
    raise Stopped(
        f"cunorm ended the C++ compiler, as it was not done after {limit:g} seconds: find out "
        f"what it waits for, or let CXX name another\n  {shlex.join(command)}"
    )


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process and its children if it still runs, and wait for it."""
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):  # PermissionError on macOS
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        with suppress(subprocess.TimeoutExpired):  # a hanging disk may block it
            process.wait(timeout=_PATIENCE)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def call_concurrently(
    calls: Iterable[Callable[[], T]],
    workers: int | None = None,
    step: Callable[[int], object] = lambda ended: None,
) -> list[Future[T]]:
    """Make calls in threads, by default all at once; return their futures when they have ended.

    Call `step` at least twice a second with the number of calls ended since the last time. Signals
    do not interrupt these threads. If the caller is interrupted or exits, all compilers are ended.
    """
    stop = getattr(_of_thread, "stop", None) or Event()
    pending = deque((Future[T](), call) for call in calls)
    futures = [future for future, _ in pending]
    count = min(workers or len(futures), len(futures))
    # Daemons, because at exit Python waits for all other threads, even if a compiler hangs.
    threads = [Thread(target=_make, args=(pending, stop), daemon=True) for _ in range(count)]
    end = partial(_end_calls, pending, futures, stop, os.getpid())
    atexit.register(end)  # now, so that it runs before the cache folder is removed
    try:
        started = [thread for thread in threads if _start(thread)]
        if not started:
            _make(pending, stop)
        left = set(futures)
        while left:  # a signal just before a wait without a limit would not interrupt it
            ended, left = wait(left, 0.5, FIRST_COMPLETED)
            step(len(ended))
    except BaseException:  # the caller is interrupted
        end()
        raise
    finally:
        atexit.unregister(end)
    for thread in started:
        thread.join(_PATIENCE)  # so that the process may fork
    return futures


def _make(pending: deque[tuple[Future[Any], Callable[[], Any]]], stop: Event) -> None:
    """Make pending calls, one after the other; `stop` ends the compilers that they run."""
    before, _of_thread.stop = getattr(_of_thread, "stop", None), stop
    try:
        while pending:
            with suppress(IndexError):  # another thread took the last call
                future, call = pending.popleft()
                _settle(future, call)
    finally:
        _of_thread.stop = before


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    future.set_running_or_notify_cancel()
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        future.set_result(result)


def _start(thread: Thread) -> bool:
    """Start a thread; return False if memory for its stack is missing or Python exits."""
    try:
        mmap(-1, _ROOM).close()
        thread.start()
    except (MemoryError, OSError, RuntimeError):
        return False
    return True


def _end_calls(
    pending: deque[Any], futures: Iterable[Future[Any]], stop: Event, owner: int
) -> None:
    """Drop pending calls, end running calls and compilers; wait until their files are removed."""
    if owner == os.getpid():  # a forked child has no threads of its parent
        stop.set()  # first: a second interrupt may end this function
        pending.clear()
        wait([future for future in futures if future.running()], _PATIENCE)
