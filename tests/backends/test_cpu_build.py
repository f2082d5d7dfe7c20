# SPDX-License-Identifier: MIT
"""The CPU build's compiler and its cache: chosen, refused, shared by processes, kept private."""

import os
import re
import stat
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cunorm import _cpu
from cunorm._cpu import _compile
from tests.support.processes import ROOT, in_process, interpreter

posix = pytest.mark.skipif(os.name != "posix", reason="runs shell scripts as compilers")
pytestmark = pytest.mark.skipif(_cpu.compiler() is None, reason="needs a C++ compiler")


def script(folder: Path, text: str) -> str:
    """Make a command of a few lines of shell; $real is the compiler that is used otherwise."""
    command = folder / "compiler"
    real = " ".join(_cpu.compiler().command)
    command.write_text(f'#!/bin/sh\nreal="{real}"\n{text}\n')
    command.chmod(0o755)
    return os.fspath(command)


ANSWERS = 'case "$*" in *--version*) exec $real --version;; esac\n'


# --- the compiler ---------------------------------------------------------------------------------


@posix
def test_a_compile_that_fails_is_an_error_with_command_first_lines_and_build(tmp_path):
    lines = "".join(f'echo "norm.cpp:{n}: error: number {n}" >&2\n' for n in range(1, 30))
    compiler = script(tmp_path, f"{ANSWERS}{lines}exit 1")
    printed = in_process(
        "try:\n    check(0, False)\nexcept RuntimeError as error:\n    print(error)\n",
        CXX=compiler,
        CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"),
    )
    headline, command, *errors = printed.splitlines()
    assert re.match(
        r"the C\+\+ compiler does not compile row_norm_forward COMPUTE_T=fp32 ", headline
    )
    assert command.split()[0] == compiler
    assert "-ffp-contract=off" in command
    assert errors[:3] == [f"  norm.cpp:{n}: error: number {n}" for n in (1, 2, 3)]
    assert len(errors) < 20
    assert not list((tmp_path / "cache").iterdir()), "nothing is left of a build that failed"


@posix
def test_a_compiler_without_openmp_serves_with_one_thread(tmp_path):
    refuse = 'case "$*" in *-fopenmp*) echo "error: no -fopenmp here" >&2; exit 1;; esac\n'
    in_process(
        "before = tasks() if sys.platform == 'linux' else 0\n"
        "check(0, False)\n"
        "assert sys.platform != 'linux' or tasks() == before\n",
        CXX=script(tmp_path, f'{ANSWERS}{refuse}exec $real "$@"'),
        CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"),
        OMP_NUM_THREADS="2",
    )


