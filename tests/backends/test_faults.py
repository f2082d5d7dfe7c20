# SPDX-License-Identifier: MIT
"""What can go wrong in a first call: with the compiler, the cache folder, the disk, the process.

A call is right or raises an error that says what to do, and leaves nothing half made; the call
after the fault is right. `COMPILERS`, `UNUSED_COMPILERS` and `FOLDERS` are the tables of faults.
`test_no_memory.py` has faults of the memory. Most compilers here only copy a library.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import tempfile
import time
import warnings
from pathlib import Path

import pytest

import cunorm
from tests.support.caches import (
    ANSWERS,
    check,
    compiles,
    copies,
    fresh_process,
    libraries,
    posix,
    script,
    separate_cache,
)
from tests.support.internals import _compiler, _info, _processes, compiler
from tests.support.processes import in_process, is_running

pytestmark = [posix, compiles]

# --- the compiler ---------------------------------------------------------------------------------

CHILD = 'sleep 60 & echo $! > "$folder/child"; wait'
KILLS_CHILD = (
    '$real "$@" & until child=$(cat /proc/$!/task/$!/children) && [ -n "$child" ]; do :; done; '
    "kill -9 $child; wait $!; exit $?"
)
MANY_ERRORS = 'for n in $(seq 29); do echo "norm.cpp:$n: error: number $n" >&2; done; exit 1'
ADVICE = (
    "(?s){}.*cunorm's compiler was stopped, as for want of memory or disk space: free some, or let "
    "CUNORM_CACHE_DIR name a folder"
)
# Of each fault: the options of the compiles that have it, what a shell script does, and the error.
COMPILERS = {
    "hangs": ("", CHILD, r"^cunorm ended .*, as it was not done after 3 seconds: .*\n.*/compiler "),
    "is killed": (
        "-fopenmp",
        'echo half > "$last"; rm "$folder/fault"; kill -9 $$',
        ADVICE.format("killed by signal 9"),
    ),
    "finds the disk full": (
        "-fopenmp",
        'echo half > "$last"; echo "no space left on device" >&2; exit 1',
        ADVICE.format("no space left"),
    ),
    "has a child that is killed": ("", KILLS_CHILD, ADVICE.format("[Kk]illed")),
    "refuses the source": (
        "",
        MANY_ERRORS,
        "(?s)^the C.. compiler does not compile row_norm_forward:\n"
        + "".join(f"  norm.cpp:{n}: error: number {n}\n" for n in (1, 2, 3))
        + "(?!.*number 20).*\n  its command: [^\n]*/compiler [^\n]*-ffp-contract=off [^\n]*"
        "\n  the build: row_norm_forward COMPUTE_T=fp32 X_T=fp32 [^\n]*$",
    ),
}


def faulty(folder, what, options=""):
    """Return a compiler's script; it has a fault with some options while the file `fault` exists.

    Compiles with OpenMP make a file `openmp`.
    """
    (folder / "fault").touch()
    has_fault = f'[ -e "$folder/fault" ] && case "$*" in *{options}*) {what};; esac'
    notes = 'case "$*" in *-fopenmp*row_norm_forward.cpp*) touch "$folder/openmp";; esac'
    return f'{ANSWERS}folder="{folder}"\n{has_fault}\n{notes}\n{copies()}'


def assert_no_child(folder):
    """Check that the process whose number a compiler wrote ends within 5 seconds."""
    child, end = int((folder / "child").read_text()), time.monotonic() + 5
    while time.monotonic() < end and is_running(child):
        time.sleep(0.01)
    assert not is_running(child)


@pytest.mark.parametrize("fault", COMPILERS)
def test_a_compiler_that_fails_is_an_error_leaves_nothing_half_made_and_is_tried_again(
    fault, tmp_path, monkeypatch
):
    options, what, error = COMPILERS[fault]
    if "child" in fault and not (compiler().is_gcc and Path("/proc/thread-self/children").exists()):
        pytest.skip("needs GCC, which has children, and Linux's list of them")
    with separate_cache(tmp_path, faulty(tmp_path, what, options)) as cache:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=error):
            patch.setattr(_processes, "TIME_LIMIT", 3.0 if fault == "hangs" else 60.0)
            check()
        assert not list(cache.iterdir()), "no library, and no list of refused options"
        if fault == "hangs":
            assert_no_child(tmp_path)
        (tmp_path / "fault").unlink(missing_ok=True)
        check()
        assert len(list(cache.iterdir())) == 1
        assert (tmp_path / "openmp").exists()


def test_a_compiler_that_goes_away_is_an_error_and_then_the_reference_computes(
    tmp_path, monkeypatch
):
    with separate_cache(tmp_path):
        check()
        monkeypatch.setenv("PATH", os.devnull)
        (tmp_path / "compiler").unlink()
        cunorm.clear_cache()
        error = r"^cunorm cannot start the C\+\+ compiler: \[Errno 2\] .* let CXX name another"
        with pytest.raises(RuntimeError, match=error):
            check()
        with pytest.warns(RuntimeWarning, match=r"no C\+\+ compiler"):
            check()


UNUSED_COMPILERS = {  # of each fault: $CXX or the compiler's script, and the warning
    "is missing": ("/nowhere/c++ -O1", "^CXX=/nowhere/c.. -O1 does not answer: cunorm compiles "),
    "fails": ("false", "^CXX=false does not answer: cunorm compiles with {other}$"),
    "hangs": (f'#!/bin/sh\nfolder="${{0%/*}}"\n{CHILD}', "not done after 3 seconds"),
    "is no program": ("\x7fELF", r"cannot start the C\+\+ compiler: .*Exec format error"),
}


@pytest.mark.parametrize("fault", UNUSED_COMPILERS)
def test_a_compiler_that_does_not_say_its_version_is_skipped_with_one_warning(
    fault, tmp_path, monkeypatch
):
    cxx, text = UNUSED_COMPILERS[fault]
    if fault in ("hangs", "is no program"):
        Path(script(tmp_path, "")).write_text(cxx)
        cxx = os.fspath(tmp_path / "compiler")
    monkeypatch.setattr(_compiler, "_ANSWER_LIMIT", 3.0)
    with fresh_process(CXX=cxx), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        check()
        check()
        other = compiler().command[0]
    (warning,) = seen
    assert re.search(text.format(other=re.escape(other)), str(warning.message))
    assert warning.category is RuntimeWarning
    assert other != cxx.split()[0]
    if fault == "hangs":
        assert_no_child(tmp_path)


def test_where_warnings_are_errors_only_the_first_call_fails_for_a_compiler_that_is_skipped():
    with fresh_process(CXX="false"):  # filterwarnings makes warnings errors
        with pytest.raises(RuntimeWarning, match="does not answer"):
            check()
        check()


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


# --- the cache folder -----------------------------------------------------------------------------

PROCESS_ONLY = "for this process only"
FOLDERS = ["is writable by its group", "is writable by all", "is another user's", "is read-only"]
FOLDERS += ["is a file", "is a link to nothing", "is in a file", "is in a link to nothing"]
FOLDERS += ["is in /proc"]  # where not even root can make a folder


def spoil(cache, fault):
    """Put what cunorm must not use in the place of a cache folder; return what variables name."""
    if "file" in fault:
        cache.touch()
    elif "link" in fault:
        cache.symlink_to(cache.parent / "no" / "such")
    else:
        cache.mkdir(0o500 if "read-only" in fault else 0o700)
    if "writable" in fault:
        cache.chmod(0o770 if "group" in fault else 0o707)
    if "read-only" in fault and os.access(cache, os.W_OK) and shutil.which("chattr"):  # root
        subprocess.run(["chattr", "+i", cache], check=False, capture_output=True)
    if "read-only" in fault and os.access(cache, os.W_OK):
        pytest.skip("root may write to any folder here")
    above = Path("/proc") if "/proc" in fault else cache
    return above / "no" / "such" if " in " in fault else cache


@pytest.mark.parametrize("fault", FOLDERS)
def test_a_cache_folder_that_is_unusable_or_not_the_users_alone_is_replaced_for_the_process(
    fault, tmp_path, monkeypatch
):
    try:
        folder = spoil(tmp_path / "cache", fault)
        with separate_cache(tmp_path) as cache, pytest.warns(RuntimeWarning, match=PROCESS_ONLY):
            os.environ["CUNORM_CACHE_DIR"] = os.fspath(folder)
            if "another" in fault:
                monkeypatch.setattr(os, "getuid", lambda: cache.stat().st_uid + 1)
            assert "for one process only" in dict(_info._caches())["CPU builds"]
            assert cunorm.cache_info().folder not in (folder, *folder.parents)
            check()
            assert cunorm.cache_info().libraries == 1
            assert not cache.is_dir() or not list(cache.iterdir())
    finally:
        if "read-only" in fault and shutil.which("chattr"):
            subprocess.run(["chattr", "-i", tmp_path / "cache"], check=False, capture_output=True)


def test_if_no_folder_is_writable_an_error_says_which_variable_names_a_folder(
    tmp_path, monkeypatch
):
    (tmp_path / "cache").touch()
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [])
    monkeypatch.setattr(tempfile, "tempdir", None)
    error = pytest.raises(OSError, match=r"cunorm .*; let CUNORM_CACHE_DIR name")
    with separate_cache(tmp_path), pytest.warns(RuntimeWarning, match=PROCESS_ONLY), error:
        check()


@pytest.mark.parametrize("named", ["by passwd", "by CUNORM_CACHE_DIR", "nowhere"])
def test_without_home_passwd_or_cunorm_cache_dir_names_the_folder(tmp_path, monkeypatch, named):
    pwd = pytest.importorskip("pwd", reason="there is no file of passwords")

    def entry(uid):
        if named == "by passwd":
            return pwd.struct_passwd(("me", "x", uid, uid, "", os.fspath(tmp_path), "/bin/sh"))
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", entry)
    with fresh_process(CXX=script(tmp_path, copies())) as patch:
        for name in ("HOME", "XDG_CACHE_HOME", "CUNORM_CACHE_DIR"):
            patch.delenv(name, raising=False)
        if named == "nowhere":
            with pytest.warns(RuntimeWarning, match=PROCESS_ONLY):
                cunorm.cache_info()
        else:
            folder = tmp_path / ".cache" / "cunorm"
            if "CUNORM" in named:
                patch.setenv("CUNORM_CACHE_DIR", os.fspath(folder := tmp_path / "chosen"))
            assert cunorm.cache_info().folder == folder
        check()


def test_a_folder_that_is_removed_or_opened_to_others_meanwhile_is_not_relied_on(tmp_path):
    with separate_cache(tmp_path) as cache:
        check()
        shutil.rmtree(cache)
        cunorm.clear_cache()
        check()
        assert len(before := libraries(cache)) == 1
        cache.chmod(0o777)
        with pytest.warns(RuntimeWarning, match=PROCESS_ONLY):
            cunorm.clear_cache()
        check()
        assert libraries(cache) == before


def test_a_folder_on_another_disk_than_temporary_files_is_used(tmp_path):
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm, on another disk")
    with tempfile.TemporaryDirectory(dir=elsewhere) as other, separate_cache(tmp_path) as cache:
        os.environ["CUNORM_CACHE_DIR"] = other
        check()
        assert len(libraries(Path(other))) == 1
        assert not cache.exists()


# --- the process ----------------------------------------------------------------------------------


def in_fresh_process(folder, code, text=None, **environment):
    """Run code in a separate process, with a cache and a compiler's script of its own."""
    environment |= {"CXX": script(folder, text or copies()), "FOLDER": os.fspath(folder)}
    cache = os.fspath(folder / "cache")
    return in_process(f"{IMPORTS}{code}", CUNORM_CACHE_DIR=cache, **environment)


