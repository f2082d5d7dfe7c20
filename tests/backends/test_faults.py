# SPDX-License-Identifier: MIT
"""Faults of the cache folder and of the compiler: right numbers, or one error that says what to do.

After each, the next call is right. Most compilers here only copy a library.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
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
    libraries,
    posix,
    script,
    separate_cache,
)
from tests.support.calls import raises
from tests.support.internals import _compiler, _processes, compiler
from tests.support.processes import in_process

pytestmark = [posix, compiles]

# --- the folder -----------------------------------------------------------------------------------

PROCESS_ONLY = "for this process only"


def is_immutable(folder):
    """Make a folder read-only, for root too; return whether it is."""
    folder.chmod(0o500)
    if os.access(folder, os.W_OK) and shutil.which("chattr"):
        subprocess.run(["chattr", "+i", folder], check=False, capture_output=True)
    return not os.access(folder, os.W_OK)


def spoil(cache, what):
    """Make a cache folder that is not to be used."""
    if what == "file":
        cache.touch()
    elif what == "link to nothing":
        cache.symlink_to(cache.parent / "no" / "such")
    else:
        cache.mkdir()
    if what == "of another" and os.getuid() == 0:
        os.chown(cache, 12345, -1)
    elif what == "of another":
        pytest.skip("only root can give a folder to another user")
    elif what == "read-only" and not is_immutable(cache):
        pytest.skip("root may write to any folder here")
    elif isinstance(what, int):
        cache.chmod(what)


@pytest.mark.parametrize(
    "what", [0o770, 0o707, "file", "link to nothing", "of another", "read-only"]
)
def test_a_cache_that_is_not_the_users_alone_or_not_writable_is_not_used(tmp_path, what):
    cache = tmp_path / "cache"
    try:
        spoil(cache, what)
        with separate_cache(tmp_path), pytest.warns(RuntimeWarning, match=PROCESS_ONLY):
            assert cunorm.cache_info().folder not in (cache, *cache.parents)
            check()
            assert cunorm.cache_info().libraries == 1
            assert not cache.is_dir() or not list(cache.iterdir())
    finally:
        if what == "read-only" and shutil.which("chattr"):
            subprocess.run(["chattr", "-i", cache], check=False, capture_output=True)


def test_without_any_folder_to_write_to_an_error_says_which_variable_names_one(
    tmp_path, monkeypatch
):
    (tmp_path / "cache").touch()
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [])
    monkeypatch.setattr(tempfile, "tempdir", None)
    with (
        separate_cache(tmp_path),
        pytest.warns(RuntimeWarning, match=PROCESS_ONLY),
        pytest.raises(OSError, match=r"cunorm .*; let CUNORM_CACHE_DIR name"),
    ):
        check()


@pytest.mark.parametrize("in_passwd", [True, False])
def test_without_home_the_folder_is_in_that_of_the_password_file(tmp_path, monkeypatch, in_passwd):
    def entry(uid):
        if not in_passwd:
            raise KeyError(uid)
        return pwd.struct_passwd(("me", "x", uid, uid, "", os.fspath(tmp_path), "/bin/sh"))

    monkeypatch.setattr(pwd, "getpwuid", entry)
    with fresh_process(CXX=script(tmp_path, copies())) as patch:
        for name in ("HOME", "XDG_CACHE_HOME", "CUNORM_CACHE_DIR"):
            patch.delenv(name, raising=False)
        if in_passwd:
            assert cunorm.cache_info().folder == tmp_path / ".cache" / "cunorm"
        else:
            with pytest.warns(RuntimeWarning, match=PROCESS_ONLY):
                cunorm.cache_info()
        check()


def test_a_folder_that_is_removed_or_opened_to_others_meanwhile_is_not_relied_on(tmp_path):
    with separate_cache(tmp_path) as cache:
        check()
        shutil.rmtree(cache)
        cunorm.clear_cache()
        check()
        assert len(libraries(cache)) == 1
        cache.chmod(0o777)
        cunorm_before = libraries(cache)
        with pytest.warns(RuntimeWarning, match=PROCESS_ONLY):
            cunorm.clear_cache()
        check()
        assert libraries(cache) == cunorm_before


def test_a_folder_on_another_disk_than_temporary_files_is_used(tmp_path):
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm, on another disk")
    with tempfile.TemporaryDirectory(dir=elsewhere) as other, separate_cache(tmp_path) as cache:
        os.environ["CUNORM_CACHE_DIR"] = other
        check()
        assert len(libraries(Path(other))) == 1
        assert not cache.exists()


# The library is copied with its digest, and gets another.
CUT = """
import resource, signal
from tests.support import caches, described
size = int(os.environ["SIZE"])
for limit in 1000, size // 2, size + 16:  # the source, the library, its digest
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        caches.check()
    except (OSError, RuntimeError) as error:
        print(str(error).replace("\\n", " "))
    else:
        raise AssertionError(limit)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    folder = cunorm.cache_info().folder
    assert not list(folder.iterdir()), "what is cut is left"
    caches.check()
    cunorm.clear_cache()
