# SPDX-License-Identifier: MIT
"""A process may be killed, or find the disk full, at any moment of a first call.

The next call is right, and only complete files and temporary folders are left. Except in the
exhaustive test, the compiler is a fake: a script that copies a library which was compiled before.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.support.caches import compiles, copies, posix, script
from tests.support.internals import _files
from tests.support.processes import ROOT, in_process

pytestmark = [posix, compiles]

MOMENTS = """
import signal
from tests.support import caches, moments

def full():
    raise OSError(28, "No space left on device")

def call():
    try:
        caches.check()
    except (OSError, RuntimeError) as error:
        named = "CXX" if "cannot start" in str(error) else "CUNORM_CACHE_DIR"
        assert "cunorm" in str(error) and named in str(error), error
        assert "No space left on device" in str(error)
        caches.check()
        os._exit(3)

def moments_of(*arguments):
    found = moments.at_each(*arguments)
    operations = [moment.operation for moment in found]
    for operation in "os.mkdir", "subprocess.Popen", "os.rename", "ctypes.dlopen":
        assert operations.count(operation) == 1, operations
    return found
"""
KILLED = """
found = moments_of(lambda: os.kill(os.getpid(), signal.SIGKILL), caches.check)
assert {moment.status for moment in found} == {-signal.SIGKILL}
assert [moment for moment in found if moment.left]
"""
FULL = """
found = moments_of(full, call)
status = {moment.operation: moment.status for moment in found}
assert {status[name] for name in ("os.mkdir", "subprocess.Popen", "os.rename")} == {3}
assert {moment.status for moment in found} == {0, 3}
removal = [moment.operation for moment in found].index("shutil.rmtree")
assert not [moment for moment in found[:removal] if moment.left]
"""


@pytest.mark.parametrize("script_of", [KILLED, FULL], ids=["killed", "disk full"])
def test_a_fault_at_any_moment_raises_or_has_no_effect_and_the_next_call_is_right(
    tmp_path, script_of
):
    unsealed = copies().replace("exec cp", "head -c -32").replace(' "$last"', ' > "$last"')
    in_process(
        MOMENTS + script_of,
        CXX=script(tmp_path, unsealed),
        CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"),
    )


@pytest.mark.exhaustive
def test_a_process_killed_at_50_random_moments_of_a_real_compile_leaves_the_next_right(tmp_path):
    cache = tmp_path / "cache"
    environment = {**os.environ, "CUNORM_CACHE_DIR": os.fspath(cache)}
    command = [sys.executable, "-c", "from tests.support.caches import check; check()"]

    def start():
        return subprocess.Popen(command, cwd=ROOT, env=environment)

    begun = time.monotonic()
    assert start().wait() == 0
    whole = time.monotonic() - begun
    choose, were_compiling = random.Random(0), 0
    for _ in range(50):
        for library in cache.glob("*.so"):
            library.unlink()
        process = start()
        time.sleep(choose.uniform(0, 1.1 * whole))
        process.send_signal(signal.SIGKILL)
        process.wait()
        temporary = [*cache.glob(f"{_files.TEMPORARY}*")]
        assert all(map(_files.checksum_matches, {*cache.iterdir()} - {*temporary}))
        were_compiling += len(temporary)
        assert start().wait() == 0
        for folder in temporary:
            shutil.rmtree(folder, ignore_errors=True)  # a compiler may still write there
    print(f"{were_compiling} of 50 in a compile")
    assert were_compiling > 5
