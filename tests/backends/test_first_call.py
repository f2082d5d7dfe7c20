# SPDX-License-Identifier: MIT
"""A first call compiles its builds in parallel, and says so if that takes long.

The compilers here only copy a library.
"""

from __future__ import annotations

import threading

import pytest

import cunorm
from tests.support.caches import (
    ANSWERS,
    check,
    compiles,
    copies,
    libraries,
    posix,
    separate_cache,
)
from tests.support.internals import (
    DTYPES,
    ForwardTypes,
    RowShape,
    _compile,
    cpu_forward,
)
from tests.support.processes import python

pytestmark = [posix, compiles]

# A compiler that succeeds only if another compiler runs at the same time.
MEETS = """{answers}touch "{folder}/$$"
for i in $(seq 100); do [ $(ls "{folder}" | wc -l) -ge 2 ] && break; sleep 0.1; done
[ $(ls "{folder}" | wc -l) -ge 2 ] || exit 1
{copies}"""


def builds_of_two():
    for name in ("float32", "float64"):
        types = ForwardTypes(DTYPES[name], x=DTYPES[name], y=DTYPES[name])
        yield cpu_forward(types, RowShape(8, 8)).build


@pytest.fixture
def patience(monkeypatch):
    """Return a function that sets after how many seconds a call says that it compiles."""
    monkeypatch.setattr(_compile, "is_announced", threading.Event())
    monkeypatch.setattr(_compile, "PATIENCE", 60)
    return lambda seconds: monkeypatch.setattr(_compile, "PATIENCE", seconds)


def test_the_builds_of_a_call_are_compiled_at_the_same_time_and_once(tmp_path):
    running = tmp_path / "running"
    running.mkdir()
    text = MEETS.format(answers=ANSWERS, folder=running, copies=copies())
    first, second = builds_of_two()
    with separate_cache(tmp_path, text) as cache:
        entries = _compile.libraries([first, second, first])
        assert len(libraries(cache)) == len(list(running.iterdir())) == 2
        assert entries == [_compile.loaded.values.get(build) for build in (first, second, first)]
        assert entries[0] != entries[1]


def test_the_error_of_one_of_two_parallel_builds_is_raised(tmp_path):
    first, second = builds_of_two()
    macro = "#define COMPUTE_T fp64"
    fails = f'case "$*" in *--version*) ;; *row_norm*) grep -q "{macro}" "$source" && exit 1;; esac'
    find = 'for source; do case "$source" in *.cpp) break;; esac; done'
    with separate_cache(tmp_path, f"{ANSWERS}{find}\n{fails}\n{copies()}") as cache:
        with pytest.raises(RuntimeError, match=r"(?s)does not compile row_norm_f.* COMPUTE_T=fp64"):
            _compile.libraries([first, second])
        assert len(libraries(cache)) == 1


def test_a_call_that_waits_for_a_compiler_says_so_once(tmp_path, patience, caplog):
    slow = f'{ANSWERS}case "$*" in *row_norm*) sleep 0.6;; esac\n{copies()}'
    with separate_cache(tmp_path, slow):
        check()
        assert not caplog.messages, "the compile did not take long"
        cunorm.clear_cache()
        patience(0.1)
        cunorm.warmup("l2_norm", 4, "float32", device="cpu", rows=1, progress=False)
        check()
        assert not caplog.messages, "a warmup does not say that it compiles"
        for _ in range(2):
            cunorm.clear_cache()
            check()
            assert len(caplog.messages) == 1
        assert _compile.is_announced.is_set()


def test_the_line_names_the_kernels_and_warmup_on_standard_error_unless_that_is_closed():
    code = "from tests.support.internals import _compile\n"
    code += "class Build: kernel = 'row_norm_forward'\n"
    code += "for _ in range(2): _compile.announce_after(0, [Build])\n"
    done = python("-c", code)
    line = "cunorm compiles row_norm_forward, once for this machine; cunorm.warmup does so ahead\n"
    assert (done.returncode, done.stderr) == (0, line)
    for closed in ("sys.stderr.close()", "sys.stderr = None"):
        assert python("-c", f"import sys; {closed}\n{code}").returncode == 0