@posix
def test_a_compiler_that_does_not_schedule_before_registers_serves_with_openmp(tmp_path):
    log, refuse = tmp_path / "log", 'case "$*" in *-fschedule-insns*) exit 1;; esac\n'
    compiler = script(tmp_path, f'{ANSWERS}{refuse}echo "$@" >> "{log}"\nexec $real "$@"')
    in_process("check(0, False)", CXX=compiler, CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"))
    probes = [line for line in log.read_text().splitlines() if "probe.cpp" in line]
    (compiled,) = set(log.read_text().splitlines()) - set(probes)
    assert "-fopenmp" in compiled


@posix
def test_cxx_is_the_compiler_that_is_used_with_its_own_arguments(tmp_path):
    log = tmp_path / "log"
    compiler = script(tmp_path, f'echo "$@" >> "{log}"\nexec $real "${{@#--mine}}"')
    in_process(
        "check(0, False)", CXX=f"{compiler} -DMINE", CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache")
    )
    compiled = [line for line in log.read_text().splitlines() if "--version" not in line]
    assert len(compiled) == 1
    assert compiled[0].startswith("-DMINE ")


@posix
@pytest.mark.parametrize("cxx", ["/nowhere/c++", "false", ""])
def test_a_cxx_that_does_not_answer_gives_way_to_the_next(cxx):
    in_process(f"assert cunorm._cpu.compiler().command != ({cxx!r},)\ncheck(0, False)", CXX=cxx)


def test_options_keep_arithmetic_strict():
    options = " ".join(_compile._OPTIONS)
    assert "-ffp-contract=off" in options
    for dangerous in ("fast", "unsafe", "associative", "finite-math", "Ofast"):
        assert dangerous not in options


# --- the cache ------------------------------------------------------------------------------------


def builds(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_processes_that_compile_the_same_builds_at_once_share_them(tmp_path):
    environment = {**os.environ, "CUNORM_CACHE_DIR": os.fspath(tmp_path)}
    processes = [
        subprocess.Popen(interpreter(f"check({seed}, False)"), env=environment, cwd=ROOT)
        for seed in range(3)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    (name,) = builds(tmp_path)
    assert name.startswith("row_norm_forward-")


def test_a_second_process_compiles_nothing(tmp_path):
    environment = {"CUNORM_CACHE_DIR": os.fspath(tmp_path)}
    in_process("check(0, False)", **environment)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    in_process("cunorm._cpu._compile._compile = None\ncheck(1, False)", **environment)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@posix
def test_threads_that_need_the_same_build_at_once_compile_it_once(tmp_path):
    log = tmp_path / "log"
    compiler = script(tmp_path, f'echo "$@" >> "{log}"\nexec $real "$@"')
    in_process(
        "threads = [threading.Thread(target=check, args=(n, False)) for n in range(4)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "check(4, False)\n",
        CXX=compiler,
        CUNORM_CACHE_DIR=os.fspath(tmp_path / "cache"),
    )
    assert len([line for line in log.read_text().splitlines() if "--version" not in line]) == 1


@posix
def test_the_cache_is_a_folder_of_the_user_alone(tmp_path):
    cache = tmp_path / "a" / "b"
    in_process("check(0, False)", CUNORM_CACHE_DIR=os.fspath(cache))
    assert len(builds(cache)) == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@posix
@pytest.mark.parametrize("how", ["others may write", "it is a file", "it cannot be made"])
def test_a_cache_that_is_not_private_is_not_used(tmp_path, how):
    cache = tmp_path / "cache"
    if how == "others may write":
        cache.mkdir()
        cache.chmod(0o777)
    else:
        cache.touch()
        cache = cache if how == "it is a file" else cache / "below"
    in_process("check(0, False)", CUNORM_CACHE_DIR=os.fspath(cache), TMPDIR=os.fspath(tmp_path))
    assert how != "others may write" or not builds(cache)


@pytest.mark.parametrize("what", ["options", "compiler", "processor", "headers", "source"])
def test_the_name_of_a_build_depends_on_all_that_made_it(monkeypatch, what):
    from cunorm._builds import ForwardTypes
    from cunorm._dtypes import FLOAT32
    from cunorm._plan import Walk, cpu_forward

    build = cpu_forward(ForwardTypes(FLOAT32, x=FLOAT32, y=FLOAT32), Walk(8, 8)).build
    monkeypatch.setattr(_compile, "_compile", lambda *arguments: None)
    before = _compile._compiled(build)
    assert _compile._compiled(build) == before
    patch = {
        "options": ("_OPTIONS", (*_compile._OPTIONS, "-g")),
        "compiler": ("compiler", lambda: _cpu.compiler()._replace(version="another")),
        "processor": ("_cpu_identity", lambda: "another"),
        "headers": ("_stand_ins", lambda: "another"),
        "source": ("source_text", lambda *arguments: "another"),
    }[what]
    monkeypatch.setattr(_compile, *patch)
    assert _compile._compiled(build) != before


def test_options_of_the_environment_come_after_ours(tmp_path):
    environment = {"CUNORM_CACHE_DIR": os.fspath(tmp_path), "CUNORM_CXXFLAGS": "-O1 -Dfma=nowhere"}
    with pytest.raises(AssertionError, match=r"-O3 .* -w .*-O1 -Dfma=nowhere"):
        in_process("check(0, False)", **environment)


def test_numbers_do_not_depend_on_whether_the_build_came_from_the_cache(tmp_path):
    show = "x = np.arange(40, dtype=np.float32).reshape(4, 10)\nprint(cunorm.rms_norm(x).tobytes())"
    environment = {"CUNORM_CACHE_DIR": os.fspath(tmp_path)}
    first, second = (in_process(show, **environment) for _ in range(2))
    assert first == second
    assert len(first) > 4 * np.dtype(np.float32).itemsize