IMPORTS = """
import pathlib, resource, signal, time
from tests.support import caches, described, moments
os.chdir(os.environ["FOLDER"])
"""


def test_a_damaged_library_is_compiled_again(tmp_path):
    """A loader refuses an empty library, and crashes on a truncated library."""
    in_fresh_process(
        tmp_path,
        "caches.check()\n"
        "(library,) = pathlib.Path('cache').iterdir()\n"
        "whole = library.read_bytes()\n"
        "def changed(first, last, byte): return whole[:first] + byte + whole[last:]\n"
        "hole, cut = changed(4096, 8192, bytes(4096)), changed(4096, len(whole) - 32, b'')\n"
        "for damaged in (b'', whole[:4096], changed(9, 10, b'?'), hole, cut):\n"
        "    library.unlink()  # this process still has the old file mapped\n"
        "    library.write_bytes(damaged)\n"
        "    described.clear_all()\n"
        "    caches.check()\n"
        "    assert library.read_bytes() != damaged",
    )


MOMENTS = """
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


@pytest.mark.parametrize("fault", [KILLED, FULL], ids=["killed", "disk full"])
def test_a_fault_at_any_moment_raises_or_has_no_effect_and_the_next_call_is_right(tmp_path, fault):
    """Only complete files and temporary folders are left."""
    unsealed = copies().replace("exec cp", "head -c -32").replace(' "$last"', ' > "$last"')
    in_fresh_process(tmp_path, MOMENTS + fault, unsealed)


# The library that the fake compiler copies ends with a digest; cunorm appends a second digest.
CUT = """
size = int(os.environ["SIZE"])
for limit in 1000, size // 2, size + 16:  # no room for the source; the library; its digest
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        caches.check()
    except (OSError, RuntimeError) as error:
        text = str(error)
        assert "cunorm" in text and "CUNORM_CACHE_DIR" in text, text
        assert "File too large" in text or "signal" in text, text
    else:
        raise AssertionError(limit)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert not os.listdir("cache"), "a cut file is left"
    caches.check()
    cunorm.clear_cache()
