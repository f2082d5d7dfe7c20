# SPDX-License-Identifier: MIT
"""With a fault of the compiler, a call is right or raises an error that says what to do.

After each fault or interrupt, the next call is right. Most compilers here only copy a library.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

import cunorm
from tests.support.caches import (
    ANSWERS,
    check,
    compiles,
    copies,
    fresh_process,
    gcc,
    posix,
    script,
    separate_cache,
)
from tests.support.calls import raises
from tests.support.internals import _compiler, _processes, compiler
from tests.support.processes import in_process, is_running

pytestmark = [posix, compiles]

# --- the compiler ---------------------------------------------------------------------------------

CHILD = 'sleep 60 & echo $! > "{folder}/child"; wait'
FLAGGED = 'if [ -e "{folder}/flag" ]; then {what}; fi\n'


def flagged(folder, what):
    """Return the script of a compiler that runs a command while the file `flag` exists."""
    (folder / "flag").touch()
    does = FLAGGED.format(folder=folder, what=what.format(folder=folder))
    return f"{ANSWERS}{does}{copies()}"


def assert_no_child(folder):
    """Check that the process whose number a compiler wrote ends within 5 seconds."""
    child = int((folder / "child").read_text())
    end = time.monotonic() + 5
    while time.monotonic() < end and is_running(child):
        time.sleep(0.01)
    assert not is_running(child)


def test_a_compiler_that_hangs_is_ended_with_its_children_and_an_error(tmp_path, monkeypatch):
    with separate_cache(tmp_path, flagged(tmp_path, CHILD)) as cache:
        monkeypatch.setattr(_processes, "TIME_LIMIT", 3.0)
        with pytest.raises(RuntimeError) as caught:
            check()
        assert str(caught.value).startswith(
            "cunorm ended the C++ compiler, as it was not done after 3 seconds: "
        )
        assert os.fspath(tmp_path / "compiler") in str(caught.value)
        assert not list(cache.iterdir())
        assert_no_child(tmp_path)
        monkeypatch.setattr(_processes, "TIME_LIMIT", 60)
        (tmp_path / "flag").unlink()
        check()


HANGS = 'case "$*" in *--version*) {0};; esac\n'
WARNINGS = {
    "hangs": "not done after 3 seconds",
    "is no program": r"cannot start the C\+\+ compiler: .*Exec format error",
}


@pytest.mark.parametrize("what", WARNINGS)
def test_a_compiler_that_does_not_say_its_version_is_skipped(tmp_path, monkeypatch, what):
    chosen = script(tmp_path, HANGS.format(CHILD).format(folder=tmp_path))
    if what == "is no program":
        Path(chosen).write_bytes(b"\x7fELF")
    monkeypatch.setattr(_compiler, "_ANSWER_LIMIT", 3.0)
    with fresh_process(CXX=chosen), pytest.warns(RuntimeWarning, match=WARNINGS[what]):
        assert compiler().command[0] != chosen
    if what == "hangs":
        assert_no_child(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE])
def test_a_compiler_that_lacks_memory_or_files_does_not_count_as_missing(monkeypatch, number):
    def fork(*arguments, **options):
        raise OSError(number, os.strerror(number))

    with fresh_process(), monkeypatch.context() as patch:
        patch.setattr(_processes.subprocess, "Popen", fork)
        with pytest.raises(RuntimeError, match=rf"cannot start .*{os.strerror(number)}"):
            compiler()
        patch.undo()
        assert compiler() is not None


EXPECTED = "expected a command of a shell: No closing quotation"


def test_a_wrong_cxx_is_an_error_that_names_it():
    with fresh_process(CXX="'g++"), raises(ValueError, """CXX is "'g++", """, EXPECTED):
        check()


def test_a_compiler_that_is_removed_is_an_error_and_the_next_call_looks_for_another(tmp_path):
    with separate_cache(tmp_path):
        check()
        command = tmp_path / "compiler"
        command.rename(tmp_path / "kept")
        cunorm.clear_cache()
        with pytest.raises(RuntimeError) as caught:
            check()
        assert str(caught.value).startswith("cunorm cannot start the C++ compiler: [Errno 2] ")
        assert "let CXX name another" in str(caught.value)
        (tmp_path / "kept").rename(command)
        check()


def test_an_emptied_path_is_an_error_and_then_the_reference_computes(tmp_path):
    script(tmp_path, f"PATH={os.environ['PATH']}\n{copies()}")
    (tmp_path / "compiler").rename(tmp_path / "c++")
    with fresh_process(CXX="", PATH=tmp_path, CUNORM_CACHE_DIR=tmp_path / "cache") as patch:
        check()
        patch.setenv("PATH", os.devnull)
        cunorm.clear_cache()
        with pytest.raises(RuntimeError, match=r"cannot start the C\+\+ compiler"):
            check()
        with pytest.warns(RuntimeWarning, match=r"no C\+\+ compiler"):
            check()


KILLS = (
    '$real "$@" & until child=$(cat /proc/$!/task/$!/children) && [ -n "$child" ]; do :; done; '
    "kill -9 $child; wait $!; exit $?"
)


@gcc
@pytest.mark.skipif(
    not Path("/proc/thread-self/children").exists(), reason="needs Linux's list of children"
)
def test_a_compiler_whose_own_child_is_killed_is_an_error_and_tried_again(tmp_path):
    with separate_cache(tmp_path, flagged(tmp_path, KILLS)) as cache:
        with pytest.raises(RuntimeError, match=r"(?s)[Kk]illed.*cunorm's compiler was stopped"):
            check()
        assert not list(cache.iterdir()), "no option counts as refused"
        (tmp_path / "flag").unlink()
        check()


# --- interrupts -----------------------------------------------------------------------------------

INTERRUPTED = """
import signal, time
from tests.support import caches
os.chdir(os.environ["FOLDER"])
os.setsid()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have ignored SIGINT
def warm_up():
    cunorm.warmup("l2_norm", 4, ["float32", "float64"], device="cpu", rows=1, progress=False)
