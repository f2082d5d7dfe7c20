# SPDX-License-Identifier: MIT
"""Faults at every moment of a first call: before each of its file operations and processes."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.support.caches import check
from tests.support.internals import _compiler, _files, cache_folder

OPERATIONS = {"open", "os.mkdir", "os.remove", "os.rename", "os.scandir", "shutil.rmtree"}
OPERATIONS |= {"ctypes.dlopen", "subprocess.Popen"}


class Moment(NamedTuple):
    operation: str
    status: int  # the exit status of the process
    left: list[str]  # the temporary folders that remain


def at_each(fault: Callable[[], None], call: Callable[[], object]) -> list[Moment]:
    """Make a first call in a forked child for each moment, with a fault at that moment.

    After each fault, check that all files outside of temporary folders are complete, and that a
    call in another process is right.
    """
    assert _compiler.has_compiler()
    folder, found = cache_folder(), []
    log = Path(f"{folder}.log")

    def hook(event: str, arguments: tuple) -> None:
        if event in OPERATIONS and f"{folder}/" in f"{arguments}":
            before = log.read_text().split()
            log.write_text(" ".join([*before, event]))
            if len(before) == len(found):
                fault()

    while True:
        log.write_text("")
        status = _status(call, hook)
        operations = log.read_text().split()
        if len(operations) == len(found):
            return found
        left = [path for path in folder.iterdir() if not path.name.startswith(_files.TEMPORARY)]
        assert all(map(_files.checksum_matches, left)), left
        temporary = [path.name for path in folder.glob(f"{_files.TEMPORARY}*")]
        found.append(Moment(operations[len(found)], status, temporary))
        assert _status(check) == 0, found[-1]
        for path in folder.iterdir():
            path.unlink() if path.suffix == ".so" else shutil.rmtree(path)


def _status(call: Callable[[], object], hook: Callable[..., None] | None = None) -> int:
    """Return the exit status of a child that makes a call, with an audit hook of its own."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        if hook:
            sys.addaudithook(hook)
        call()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