"""


def test_a_file_that_finds_no_room_is_an_error_and_leaves_nothing(tmp_path):
    text = copies()
    (library,) = [word for word in text.split('"') if word.endswith(".so")]
    printed = in_process(
        CUT,
        CXX=script(tmp_path, text),
        CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"),
        SIZE=str(Path(library).stat().st_size),
    )
    assert len(printed.splitlines()) == 3
    for line in printed.splitlines():
        assert "cunorm" in line
        assert "CUNORM_CACHE_DIR" in line
        assert "File too large" in line or "signal" in line


# --- the compiler ---------------------------------------------------------------------------------

CHILD = 'sleep 60 & echo $! > "{folder}/child"; wait'
FLAGGED = 'if [ -e "{folder}/flag" ]; then {what}; fi\n'


def flagged(folder, what):
    """Return the script of a compiler that does something while a file is there."""
    (folder / "flag").touch()
    does = FLAGGED.format(folder=folder, what=what.format(folder=folder))
    return f"{ANSWERS}{does}{copies()}"


def assert_no_child(folder):
    """The process whose number a compiler wrote ends; init may not have collected it yet."""
    child = int((folder / "child").read_text())
    end = time.monotonic() + 5
    while time.monotonic() < end and is_running(child):
        time.sleep(0.01)
    assert not is_running(child)


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_compiler_that_hangs_is_ended_with_its_children_and_an_error(tmp_path, monkeypatch):
    with separate_cache(tmp_path, flagged(tmp_path, CHILD)) as cache:
        monkeypatch.setattr(_processes, "TIME_LIMIT", 0.3)
        with pytest.raises(RuntimeError) as caught:
            check()
        assert str(caught.value).startswith(
            "cunorm ended the C++ compiler, as it was not done after 0.3 seconds: "
        )
        assert os.fspath(tmp_path / "compiler") in str(caught.value)
        assert not list(cache.iterdir())
        assert_no_child(tmp_path)
        monkeypatch.setattr(_processes, "TIME_LIMIT", 60)
        (tmp_path / "flag").unlink()
        check()


EXPECTED = "expected a command of a shell: No closing quotation"
HANGS = 'case "$*" in *--version*) {0};; esac\n'


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (HANGS.format(CHILD), "not done after 0.3 seconds"),
        (None, r"cannot start the C\+\+ compiler: .*Exec format error"),
    ],
    ids=["hangs", "no program"],
)
def test_a_compiler_that_does_not_say_its_version_gives_way_to_the_next(
    tmp_path, monkeypatch, text, warning
):
    chosen = script(tmp_path, (text or "").format(folder=tmp_path))
    if text is None:
        Path(chosen).write_bytes(b"\x7fELF")
    monkeypatch.setattr(_compiler, "_ANSWER_LIMIT", 0.3)
    with fresh_process(CXX=chosen), pytest.warns(RuntimeWarning, match=warning):
        assert compiler().command[0] != chosen
    if text:
        assert_no_child(tmp_path)


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


def test_where_path_becomes_empty_there_is_an_error_and_then_the_reference(tmp_path):
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
import signal
from tests.support import caches
os.chdir(os.environ["FOLDER"])
os.setsid()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
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
    left = list(cunorm.cache_info().folder.iterdir())
    assert not left, (call, left, threading.enumerate())
    assert threading.active_count() == 1
os.unlink("flag")
caches.check()
"""


@pytest.mark.parametrize("whom", ["$PPID", "-$PPID"], ids=["the process", "its group"])
def test_an_interrupt_ends_all_compilers_of_a_call_and_the_next_is_right(tmp_path, whom):
    children = tmp_path / "children"
    once = f'rm "{tmp_path}/once" && kill -s INT -- {whom}'
    hangs = f'sleep 60 & echo $! >> "{children}"; {once}; wait'
    in_process(
        INTERRUPTED,
        CXX=script(tmp_path, flagged(tmp_path, hangs)),
        CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"),
        FOLDER=os.fspath(tmp_path),
    )
    started = [int(line) for line in children.read_text().split()]
    assert len(started) >= 3
    assert not [*filter(is_running, started)]
