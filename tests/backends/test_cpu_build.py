# SPDX-License-Identifier: MIT
"""The CPU's builds: options, names, prefetches, shared variables; compiled in parallel.

Most compilers here only copy a library. `test_faults.py` has compilers that fail.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import cunorm
from tests.support import described
from tests.support.caches import (
    ANSWERS,
    check,
    compiles,
    copies,
    fresh_process,
    gcc,
    libraries,
    posix,
    separate_cache,
)
from tests.support.cases import call_of
from tests.support.gpu_arrays import OnNumpy
from tests.support.internals import (
    DTYPES,
    ForwardTypes,
    RowShape,
    _caches,
    _compile,
    _compiler,
    cache_folder,
    compiler,
    cpu_forward,
)
from tests.support.machines import compiled_for, edited
from tests.support.processes import in_process, python

pytestmark = [posix, compiles]


def build_of(name):
    dtype = DTYPES[name]
    return cpu_forward(ForwardTypes(dtype, x=dtype, y=dtype), RowShape(8, 8)).build


# --- options --------------------------------------------------------------------------------------


def test_arguments_of_cxx_come_before_those_of_cunorm_and_cxxflags_after(tmp_path):
    log = tmp_path / "log"
    text = f'echo "$@" >> "{log}"\n{copies()}'
    with separate_cache(tmp_path, text, CXX=" -DMINE", CUNORM_CXXFLAGS="-O0 -DALSO"):
        check()
    (compiled,) = [line for line in log.read_text().splitlines() if "--version" not in line]
    assert re.match(r"-DMINE .*-O3 .*-ffp-contract=off .*-w .*-O0 -DALSO ", compiled)
    for dangerous in ("fast", "unsafe", "associative", "finite-math"):
        assert dangerous not in compiled, "arithmetic is strict"


def test_an_empty_cxx_counts_as_unset():
    with fresh_process(CXX=""):
        assert compiler() is not None


REFUSES = f'{ANSWERS}case "$*" in *{{}}*) exit 1;; esac\n'
NOTES = 'case "$*" in *-fopenmp*row_norm_forward.cpp*) touch "{}";; esac\n'


def test_a_compiler_that_refused_an_option_is_tried_again_a_day_later(tmp_path):
    openmp, options = tmp_path / "openmp", {"device": "cpu", "progress": False, "workers": 2}
    text = REFUSES.format("-fopenmp") + copies()
    with separate_cache(tmp_path, text) as cache:
        cunorm.warmup("l2_norm", 4, ["float32", "float64"], **options)  # both without OpenMP
        serial, (refused,) = libraries(cache), cache.glob("*.txt")
        assert len(serial) == 2
        command = tmp_path / "compiler"
        command.write_text(command.read_text().replace("exit 1", f'touch "{openmp}"'))
        for day in range(2):
            described.clear_all()
            check()
            assert len(libraries(cache)) == 2 + day
            assert openmp.exists() == bool(day)
            os.utime(refused, (time.time() - 25 * 60 * 60,) * 2)


@pytest.mark.parametrize(
    "refused", ["-fschedule-insns", "-fschedule-insns*row_norm_forward.cpp", "-march=native"]
)
def test_a_compiler_that_refuses_an_option_for_speed_still_uses_openmp(refused, tmp_path):
    text = REFUSES.format(refused) + NOTES.format(tmp_path / "openmp") + copies()
    with separate_cache(tmp_path, text) as cache:
        check()
        assert len(libraries(cache)) == 1
    assert (tmp_path / "openmp").exists()


# --- names and shared variables -------------------------------------------------------------------


@pytest.mark.parametrize("what", ["options", "compiler", "processor", "headers", "source"])
def test_the_name_of_a_build_and_of_its_variables_depend_on_all_that_made_them(monkeypatch, what):
    """Libraries of one version share their threads' variables, also those of other sources."""
    names, build = [], build_of("float32")

    def compile_build(build, cxx, options, text, target):
        names.append((target.name, re.search("#define LIBRARIES (.*)", text)[1]))

    monkeypatch.setattr(_compile, "_compile", compile_build)
    monkeypatch.setattr(_compile, "checksum_matches", lambda target: False)
    _compile._compiled(build)
    _compile._compiled(build)
    patch = {
        "options": ("_OPTIONS", (*_compile._OPTIONS, "-g")),
        "compiler": ("compiler", partial(compiler()._replace, version="another")),
        "processor": ("cpu_identity", lambda: "another"),
        "headers": ("_stand_ins", lambda: "another"),
        "source": ("source_text", lambda *arguments: "another"),
    }[what]
    monkeypatch.setattr(_compile, *patch)
    _compile._compiled(build)
    before, again, after = names
    assert before == again
    assert before[0] != after[0]
    assert (before[1] == after[1]) == (what == "source")


EXPORTED = re.compile(r"cunorm_blocks|cunorm_run|_Z\w*\d+cunorm_([0-9a-f]{32})\w+")


@gcc  # libraries of other compilers share nothing
@pytest.mark.compiled("O3")
def test_libraries_export_entry_points_and_shared_variables_named_by_their_version(tmp_path):
    if shutil.which("nm") is None:
        pytest.skip("needs nm, of binutils, to list symbols")
    x = np.ones((2, 8), np.float16)
    with fresh_process(CUNORM_CACHE_DIR=tmp_path):
        y = cunorm.rms_norm_forward(x, gate=x, gate_position="pre")
        cunorm.rms_norm_backward(x, x, x[0], gate=x, gate_position="pre", rstd=y.rstd)
        found = libraries(tmp_path)
    assert len(found) == 3
    versions = set()
    for library in found:
        listed = ["nm", "-D", "--defined-only", "--format=posix", library]
        printed = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
        names = [line.split()[0] for line in printed.splitlines()]
        matches = list(map(EXPORTED.fullmatch, names))
        assert all(matches), names
        versions |= {match[1] for match in matches if match[1]}
        assert ("kept_lines" in printed) == ("norm" in library.name), "only norms share kept_lines"
    assert len(versions) == 1


