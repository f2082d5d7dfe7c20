# SPDX-License-Identifier: MIT
"""Runs compilers: each ends with its children after a time limit, or if its caller is interrupted.

Each leads its own process group, so a Ctrl-C in the terminal does not reach it.
"""

import atexit
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread, current_thread, local
from typing import Any, Generic, TypeVar

T = TypeVar("T")

TIME_LIMIT = 10 * 60.0  # seconds; a compile takes a few, and far less than this on a busy machine
_INTERRUPTED = "cunorm: a compile was interrupted"
_PATIENCE = 5.0  # seconds, for what was killed to end
_SLICE = 0.5  # seconds; a signal just before an endless wait would not interrupt it

# Bytes that must be free to start a thread: CPython waits forever for a thread without memory.
_ROOM = 4 << 20

_of_thread = local()  # its `stop`, for the compilers that it runs


class Stopped(RuntimeError):
    """A compiler that does not start, takes too long, or was ended with its caller."""


class Stop:
    """Ends the compilers of one caller: those that run now, and those that would start later."""

    def __init__(self) -> None:
        self._lock, self.is_set = Lock(), False
        self._running: set[subprocess.Popen[str]] = set()

    def set(self) -> None:
        with self._lock:
            self.is_set = True
            for process in self._running:
                _kill(process)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        with self._lock:
            if self.is_set:
                raise Stopped(_INTERRUPTED)
            process = subprocess.Popen(command, text=True, start_new_session=True, **options)
            self._running.add(process)
            return process

    def end(self, process: subprocess.Popen[str]) -> None:
        """Kill a process if it still runs, and wait for it."""
        if process.poll() is None:
            _kill(process)
            with suppress(subprocess.TimeoutExpired):  # a hanging disk may block it
                process.wait(timeout=_PATIENCE)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        with self._lock:
            self._running.discard(process)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):  # macOS raises this for an ended group
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()


def use_stop(stop: Stop) -> None:
    """Let `stop` end all compilers that this thread runs from now on."""
    _of_thread.stop = stop


def run(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    limit: float | None = None,
    priority: int = 0,
) -> subprocess.CompletedProcess[str]:
    """Run a compiler for at most `limit` seconds."""
    limit = TIME_LIMIT if limit is None else limit
    stop = getattr(_of_thread, "stop", None) or Stop()
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = stop.start(command, env=env, errors="replace", **pipes)
    except OSError as error:
        raise Stopped(
            f"cunorm cannot start the C++ compiler: {error}; if it is gone, install it again, or "
            f"let CXX name another\n  {shlex.join(command)}"
        ) from error
    try:
        with suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PGRP, process.pid, priority) if priority else None
        output, errors = process.communicate(timeout=limit)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)
    except subprocess.TimeoutExpired:
        raise Stopped(
            f"cunorm ended the C++ compiler, as it was not done after {limit:g} seconds: find out "
            f"what it waits for, or let CXX name another\n  {shlex.join(command)}"
        ) from None
    finally:
        stop.end(process)


# --- threads --------------------------------------------------------------------------------------


class Task(Generic[T]):
    """A call in its own thread; the compilers that it runs can be ended."""

    def __init__(self, call: Callable[[], T], stop: Stop | None = None) -> None:
        self.results: list[T] = []
        self.error: BaseException | None = None
        self._call, self._ender, self._owner = call, stop or Stop(), os.getpid()
        self._thread = Thread(target=self.run, daemon=True)
        self._has_begun = False
        self._is_done = Event()  # after an interrupted join CPython may consider a thread done

    def begin(self) -> bool:
        """Start the thread; return False if that is impossible: at exit, or without memory."""
        atexit.register(self.end)  # now, so that it runs before the cache folder is removed
        try:
            bytearray(_ROOM)
            self._thread.start()
        except (MemoryError, RuntimeError):
            return self._thread.ident is not None  # it may have started nevertheless
        return True

    def run(self) -> None:
        before = getattr(_of_thread, "stop", None)
        use_stop(self._ender)
        self._has_begun = True
        try:
            if self._ender.is_set:
                raise Stopped(_INTERRUPTED)
            self.results.append(self._call())
        except BaseException as error:
            self.error = error
            if current_thread() is not self._thread and not isinstance(error, Exception):
                raise  # the caller is interrupted
        finally:
            _of_thread.stop = before
            self._is_done.set()
            atexit.unregister(self.end)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the call has ended; return whether it has."""
        if self._is_done.wait(seconds) and self._thread.is_alive():
            self._thread.join(seconds)  # so that the process may fork
        return self._is_done.is_set()

    def end(self, patience: float = _PATIENCE) -> None:
        """End its compilers, and wait up to `patience` seconds until it has removed its files."""
        if self._owner == os.getpid():  # a forked child has no threads of its parent
            self._ender.set()
            if self._has_begun:  # else it will not start any more
                self.wait(patience)


def call_concurrently(
    calls: Sequence[Callable[[], T]], patience: float, announce: Callable[[], object]
) -> list[T]:
    """Return the results of calls that run in parallel; raise the first call's error.

    Each runs in a thread, which no signal interrupts, so an interrupt knows every compiler.
    If they take longer than `patience` seconds, call `announce`.
    """
    stop, end = getattr(_of_thread, "stop", None) or Stop(), time.monotonic() + patience
    tasks = [Task(call, stop) for call in calls]
    try:
        for task in tasks:
            if not task.begin():
                task.run()
        if not all(task.wait(max(0.0, end - time.monotonic())) for task in tasks):
            announce()
        for task in tasks:
            while not task.wait(_SLICE):
                pass
    except BaseException:  # the caller is interrupted
        stop.set()
        end = time.monotonic() + _PATIENCE
        for task in tasks:
            task.end(max(0.0, end - time.monotonic()))
        raise
    for task in tasks:
        if task.error is not None:
            raise task.error
    return [result for task in tasks for result in task.results]