for call in caches.check, warm_up, lambda: cunorm.rms_norm_backward(x, x, x[0], rstd=x[:, 0]):
    x = np.ones((3, 8), np.float32)
    for name in "flag", "once":
        open(name, "w").close()
    try:
        call()
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError
    end = time.monotonic() + 20  # a thread may still remove the files of its ended compiler
    while left := [*cunorm.cache_info().folder.iterdir(), *threading.enumerate()[1:]]:
        assert time.monotonic() < end, (call, left)
        time.sleep(0.01)
os.unlink("flag")
caches.check()
"""


@pytest.mark.parametrize("whom", ["$PPID", "-$PPID"], ids=["the process", "its group"])
def test_an_interrupt_ends_all_compilers_of_a_call_and_the_next_is_right(tmp_path, whom):
    children, elsewhere = tmp_path / "children", tmp_path / "temporary"
    elsewhere.mkdir()
    once = f'rm "{tmp_path}/once" && kill -s INT -- {whom}'
    hangs = f'echo half > "$TMPDIR/half"; sleep 60 & echo $! >> "{children}"; {once}; wait'
    in_process(
        INTERRUPTED,
        CXX=script(tmp_path, flagged(tmp_path, hangs)),
        CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"),
        FOLDER=os.fspath(tmp_path),
        TMPDIR=os.fspath(elsewhere),
    )
    assert not list(elsewhere.iterdir())
    started = [int(line) for line in children.read_text().split()]
    assert len(started) >= 3
    assert not [*filter(is_running, started)]


FIRST_CALL = """
import threading, time
def call(seconds=0):
    time.sleep(seconds)
    assert np.isfinite(cunorm.l2_norm(np.float32([[3, -4]]))).all()
"""


def test_the_end_of_a_process_ends_its_compilers_and_does_not_wait_for_them(tmp_path):
    begun, start = os.fspath(tmp_path / "child"), time.monotonic()
    in_process(
        f"{FIRST_CALL}threading.Thread(target=call, daemon=True).start()\n"
        f"while not os.path.exists({begun!r}): time.sleep(0.05)",
        CXX=script(tmp_path, flagged(tmp_path, CHILD)),
        CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"),
    )
    assert time.monotonic() - start < 55
    assert_no_child(tmp_path)


def test_a_thread_that_outlives_the_main_one_can_make_the_first_call(tmp_path):
    in_process(
        f"{FIRST_CALL}threading.Thread(target=call, args=(0.5,)).start()",
        CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"),
    )
