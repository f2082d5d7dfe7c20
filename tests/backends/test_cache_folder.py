# SPDX-License-Identifier: MIT
"""With an unusable or full cache folder, a call is right or raises an error that names a remedy.

The compilers here only copy a library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import cunorm
from tests.support.caches import (
    check,
    compiles,
    copies,
    fresh_process,
    libraries,
    posix,
    script,
    separate_cache,
)
from tests.support.internals import _info
from tests.support.processes import in_process

pytestmark = [posix, compiles]

PROCESS_ONLY = "for this process only"


def is_immutable(folder):
    """Make a folder read-only, for root too; return whether this succeeded."""
    folder.chmod(0o500)
    if os.access(folder, os.W_OK) and shutil.which("chattr"):
        subprocess.run(["chattr", "+i", folder], check=False, capture_output=True)
    return not os.access(folder, os.W_OK)


def spoil(cache, what):
    """Make a cache folder, or a file or link in its place, that cunorm must not use."""
    if what == "file":
        cache.touch()
    elif what == "link to nothing":
        cache.symlink_to(cache.parent / "no" / "such")
    else:
        cache.mkdir()
    if what == "read-only" and not is_immutable(cache):
        pytest.skip("root may write to any folder here")
    elif isinstance(what, int):
        cache.chmod(what)


@pytest.mark.parametrize(
    "what", [0o770, 0o707, "file", "link to nothing", "of another", "read-only"]
)
def test_a_cache_that_is_not_the_users_alone_or_not_writable_is_not_used(
    tmp_path, monkeypatch, what
):
    cache = tmp_path / "cache"
    try:
        spoil(cache, what)
        with separate_cache(tmp_path), pytest.warns(RuntimeWarning, match=PROCESS_ONLY):
            if what == "of another":
                monkeypatch.setattr(os, "getuid", lambda: cache.stat().st_uid + 1)
            assert cunorm.cache_info().folder not in (cache, *cache.parents)
            check()
            assert cunorm.cache_info().libraries == 1
            assert not cache.is_dir() or not list(cache.iterdir())
    finally:
        if what == "read-only" and shutil.which("chattr"):
            subprocess.run(["chattr", "-i", cache], check=False, capture_output=True)


@pytest.mark.parametrize("above", ["file", "link to nothing", "/proc"])
def test_a_cache_that_can_never_be_made_is_replaced_for_the_process(tmp_path, above):
    for what in {above} - {"/proc"}:  # in /proc, not even root can make a folder
        spoil(tmp_path / what, what)
    with separate_cache(tmp_path), pytest.warns(RuntimeWarning, match=PROCESS_ONLY):
        os.environ["CUNORM_CACHE_DIR"] = os.fspath(tmp_path / above / "no" / "such")
        assert "for one process only" in dict(_info._caches())["CPU builds"]
        assert cunorm.cache_info().folder.is_dir()


def test_if_no_folder_is_writable_an_error_says_which_variable_names_a_folder(
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
def test_without_home_passwd_or_cunorm_cache_dir_names_the_folder(tmp_path, monkeypatch, in_passwd):
    pwd = pytest.importorskip("pwd", reason="there is no file of passwords")

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
    with fresh_process(CUNORM_CACHE_DIR=os.fspath(tmp_path / "chosen")) as patch:
        for name in ("HOME", "XDG_CACHE_HOME"):
            patch.delenv(name, raising=False)
        assert cunorm.cache_info().folder == tmp_path / "chosen"


def test_a_folder_that_is_removed_or_opened_to_others_meanwhile_is_not_relied_on(tmp_path):
    with separate_cache(tmp_path) as cache:
        check()
        shutil.rmtree(cache)
        cunorm.clear_cache()
        check()
        assert len(libraries(cache)) == 1
        cache.chmod(0o777)
        before = libraries(cache)
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


# The library that the fake compiler copies ends with a digest; cunorm appends a second digest.
CUT = """
import resource, signal
from tests.support import caches, described
size = int(os.environ["SIZE"])
for limit in 1000, size // 2, size + 16:  # no room for the source; the library; its digest
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        caches.check()
    except (OSError, RuntimeError) as error:
        print(str(error).replace("\\n", " "))
    else:
        raise AssertionError(limit)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    folder = cunorm.cache_info().folder
    assert not list(folder.iterdir()), "a cut file is left"
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
