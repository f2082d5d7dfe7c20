# SPDX-License-Identifier: MIT
"""Caches that several threads and processes use at once, while one of them clears."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import cunorm
from tests.support import described
from tests.support.caches import check, compiled, compiles, libraries
from tests.support.calls import call_of
from tests.support.internals import _compile, _cpu
from tests.support.processes import ROOT

pytestmark = compiles


def test_threads_that_need_the_same_build_at_once_compile_it_once(folder, monkeypatch):
    found, together = compiled(monkeypatch), threading.Barrier(4)

    def call(_):
        together.wait(timeout=30)
        check()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(4)))
    assert found == ["row_norm_forward"]


def test_what_was_being_loaded_while_another_clears_is_not_kept(folder, monkeypatch):
    found, load, builds = compiled(monkeypatch), _compile._load, []

    def clear_meanwhile(build):
        builds.append(build)
        loaded = load(build)
        if len(builds) == 1:
            cunorm.clear_cache()
        return loaded

    monkeypatch.setattr(_compile, "_load", clear_meanwhile)
    check()
    assert cunorm.cache_info()[1:4] == (0, 0, 0)
    check()
    assert found == ["row_norm_forward"] * 2


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_backward", "group_norm"])
def test_kernels_that_were_made_while_another_clears_are_not_used_again(name, folder, monkeypatch):
    runner, made, call = _cpu.runner, [], call_of(name)

    def clear_meanwhile(*arguments):
        made.append(runner(*arguments))
        if len(made) == 1:
            described.forget()  # and not yet what was planned, as in the midst of `clear_cache`
        return made[-1]

    described.forget()
    monkeypatch.setattr(_cpu, "runner", clear_meanwhile)
    for times in (1, 2, 2):
        call.make()
        assert len(made) == times


def test_a_library_removed_between_its_compile_and_its_load_is_compiled_again(folder, monkeypatch):
    found, open_it = compiled(monkeypatch), _compile.ctypes.CDLL

    def remove_the_first(name):
        if len(found) == 1:
            cunorm.clear_cache()
        return open_it(name)

    monkeypatch.setattr(_compile.ctypes, "CDLL", remove_the_first)
    check()
    assert len(found) == 2
    assert len(libraries(folder)) == 1


def test_a_library_that_cannot_be_loaded_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(_compile, "_compile", lambda *told: told[-1].write_text("no library"))
    with pytest.raises(OSError, match="row_norm_forward-"):
        check()


LOOP = """
import cunorm
from tests.support.caches import check
for _ in range(3):
    check()
    cunorm.clear_cache()
"""


def test_threads_and_processes_that_call_while_others_clear_get_right_answers(folder):
    wrong, done = [], threading.Event()

    def call():
        while not done.is_set():
            try:
                check()
            except BaseException as error:
                wrong.append(error)

    child = subprocess.Popen([sys.executable, "-c", LOOP], cwd=ROOT)  # it has the same folder
    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        while not libraries(folder) and not wrong:
            done.wait(0.01)
        cunorm.clear_cache()
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert child.wait(timeout=120) == 0