def call_two_versions(folder: str) -> None:
    cunorm.set_num_threads(2)
    more = "long long more[16] = {}; int next_ring = 0;"
    other = edited(Path(folder), {"gang.h": ("int next_ring = 0;", more)})
    gated = {"shape": (1, 1, 40, 300), "gate": "float16"}
    calls = [call_of("row_norm_forward", {"shape": (1, 1, 2, 40_000)}, OnNumpy())]
    calls += [call_of("row_norm_backward", gated, OnNumpy())]
    for headers in (None, other, None, other):
        with compiled_for("native", headers):
            for call in calls:
                call.check()


@gcc
def test_two_versions_of_the_headers_in_a_process_give_right_results(tmp_path):
    """The second version has a larger thread-local variable."""
    in_process(
        "from tests.backends.test_cpu_build import call_two_versions\n"
        f"call_two_versions({str(tmp_path)!r})"
    )


# --- prefetches -----------------------------------------------------------------------------------


def assembly(build, folder):
    source = folder / "kernel.cpp"
    source.write_text(_compile._translation_unit(build))
    options = _compiler.optional(compiler(), _compile._OPTIONS, cache_folder())
    options += (*_compile._OPTIONS, "-O1", f"-I{_compile._HOST}", f"-I{_compile._INCLUDE}")
    command = [*compiler().command, *options, "-S", os.fspath(source), "-o", "-"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"),
    reason="the names of prefetches on this machine are not known",
)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((20, 4096), None), ((2, 4096, 64), -1), ((2, 64, 4096), 1), ((20, 64, 4096), 1)],
    ids=["rows", "channels last", "channels first", "samples"],
)
def test_every_build_of_a_norm_prefetches(shape, axis, loads, tmp_path):
    """GCC may remove a function that only prefetches."""
    x = np.zeros(shape, dtype=np.float32)
    if axis is None:
        cunorm.rms_norm(x)
        cunorm.rms_norm_backward(x, x, rstd=x[:, 0].copy())
    else:
        options = {"num_groups": 4, "activation": "silu", "channel_axis": axis}
        f = cunorm.group_norm_forward(x, **options)
        cunorm.group_norm_backward(x, x, mean=f.mean, rstd=f.rstd, **options)
    assert len(loads) >= 2
    for build in loads:
        assert re.search("prefetcht|prefetchw|prfm", assembly(build, tmp_path)), build


@pytest.mark.parametrize(
    ("text", "size"), [("32768K", 32 << 20), ("480M", 480 << 20), ("?", 32 << 20), (None, 32 << 20)]
)
def test_the_last_cache_is_as_large_as_the_system_says_or_else_32_mib(
    text, size, monkeypatch, tmp_path
):
    if text is not None:
        (tmp_path / "size").write_text(text + "\n")
    monkeypatch.setattr(_caches, "_SIZE", tmp_path / "size")
    assert _caches.last_cache_bytes.__wrapped__() == size


# --- several builds -------------------------------------------------------------------------------


# A compiler that succeeds only if another compiler runs at the same time.
MEETS = """{answers}touch "{folder}/$$"
for i in $(seq 100); do [ $(ls "{folder}" | wc -l) -ge 2 ] && break; sleep 0.1; done
[ $(ls "{folder}" | wc -l) -ge 2 ] || exit 1
{copies}"""


def test_the_builds_of_a_call_are_compiled_at_the_same_time_and_once(tmp_path):
    running = tmp_path / "running"
    running.mkdir()
    text = MEETS.format(answers=ANSWERS, folder=running, copies=copies())
    first, second = (build_of(name) for name in ("float32", "float64"))
    with separate_cache(tmp_path, text) as cache:
        entries = _compile.libraries([first, second, first])
        assert len(libraries(cache)) == len(list(running.iterdir())) == 2
        assert entries == [_compile.loaded.values.get(build) for build in (first, second, first)]
        assert entries[0] != entries[1]


def test_the_error_of_one_of_two_parallel_builds_is_raised(tmp_path):
    fails = (
        'for arg; do case "$arg" in *.cpp) grep -q "COMPUTE_T fp64" "$arg" && exit 1;; esac; done'
    )
    with separate_cache(tmp_path, f"{ANSWERS}{fails}\n{copies()}") as cache:
        with pytest.raises(RuntimeError, match=r"(?s)does not compile row_norm_f.* COMPUTE_T=fp64"):
            _compile.libraries([build_of(name) for name in ("float32", "float64")])
        assert len(libraries(cache)) == 1


def test_a_call_that_waits_for_a_compiler_says_so_once(tmp_path, monkeypatch, caplog):
    slow = f'{ANSWERS}case "$*" in *row_norm*) sleep 0.6;; esac\n{copies()}'
    monkeypatch.setattr(_compile, "is_announced", threading.Event())
    monkeypatch.setattr(_compile, "PATIENCE", 60)
    with separate_cache(tmp_path, slow):
        check()
        assert not caplog.messages, "the compile did not take long"
        cunorm.clear_cache()
        monkeypatch.setattr(_compile, "PATIENCE", 0.1)
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
