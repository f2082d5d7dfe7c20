# SPDX-License-Identifier: MIT
"""The cache of compiled kernels: shared, counted; only cunorm's files are removed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cunorm
from tests.support import described
from tests.support.caches import (
    ANSWERS,
    check,
    compiled,
    compiles,
    libraries,
    posix,
    separate_cache,
)
from tests.support.calls import call_of
from tests.support.internals import _compile, _cpu
from tests.support.processes import ROOT
from tests.support.remembered import caches

pytestmark = [posix, compiles]
DAY = 25 * 60 * 60  # a little more than a day

CALL = "from tests.support.caches import check; check()"


def started(call: str = CALL) -> subprocess.Popen:
    """Start another process that makes a call."""
    return subprocess.Popen([sys.executable, "-c", call], cwd=ROOT, start_new_session=True)


# --- cached files ---------------------------------------------------------------------------------


def test_processes_that_compile_one_build_at_once_share_it_and_the_next_compiles_nothing(
    folder, monkeypatch
):
    children = [started() for _ in range(5)]
    assert [child.wait(timeout=120) for child in children] == [0] * 5
    found, (library,) = compiled(monkeypatch), folder.iterdir()
    before = library.stat().st_mtime_ns
    check()
    assert found == []
    assert [path.stat().st_mtime_ns for path in folder.iterdir()] == [before]


def test_the_cache_is_a_folder_of_the_user_alone(tmp_path, monkeypatch):
    """A relative CUNORM_CACHE_DIR names the same folder after a change of directory."""
    monkeypatch.chdir(tmp_path)
    with separate_cache(tmp_path) as cache:
        monkeypatch.setenv("CUNORM_CACHE_DIR", "cache")
        assert cunorm.cache_info().folder == cache
        monkeypatch.chdir("/")
        check()
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert len(libraries(cache)) == 1


def test_nothing_is_imported_to_say_where_cupys_cache_is(folder, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", "/some/where")
    monkeypatch.setitem(sys.modules, "cupy", None)  # makes `import cupy` fail
    assert str(cunorm.cache_info().cupy_folder) == "/some/where"
    monkeypatch.delenv("CUPY_CACHE_DIR")
    assert cunorm.cache_info().cupy_folder.parts[-2:] == (".cupy", "kernel_cache")
    monkeypatch.delitem(sys.modules, "cupy")
    assert cunorm.cache_info().cupy_folder is None
    assert "cupy" not in sys.modules


# --- removal --------------------------------------------------------------------------------------


def test_calls_after_clear_cache_compile_again_and_are_counted(folder, monkeypatch):
    """A call that was in the cache of calls compiles again too."""
    found, x, out = compiled(monkeypatch), np.ones((1, 4), np.float32), np.ones((1, 4), np.float32)
    for times in (1, 2):
        for _ in range(2):
            check()
            cunorm.l2_norm(x, out=out)
            assert (out == 0.5).all()
        assert found == ["row_norm_forward"] * times
        (library,) = folder.iterdir()
        size = library.stat().st_size
        assert cunorm.cache_info()[:4] == (folder, 1, size, 1)
        assert cunorm.clear_cache() == (1, size)
        assert libraries(folder) == []
        assert cunorm.cache_info()[1:4] == (0, 0, 0)
        assert not [one.__qualname__ for one in caches() if one.cache_info().currsize]


def test_only_files_with_names_of_cunorm_are_counted_and_removed(folder, tmp_path):
    digest = "0123456789abcdef" * 2
    ours = [f"row_norm_forward-{digest}.so", f"param_grad-{digest}.so"]
    helping = [f"refused-{digest}.txt"]
    forward = f"row_norm_forward-{digest}"
    others = [f"{forward}.so.bak", f"{forward[:-1]}.so", f"{forward}0.so", f"{forward.upper()}.so"]
    others += [f"-{digest}.so", f"{digest}.so", "numpy.so", "notes.txt", "refused-0.txt"]
    (folder / "tmpabc").mkdir(parents=True)
    elsewhere, within = tmp_path / ours[0], folder / "tmpabc" / ours[0]
    for path in (*(folder / name for name in (*ours, *helping, *others)), elsewhere, within):
        path.write_bytes(b"123")
    (folder / f"folder-{digest}.so").mkdir()
    (folder / f"link-{digest}.so").symlink_to(elsewhere)
    assert cunorm.cache_info()[1:3] == (2, 9)
    assert cunorm.clear_cache() == (3, 9)
    left = {path.name for path in folder.iterdir()}
    assert left == {*others, f"folder-{digest}.so", "tmpabc", f"link-{digest}.so"}
    assert elsewhere.exists()
    assert within.exists()


def test_files_left_by_killed_compiles_are_removed_after_a_day(tmp_path):
    """A newer folder, an old folder with another name, and a link are not touched."""
    with separate_cache(tmp_path, f"{ANSWERS}kill -9 $PPID") as cache:
        started().wait()
        assert cunorm.clear_cache().files == 0
        (left,) = cache.iterdir()
        (source,) = left.iterdir()
        size, old = source.stat().st_size, time.time() - DAY
        (cache / "mine").mkdir()
        (cache / f"{left.name}0").symlink_to(tmp_path)
        for path in (left, cache / "mine"):
            os.utime(path, (old, old))
        assert cunorm.clear_cache() == (1, size)
        assert {path.name for path in cache.iterdir()} == {"mine", f"{left.name}0"}
    assert (tmp_path / "compiler").exists()


# --- concurrency ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_backward", "group_norm"])
def test_kernels_made_while_another_thread_clears_are_not_used_again(name, monkeypatch):
    program, loaded, call = _cpu.Program, [], call_of(name)

    def clear_meanwhile(*arguments):
        loaded.append(program(*arguments))
        if len(loaded) == 1:
            described.clear_all()  # as another thread may at this point
        return loaded[-1]

    described.clear_all()
    monkeypatch.setattr(_cpu, "Program", clear_meanwhile)
    for times in (1, 2, 2):
        call.make()
        assert len(loaded) == times


@pytest.mark.parametrize("when", ["it was loaded", "it was compiled"])
def test_a_build_that_another_thread_clears_at_once_is_made_again(when, folder, monkeypatch):
    found, times = compiled(monkeypatch), []
    module, name = (_compile, "_load") if "loaded" in when else (_compile.ctypes, "CDLL")
    right = getattr(module, name)

    def clear_at_first(what):
        times.append(what)
        loaded = right(what) if "loaded" in when else None
        if len(times) == 1:
            cunorm.clear_cache()
        return loaded or right(what)

    monkeypatch.setattr(module, name, clear_at_first)
    check()
    assert cunorm.cache_info().loaded == 0
    assert len(libraries(folder)) == ("compiled" in when)
    check()
    assert found == ["row_norm_forward"] * 2


def test_a_library_that_cannot_be_loaded_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(_compile, "_compile", lambda *args: args[-1].write_text("no library"))
    with pytest.raises(OSError, match="row_norm_forward-"):
        check()


def test_threads_and_processes_that_call_while_others_clear_get_right_answers(folder):
    child = started(
        f"import cunorm, time\n{CALL}\n"
        "for _ in range(3): time.sleep(0.3); cunorm.clear_cache(); check()"
    )

    def call(_):
        while child.poll() is None:
            check()

    with ThreadPoolExecutor(3) as pool:
        called = pool.map(call, range(3))
        while child.poll() is None:
            time.sleep(0.3)
            if libraries(folder):  # a call fails if its build is cleared three times in a row
                cunorm.clear_cache()
        assert list(called) == [None] * 3
    assert child.returncode == 0
