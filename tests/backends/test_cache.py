# SPDX-License-Identifier: MIT
"""What is kept of compiled kernels: shared by processes, whole, counted; ours alone is removed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import cunorm
from tests.support.caches import (
    ANSWERS,
    begun_anew,
    check,
    compiled,
    compiles,
    libraries,
    own_cache,
    posix,
    script,
)
from tests.support.internals import _cache, _sources, kernel_folder
from tests.support.processes import ROOT, in_process

pytestmark = compiles
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")

CALL = "import numpy, cunorm; print(cunorm.l2_norm(numpy.array([[3, 4, 0, 0]], numpy.float32)))"


def started(cache: Path, call: str = CALL, **environment: str) -> subprocess.Popen:
    """Make a call in another process."""
    command = [sys.executable, "-c", call]
    told = {**os.environ, "CUNORM_CACHE_DIR": os.fspath(cache), **environment}
    return subprocess.Popen(command, env=told, cwd=ROOT, start_new_session=True)


# --- what is kept ---------------------------------------------------------------------------------


def test_processes_that_compile_the_same_at_once_share_it_and_the_next_compiles_nothing(
    tmp_path, monkeypatch
):
    children = [started(tmp_path / "cache") for _ in range(2)]
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    with own_cache(tmp_path) as cache:
        found, (library,) = compiled(monkeypatch), cache.iterdir()
        before = library.stat().st_mtime_ns
        check()
        assert found == []
        assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [before]


def test_a_damaged_library_is_compiled_again(tmp_path):
    """A loader refuses an empty one, and crashes on what is left of one that is cut."""
    in_process(
        "import pathlib\n"
        "from tests.support import described\n"
        "check(0, False)\n"
        "(library,) = pathlib.Path(os.environ['CUNORM_CACHE_DIR']).iterdir()\n"
        "whole = library.read_bytes()\n"
        "one_bit = bytes([whole[3000] ^ 1])\n"
        "for damaged in (b'', whole[:4096], whole[:3000] + one_bit + whole[3001:]):\n"
        "    library.unlink()  # as its old content is mapped\n"
        "    library.write_bytes(damaged)\n"
        "    described.forget()\n"
        "    check(0, False)\n"
        "    assert library.read_bytes() != damaged",
        CUNORM_CACHE_DIR=os.fspath(tmp_path),
    )


@posix
def test_the_cache_is_a_folder_of_the_user_alone(folder):
    assert cunorm.cache_info().folder == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_relative_folder_survives_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with begun_anew(CUNORM_CACHE_DIR="kernels"):
        assert cunorm.cache_info().folder == tmp_path / "kernels"
        monkeypatch.chdir("/")
        check()
    assert len(libraries(tmp_path / "kernels")) == 1


@posix
@pytest.mark.parametrize("what", [0o770, 0o707, "file", "link to nothing"])
def test_a_cache_that_others_may_write_to_or_that_is_no_folder_is_not_used(tmp_path, what):
    cache = tmp_path / "cache"
    if what == "file":
        cache.touch()
    elif what == "link to nothing":
        cache.symlink_to(tmp_path / "no" / "such")
    else:
        cache.mkdir()
        cache.chmod(what)
    with own_cache(tmp_path), pytest.warns(RuntimeWarning, match="for this process only"):
        assert cunorm.cache_info().folder not in (cache, *cache.parents)
        if what == 0o770:
            check()
            assert cunorm.cache_info().libraries == 1
            assert not list(cache.iterdir())


# --- what is counted ------------------------------------------------------------------------------


def test_files_bytes_and_what_is_loaded_are_counted(folder):
    assert cunorm.cache_info()[:4] == (folder, 0, 0, 0)
    check()
    (library,) = libraries(folder)
    size = library.stat().st_size
    assert cunorm.cache_info()[:4] == (folder, 1, size, 1)
    (folder / f"row_norm_forward-{'0' * 32}.so").write_bytes(b"12345")  # another process's
    assert cunorm.cache_info()[:4] == (folder, 2, size + 5, 1)


def test_nothing_is_imported_to_say_where_cupys_cache_is(tmp_path):
    in_process(
        "assert cunorm.cache_info().cupy_folder is None and 'cupy' not in sys.modules\n"
        "sys.modules['cupy'] = None  # stands for an import\n"
        "assert str(cunorm.cache_info().cupy_folder) == '/some/where'\n"
        "del os.environ['CUPY_CACHE_DIR']\n"
        "assert cunorm.cache_info().cupy_folder.parts[-2:] == ('.cupy', 'kernel_cache')\n"
        "assert cunorm.clear_cache().files >= 0 and sys.modules['cupy'] is None",
        CUPY_CACHE_DIR="/some/where",
        CUNORM_CACHE_DIR="",
        XDG_CACHE_HOME=os.fspath(tmp_path),
    )


# --- what is removed ------------------------------------------------------------------------------


def test_calls_after_clear_cache_compile_anew_and_are_right(folder, monkeypatch):
    """So does one that was made before with the same arrays."""
    found, x = compiled(monkeypatch), np.ones((1, 2, 4), np.float32)
    out, workspace = np.ones((1, 2, 4)), np.empty(1024)
    for times in (1, 2):
        for _ in range(2):
            check()
            cunorm.group_norm(x, 2, out=out, workspace=workspace)
            assert (out == 0).all()
        assert found == ["row_norm_forward", "group_norm_forward"] * times
        size = sum(library.stat().st_size for library in libraries(folder))
        assert cunorm.cache_info()[1:4] == (2, size, 2)
        assert cunorm.clear_cache() == (2, size)
        assert libraries(folder) == []
        assert cunorm.cache_info()[1:4] == (0, 0, 0)
        assert not any(plan.cache_info().currsize for plan in _cache._PLANS), "how to launch it"


@linux
def test_a_call_after_clear_cache_loads_the_new_file(folder):
    for _ in range(2):
        check()
        cunorm.clear_cache()
    check()
    (library,) = folder.iterdir()  # nothing else stays there
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split(maxsplit=5) for line in lines if str(folder) in line]
    inodes = {place[4] for place in mapped if not place[5].endswith("(deleted)")}
    assert inodes == {str(library.stat().st_ino)}
    assert any(place[5].endswith("(deleted)") for place in mapped), "what was loaded stays mapped"


@posix
def test_only_files_named_as_ours_are_counted_and_removed(folder, tmp_path):
    digest = "0123456789abcdef" * 2
    ours = [f"row_norm_forward-{digest}.so", f"param_grad-{digest}.so"]
    helping = [f"headers-{digest}.h.gch", f"refused-{digest}.json"]
    forward = f"row_norm_forward-{digest}"
    others = [f"{forward}.so.bak", f"{forward[:-1]}.so", f"{forward}0.so", f"{forward.upper()}.so"]
    others += [f"-{digest}.so", f"{digest}.so", "numpy.so", "notes.txt", "headers-0.h.gch"]
    cunorm.cache_info()  # which makes the folder
    (folder / "tmpabc").mkdir()
    elsewhere, within = tmp_path / ours[0], folder / "tmpabc" / ours[0]
    for path in (*(folder / name for name in (*ours, *helping, *others)), elsewhere, within):
        path.write_bytes(b"123")
    (folder / f"folder-{digest}.so").mkdir()
    (folder / f"link-{digest}.so").symlink_to(elsewhere)
    assert cunorm.cache_info()[1:3] == (2, 12)
    assert cunorm.clear_cache() == (4, 12)
    left = {path.name for path in folder.iterdir()}
    assert left == {*others, f"folder-{digest}.so", "tmpabc", f"link-{digest}.so"}
    assert elsewhere.exists()
    assert within.exists()


@posix
def test_what_killed_compiles_left_is_removed_when_it_is_a_day_old(tmp_path):
    """The folder of one that runs now is not touched, nor what only looks like such a folder."""
    waits = script(tmp_path, f"{ANSWERS}while true; do sleep 0.1; done")
    child = started(tmp_path / "cache", CXX=waits)
    while not list(tmp_path.glob("cache/*/*.cpp")) and child.poll() is None:
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    with own_cache(tmp_path) as cache:
        assert cunorm.clear_cache().files == 0
        (left,) = cache.iterdir()
        (source,) = left.iterdir()
        size, old = source.stat().st_size, time.time() - 25 * 60 * 60
        (cache / "mine").mkdir()
        (cache / f"{left.name}0").symlink_to(tmp_path)
        for path in (left, cache / "mine"):
            os.utime(path, (old, old))
        assert cunorm.clear_cache() == (1, size)
        assert {path.name for path in cache.iterdir()} == {"mine", f"{left.name}0"}
    assert (tmp_path / "compiler").exists()


def test_sources_are_read_anew(folder, monkeypatch, tmp_path):
    found, sources = compiled(monkeypatch), tmp_path / "kernels"
    sources.mkdir()
    for path in kernel_folder().iterdir():
        (sources / path.name).write_bytes(path.read_bytes())
    check()
    monkeypatch.setattr(_sources, "kernel_folder", lambda: sources)
    (first,) = libraries(folder)
    kernel = sources / "row_norm_forward.cu"
    kernel.write_text(kernel.read_text("utf-8") + "// edited\n", "utf-8")
    cunorm.clear_cache()
    check()
    assert len(found) == 2
    assert libraries(folder) != [first]
    _sources.source_text.cache_clear()
