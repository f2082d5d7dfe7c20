# SPDX-License-Identifier: MIT
"""Compilers that run: each ends in time, with all its children, or when its caller is interrupted.

Each is the leader of a process group, which a Ctrl-C of the terminal does not reach.
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
_SLICE = 0.5  # seconds; a signal just before a wait without an end would not interrupt it

# Bytes that are free when a thread is started: CPython waits forever for one that finds none.
_ROOM = 4 << 20

_of_thread = local()  # its `stop`, for the compilers that it runs


class Stopped(RuntimeError):
    """A compiler does not start, takes too long, or was ended with its caller."""


class Stop:
    """Ends the compilers of one caller: those that run, and those that would be started later."""

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
        """Kill a process if it runs yet, and wait for it."""
        if process.poll() is None:
            _kill(process)
            with suppress(subprocess.TimeoutExpired):  # a disk that hangs may keep it
                process.wait(timeout=_PATIENCE)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        with self._lock:
            self._running.discard(process)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):  # macOS's for a group that has ended
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()


def ended_by(stop: Stop) -> None:
    """Let `stop` end the compilers that this thread runs from now on."""
    _of_thread.stop = stop


def run(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    limit: float | None = None,
    priority: int = 0,
) -> subprocess.CompletedProcess[str]:
    """Run a compiler, for as many seconds as a limit allows."""
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
    """A call made in a thread of its own; what it compiles can be ended."""

    def __init__(self, call: Callable[[], T], stop: Stop | None = None) -> None:
        self.results: list[T] = []
        self.error: BaseException | None = None
        self._call, self._ender, self._owner = call, stop or Stop(), os.getpid()
        self._thread = Thread(target=self.run, daemon=True)
        self._has_begun = False
        self._is_done = Event()  # CPython may take a thread for done if a join is interrupted

    def begin(self) -> bool:
        """Start the thread; return False where none can be: at the end, or for want of memory."""
        atexit.register(self.end)  # now, so that it runs before a removal of the cache folder
        try:
            bytearray(_ROOM)
            self._thread.start()
        except (MemoryError, RuntimeError):
            return self._thread.ident is not None  # it has begun all the same
        return True

    def run(self) -> None:
        before = getattr(_of_thread, "stop", None)
        ended_by(self._ender)
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
            self._thread.join(seconds)  # so that nothing is left of it for a process that forks
        return self._is_done.is_set()

    def end(self, patience: float = _PATIENCE) -> None:
        """End what it compiles, and remove its files, if that takes no more seconds than these."""
        if self._owner == os.getpid():  # a forked child has no threads of its parent
            self._ender.set()
            if self._has_begun:  # else it does not begin any more
                self.wait(patience)


def at_once(
    calls: Sequence[Callable[[], T]], patience: float, remark: Callable[[], object]
) -> list[T]:
    """Return the results of calls that are made at the same time; raise the first's error.

    They are made in threads, as no signal interrupts these: an interrupt finds each compiler known.
    After so many seconds of patience, `remark` is called.
    """
    stop, end = getattr(_of_thread, "stop", None) or Stop(), time.monotonic() + patience
    tasks = [Task(call, stop) for call in calls]
    try:
        for task in tasks:
            if not task.begin():
                task.run()
        if not all(task.wait(max(0.0, end - time.monotonic())) for task in tasks):
            remark()
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
