# SPDX-License-Identifier: MIT
"""Caches that several threads and processes use at once, while one of them clears."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import cunorm
from cunorm import _cpu
from cunorm._cpu import _compile
from cunorm._loaded import Loaded
from tests.backends.test_cpu_build import ANSWERS, posix, script
from tests.support import described
from tests.support.calls import call_of, nothing_known
from tests.support.processes import in_process

pytestmark = pytest.mark.skipif(_cpu.compiler() is None, reason="needs a C++ compiler")


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    return described.with_a_cache_at(tmp_path, monkeypatch)


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    return described.compiles(monkeypatch)


def check() -> None:
    y = cunorm.l2_norm(np.array([[3, 4, 0, 0]], dtype=np.float32))
    np.testing.assert_allclose(y, [[0.6, 0.8, 0, 0]], rtol=1e-6)


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def test_of_warmups_at_once_one_compiles_and_counts_it(folder, compiled):
    together = threading.Barrier(4)

    def warm(_):
        together.wait(timeout=30)
        return cunorm.warmup("l2_norm", 4, "float32", device="cpu", rows=1, progress=False)[:2]

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(warm, range(4))) == [(1, 0), (1, 0), (1, 0), (1, 1)]
    assert compiled == ["row_norm_forward"]


def test_what_was_being_loaded_while_another_clears_is_not_kept(folder, compiled, monkeypatch):
    load, builds = _compile._load, []

    def clear_meanwhile(build):
        builds.append(build)
        loaded = load(build)
        if len(builds) == 1:
            cunorm.clear_cache()
        return loaded

    monkeypatch.setattr(_compile, "_load", clear_meanwhile)
    check()
    assert cunorm.cache_info()[1:4] == (0, 0, 0)
    assert _cpu.prepare(builds[0]) is True
    assert compiled == ["row_norm_forward"] * 2


def test_threads_wait_for_each_other_also_while_a_key_is_hashed():
    class Slow(str):
        def __hash__(self):
            time.sleep(0.005)
            return 1

    def load():
        time.sleep(0.02)
        return object(), True

    loaded, keys = Loaded(), [Slow("key") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda key: loaded.ready(key, load), keys))
    assert sum(loads for _, loads in results) == 1
    assert len({id(value) for value, _ in results}) == 1


def test_a_library_removed_between_its_compile_and_its_load_is_compiled_again(folder, monkeypatch):
    compiled, open_it = [], _compile.ctypes.CDLL
    compile_it = _compile._compile

    def remove_the_first(name):
        if len(compiled) == 1:
            cunorm.clear_cache()
        return open_it(name)

    monkeypatch.setattr(_compile, "_compile", lambda *args: (compile_it(*args), compiled.append(1)))
    monkeypatch.setattr(_compile.ctypes, "CDLL", remove_the_first)
    check()
    assert len(compiled) == 2
    assert len(libraries(folder)) == 1


def test_a_library_that_cannot_be_loaded_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(
        _compile, "_compile", lambda build, found, text, macros, to: to.write_text("no library")
    )
    with pytest.raises(OSError, match="row_norm_forward-"):
        check()


def test_threads_that_call_while_another_clears_get_right_answers(folder):
    wrong, done = [], threading.Event()

    def call():
        while not done.is_set():
            try:
                check()
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        while not libraries(folder) and not wrong:
            done.wait(0.01)
        cunorm.clear_cache()
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_backward", "group_norm"])
def test_kernels_that_were_made_while_another_clears_are_not_used_again(name, folder, monkeypatch):
    runner, made, call = _cpu.runner, [], call_of(name)

    def clear_meanwhile(*arguments):
        made.append(runner(*arguments))
        if len(made) == 1:
            described.forget()  # and not yet what was planned, as in the midst of `clear_cache`
        return made[-1]

    nothing_known(monkeypatch)
    described.forget()
    monkeypatch.setattr(_cpu, "runner", clear_meanwhile)
    for times in (1, 2, 2):
        call.make()
        assert len(made) == times


@posix
def test_processes_that_clear_and_compile_at_once_get_right_answers(tmp_path):
    compiler = script(tmp_path, f'{ANSWERS}exec $real "$@" -O0')
    in_process(
        "import subprocess\n"
        "loop = 'import numpy as np, cunorm\\n' + '''\n"
        "for _ in range(3):\n"
        "    y = cunorm.l2_norm(np.array([[3, 4]], dtype=np.float32))\n"
        "    np.testing.assert_allclose(y, [[0.6, 0.8]], rtol=1e-6)\n"
        "    cunorm.clear_cache()\n"
        "'''\n"
        "both = [subprocess.Popen([sys.executable, '-c', loop]) for _ in range(2)]\n"
        "assert [process.wait() for process in both] == [0, 0]",
        CXX=compiler,
        CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"),
    )