"""


def test_a_file_that_finds_no_room_is_an_error_and_leaves_nothing(tmp_path):
    (library,) = [word for word in copies().split('"') if word.endswith(".so")]
    in_fresh_process(tmp_path, CUT, SIZE=str(Path(library).stat().st_size))


INTERRUPTED = """
os.setsid()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have ignored SIGINT
def warm_up():
    cunorm.warmup("l2_norm", 4, ["float32", "float64"], device="cpu", rows=1, progress=False)
for call in caches.check, warm_up, lambda: cunorm.rms_norm_backward(x, x, x[0], rstd=x[:, 0]):
    x = np.ones((3, 8), np.float32)
    for name in "fault", "once":
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
os.unlink("fault")
caches.check()
"""


@pytest.mark.parametrize("whom", ["$PPID", "-$PPID"], ids=["the process", "its group"])
def test_an_interrupt_ends_all_compilers_of_a_call_and_the_next_is_right(tmp_path, whom):
    children, elsewhere = tmp_path / "children", tmp_path / "temporary"
    elsewhere.mkdir()
    once = f'rm "{tmp_path}/once" && kill -s INT -- {whom}'
    hangs = f'echo half > "$TMPDIR/half"; sleep 60 & echo $! >> "{children}"; {once}; wait'
    in_fresh_process(tmp_path, INTERRUPTED, faulty(tmp_path, hangs), TMPDIR=os.fspath(elsewhere))
    assert not list(elsewhere.iterdir())
    started = [int(line) for line in children.read_text().split()]
    assert len(started) >= 3
    assert not [*filter(is_running, started)]


def test_the_end_of_a_process_ends_its_compilers_and_does_not_wait_for_them(tmp_path):
    start = time.monotonic()
    in_fresh_process(
        tmp_path,
        "threading.Thread(target=caches.check, daemon=True).start()\n"
        "while not os.path.exists('child'): time.sleep(0.05)",
        faulty(tmp_path, CHILD),
    )
    assert time.monotonic() - start < 55
    assert_no_child(tmp_path)


def test_a_thread_that_outlives_the_main_one_can_make_the_first_call(tmp_path):
    code = "def call():\n    time.sleep(0.5)\n    caches.check()\n"
    in_fresh_process(tmp_path, f"{code}threading.Thread(target=call).start()")
