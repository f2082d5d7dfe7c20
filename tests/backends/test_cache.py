# SPDX-License-Identifier: MIT
"""`cache_info` counts what is kept of compiled kernels; `clear_cache` removes ours, and no more."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cunorm
from cunorm import _cache, _cpu, _cuda, _sources
from cunorm._builds import Build
from cunorm._cpu import _compile
from tests.backends.test_cpu_build import ANSWERS, posix, script
from tests.support import described
from tests.support.processes import in_process

pytestmark = pytest.mark.skipif(_cpu.compiler() is None, reason="needs a C++ compiler")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")

X = np.array([[3, 4, 0, 0]], dtype=np.float32)
Y = np.array([[0.6, 0.8, 0, 0]], dtype=np.float32)


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    return described.with_a_cache_at(tmp_path, monkeypatch)


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    return described.compiles(monkeypatch)


def check() -> None:
    np.testing.assert_allclose(cunorm.l2_norm(X), Y, rtol=1e-6)


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


# --- what is counted ------------------------------------------------------------------------------


def test_files_bytes_and_what_is_loaded_are_counted(folder, compiled):
    empty = cunorm.cache_info()
    assert empty[:4] == (folder, 0, 0, 0)
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


def test_a_call_after_clear_cache_compiles_anew_and_is_right(folder, compiled):
    check()
    (library,) = libraries(folder)
    size = library.stat().st_size
    assert cunorm.clear_cache() == (1, size)
    assert libraries(folder) == []
    assert cunorm.cache_info()[1:4] == (0, 0, 0)
    for _ in range(2):
        check()
    assert libraries(folder) == [library]
    assert compiled == ["row_norm_forward"] * 2
    assert cunorm.cache_info()[1:4] == (1, size, 1)


def test_so_does_a_group_norm_that_was_called_before_with_the_same_arrays(folder, compiled):
    x, out, workspace = np.ones((1, 2, 4), np.float32), np.ones((1, 2, 4)), np.empty(1024)
    for _ in range(2):
        for _ in range(2):
            cunorm.group_norm(x, 2, out=out, workspace=workspace)
            assert (out == 0).all()
        cunorm.clear_cache()
    assert compiled == ["group_norm_forward"] * 2


@linux
@pytest.mark.parametrize("times", [0, 10_000])
def test_a_call_after_clear_cache_loads_the_new_file(folder, monkeypatch, times):
    monkeypatch.setattr(_compile, "_times_forgotten", times)
    for _ in range(2):
        check()
        cunorm.clear_cache()
    check()
    assert [path.suffix for path in folder.iterdir()] == [".so"], "nothing else stays there"
    mapped = [
        line.split(maxsplit=5)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(folder) in line
    ]
    (library,) = libraries(folder)
    inode = str(library.stat().st_ino)
    assert {place[4] for place in mapped if not place[5].endswith("(deleted)")} == {inode}
    assert any(place[5].endswith("(deleted)") for place in mapped), "what was loaded stays mapped"


@posix
def test_only_files_named_as_ours_are_removed(folder, tmp_path_factory):
    digest = "0123456789abcdef" * 2
    ours = [f"row_norm_forward-{digest}.so", f"param_grad-{digest}.so"]
    others = [
        f"row_norm_forward-{digest}.so.bak",
        f"row_norm_forward-{digest[1:]}.so",
        f"row_norm_forward-{digest}0.so",
        f"row_norm_forward-{digest.upper()}.so",
        f"-{digest}.so",
        f"{digest}.so",
        "numpy.so",
        "notes.txt",
    ]
    for name in (*ours, *others):
        (folder / name).write_bytes(b"123")
    (folder / f"folder-{digest}.so").mkdir()
    (folder / "tmpabc").mkdir()
    (folder / "tmpabc" / ours[0]).write_bytes(b"123")
    elsewhere = tmp_path_factory.mktemp("elsewhere") / ours[0]
    elsewhere.write_bytes(b"123")
    (folder / f"link-{digest}.so").symlink_to(elsewhere)
    assert cunorm.clear_cache() == (2, 6)
    left = {path.name for path in folder.iterdir()}
    assert left == {*others, f"folder-{digest}.so", "tmpabc", f"link-{digest}.so"}
    assert elsewhere.exists()
    assert (folder / "tmpabc" / ours[0]).exists()


@posix
def test_what_killed_compiles_left_is_removed_when_it_is_a_day_old(tmp_path):
    """The folder of one that runs now is not touched, nor what only looks like such a folder."""
    cache, waits = tmp_path / "cache", "while true; do sleep 0.1; done"
    in_process(
        "import pathlib, subprocess, time\n"
        "call = 'import numpy, cunorm; cunorm.l2_norm(numpy.ones((1, 4)))'\n"
        "cache = pathlib.Path(os.environ['CUNORM_CACHE_DIR'])\n"
        "child = subprocess.Popen([sys.executable, '-c', call], start_new_session=True)\n"
        "while not list(cache.glob('*/*.cpp')):\n"
        "    time.sleep(0.05)\n"
        "os.killpg(child.pid, 9)\n"
        "child.wait()\n"
        "assert cunorm.clear_cache().files == 0",
        CXX=script(tmp_path, f"{ANSWERS}{waits}"),
        CUNORM_CACHE_DIR=os.fspath(cache),
    )
    (left,) = cache.iterdir()
    (source,) = left.iterdir()
    old = time.time() - 25 * 60 * 60
    (cache / "mine").mkdir()
    (cache / f"{left.name}0").symlink_to(tmp_path)
    for path in (left, cache / "mine"):
        os.utime(path, (old, old))
    in_process(
        f"assert cunorm.clear_cache() == (1, {source.stat().st_size})",
        CUNORM_CACHE_DIR=os.fspath(cache),
    )
    assert {path.name for path in cache.iterdir()} == {"mine", f"{left.name}0"}
    assert (tmp_path / "compiler").exists()


def test_a_file_that_another_process_removes_meanwhile_is_not_counted(folder, monkeypatch):
    check()
    found = list(_cache._libraries())
    gone = (folder / f"row_norm_forward-{'f' * 32}.so", 7)
    monkeypatch.setattr(_cache, "_libraries", lambda: [gone, *found])
    assert cunorm.clear_cache() == (1, found[0][1])


def test_what_was_planned_is_forgotten(folder):
    check()
    for index in range(2):
        assert any(plan.cache_info().currsize for plan in _cache._PLANS) is (index == 0)
        cunorm.clear_cache()


def test_sources_are_read_anew(folder, compiled, monkeypatch, tmp_path_factory):
    check()
    sources = tmp_path_factory.mktemp("kernels_cu")
    for path in _sources.kernel_folder().iterdir():
        (sources / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(_sources, "kernel_folder", lambda: sources)
    check()
    assert len(compiled) == 1
    (first,) = libraries(folder)
    kernel = sources / "row_norm_forward.cu"
    kernel.write_text(kernel.read_text("utf-8") + "// edited\n", "utf-8")
    cunorm.clear_cache()
    check()
    assert len(compiled) == 2
    assert libraries(folder) != [first]
    monkeypatch.undo()
    _sources.source_text.cache_clear()


def test_cuda_kernels_are_forgotten(folder, monkeypatch):
    compiled = []
    kernel = SimpleNamespace(compile=lambda: compiled.append(1))
    monkeypatch.setattr(_cuda, "_cupy", lambda: SimpleNamespace(RawKernel=lambda *args: kernel))
    monkeypatch.setattr(_cuda, "compile_options", lambda build: ())
    monkeypatch.setattr(_cuda, "source_text", lambda kernel: "")
    _cuda.forget()
    for times in (1, 2):
        for _ in range(2):
            _cuda._ready(Build("probe", ()), 0)
            assert (cunorm.cache_info().cuda_kernels, len(compiled)) == (1, times)
        cunorm.clear_cache()
        assert cunorm.cache_info().cuda_kernels == 0
