# SPDX-License-Identifier: MIT
"""The CPU's compiler: its choice, its options, refused options, interrupted compiles."""

from __future__ import annotations

import os
import re
import time
import warnings
from functools import partial

import pytest

import cunorm
from tests.support import described
from tests.support.caches import (
    ANSWERS,
    check,
    compiles,
    copies,
    fresh_process,
    libraries,
    posix,
    separate_cache,
)
from tests.support.internals import (
    FLOAT32,
    ForwardTypes,
    RowShape,
    _compile,
    compiler,
    cpu_forward,
)

pytestmark = [posix, compiles]

# --- choice and options ---------------------------------------------------------------------------


def test_arguments_of_cxx_come_before_those_of_cunorm_and_cxxflags_after(tmp_path):
    log = tmp_path / "log"
    text = f'echo "$@" >> "{log}"\n{copies()}'
    with separate_cache(tmp_path, text, CXX=" -DMINE", CUNORM_CXXFLAGS="-O0 -DALSO"):
        check()
    (compiled,) = [line for line in log.read_text().splitlines() if "--version" not in line]
    assert re.match(r"-DMINE .*-O3 .*-ffp-contract=off .*-w .*-O0 -DALSO ", compiled)
    for dangerous in ("fast", "unsafe", "associative", "finite-math"):
        assert dangerous not in compiled, "arithmetic is strict"


@pytest.mark.parametrize("cxx", ["/nowhere/c++ -O1", "false"])
def test_a_cxx_that_does_not_answer_is_skipped_with_one_warning(cxx):
    with fresh_process(CXX=cxx), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        check()
        check()
        found = compiler().command[0]
    (warning,) = seen
    assert str(warning.message) == f"CXX={cxx} does not answer: cunorm compiles with {found}"
    assert warning.category is RuntimeWarning
    assert found != cxx.split()[0]


def test_where_warnings_are_errors_only_the_first_call_fails_for_a_cxx_that_does_not_answer():
    with fresh_process(CXX="false"):  # filterwarnings makes warnings errors
        with pytest.raises(RuntimeWarning, match="does not answer"):
            check()
        check()


def test_an_empty_cxx_counts_as_unset():
    with fresh_process(CXX=""):
        assert compiler() is not None


@pytest.mark.parametrize("what", ["options", "compiler", "processor", "headers", "source"])
def test_the_name_of_a_build_depends_on_all_that_made_it(monkeypatch, what):
    build = cpu_forward(ForwardTypes(FLOAT32, x=FLOAT32, y=FLOAT32), RowShape(8, 8)).build
    monkeypatch.setattr(_compile, "_compile", lambda *arguments: None)
    before = _compile._compiled(build)
    assert _compile._compiled(build) == before
    patch = {
        "options": ("_OPTIONS", (*_compile._OPTIONS, "-g")),
        "compiler": ("compiler", partial(compiler()._replace, version="another")),
        "processor": ("cpu_identity", lambda: "another"),
        "headers": ("_stand_ins", lambda: "another"),
        "source": ("source_text", lambda *arguments: "another"),
    }[what]
    monkeypatch.setattr(_compile, *patch)
    assert _compile._compiled(build) != before


def test_a_compile_that_fails_is_an_error_with_first_lines_then_command_and_build(tmp_path):
    lines = "".join(f'echo "norm.cpp:{n}: error: number {n}" >&2\n' for n in range(1, 30))
    with separate_cache(tmp_path, f"{ANSWERS}{lines}exit 1") as cache:
        with pytest.raises(RuntimeError) as caught:
            check()
        assert not list(cache.iterdir()), "nothing is left of a build that failed"
    headline, *errors, command, build = str(caught.value).splitlines()
    assert headline == "the C++ compiler does not compile row_norm_forward:"
    assert build.startswith("  the build: row_norm_forward COMPUTE_T=fp32 X_T=fp32 ")
    assert command.startswith(f"  its command: {tmp_path / 'compiler'} ")
    assert "-ffp-contract=off" in command
    assert errors[:3] == [f"  norm.cpp:{n}: error: number {n}" for n in (1, 2, 3)]
    assert len(errors) < 20


# --- compilers that fail with an option, or once --------------------------------------------------

WITH_OPENMP = 'case "$*" in *-fopenmp*) if [ -e "$flag" ]; then {}; fi;; esac\n'
NOTES = 'case "$*" in *-fopenmp*row_norm_forward.cpp*) touch "$openmp";; esac\n'
FAULTS = {
    "is killed": 'echo half > "$last"; rm "$flag"; kill -9 $$',
    "finds the disk full": 'echo half > "$last"; echo "no space left on device" >&2; exit 1',
    "may not write so much": "ulimit -f 64",
    "refuses OpenMP": 'echo "error: unrecognized option" >&2; exit 1',
}


@pytest.fixture
def faulty(tmp_path, request):
    """Use a faulty compiler; faults of FAULTS occur only with OpenMP while a flag file exists."""
    flag, openmp = tmp_path / "flag", tmp_path / "openmp"  # compiles with OpenMP create `openmp`
    flag.touch()
    fault = WITH_OPENMP.format(FAULTS[request.param]) if request.param in FAULTS else request.param
    text = f'{ANSWERS}flag="{flag}" openmp="{openmp}"\n{fault}{NOTES}{copies()}'
    with separate_cache(tmp_path, text) as cache:
        yield flag, openmp, cache


@pytest.mark.parametrize("faulty", list(FAULTS)[:3], indirect=True)
def test_a_compiler_that_is_stopped_is_an_error_and_leaves_nothing_behind(faulty):
    flag, openmp, cache = faulty
    with pytest.raises(RuntimeError, match=r"killed by signal|no space"):
        check()
    assert not list(cache.iterdir())
    flag.unlink(missing_ok=True)
    check()
    assert len(list(cache.iterdir())) == 1
    assert openmp.exists()


@pytest.mark.parametrize("faulty", ["refuses OpenMP"], indirect=True)
def test_a_compiler_that_refused_an_option_is_tried_again_a_day_later(faulty):
    flag, openmp, cache = faulty
    options = {"device": "cpu", "progress": False, "workers": 2}
    cunorm.warmup("l2_norm", 4, ["float32", "float64"], **options)  # both without OpenMP
    serial, (refused,) = libraries(cache), cache.glob("*.txt")
    assert len(serial) == 2
    assert not openmp.exists()
    flag.unlink()
    for day in range(2):
        described.clear_all()
        check()
        assert len(libraries(cache)) == 2 + day
        assert openmp.exists() == bool(day)
        os.utime(refused, (time.time() - 25 * 60 * 60,) * 2)


REFUSES = 'case "$*" in *{}*) exit 1;; esac\n'


@pytest.mark.parametrize(
    "faulty",
    [
        REFUSES.format("-fschedule-insns"),
        REFUSES.format("-fschedule-insns*row_norm_forward.cpp"),
        REFUSES.format("-march=native"),
    ],
    ids=["scheduling", "scheduling of one source", "this machine"],
    indirect=True,
)
def test_a_compiler_that_refuses_an_option_for_speed_still_uses_openmp(faulty):
    _, openmp, cache = faulty
    check()
    assert len(libraries(cache)) == 1
    assert openmp.exists()
