# SPDX-License-Identifier: MIT
"""The command line, as users run it."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import cunorm
from tests.support.caches import ANSWERS, compiles, posix, script
from tests.support.internals import _command, _demo, _info, _warmup, main
from tests.support.processes import is_running, python

ROOT = Path(__file__).parents[2]


def test_info_reports_versions_devices_compilers_and_caches():
    done = python("-m", "cunorm", "info")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("cunorm", "numpy", "torch", "jax", "model", "threads used", "C++", "CPU builds"):
        assert f"\n  {name} " in done.stdout
    assert np.__version__ in done.stdout


def test_info_finds_no_compiler_where_there_is_none():
    done = python("-m", "cunorm", "info", PATH="", CXX="")
    assert done.returncode == 0
    assert "none found: install g++ or clang++" in done.stdout


def test_info_and_cache_info_make_no_folder(tmp_path):
    temporary, cache, closed = (tmp_path / name for name in ("temporary", "cache", "closed"))
    temporary.mkdir()
    closed.touch()  # a file, not a folder
    look = ("-c", "import cunorm; print(cunorm.cache_info(), cunorm.clear_cache())")
    for folder, arguments in product((cache, closed), (("-m", "cunorm", "info"), look)):
        if (folder, arguments) == (closed, look):
            continue  # cache_info makes a folder for its process
        done = python(*arguments, CUNORM_CACHE_DIR=os.fspath(folder), TMPDIR=os.fspath(temporary))
        assert (done.returncode, done.stderr) == (0, "")
        assert (os.fspath(cache) if folder is cache else "one process only") in done.stdout
        assert {*tmp_path.iterdir()} == {temporary, closed}
        assert not [*temporary.iterdir()]


@compiles
def test_info_shows_that_cxx_does_not_answer():
    done = python("-m", "cunorm", "info", CXX="/nowhere/c++")
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  C++ ")]
    assert line.endswith(" (CXX=/nowhere/c++ does not answer)")
    assert "none found" not in line
    done = python("-m", "cunorm", "info", PATH="", CXX="nothing")
    assert "none found: install g++ or clang++" in done.stdout
    assert " (CXX=nothing does not answer)\n" in done.stdout


def test_an_error_of_a_stream_without_a_descriptor_is_printed(monkeypatch, capsys):
    def full():
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(_info, "report", full)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main(["info"]) == 1
    assert capsys.readouterr().err == "python -m cunorm: [Errno 28] no space\n"


def test_info_shows_faults_of_the_environment():
    done = python("-m", "cunorm", "info", CXX='g++ "')
    assert done.returncode == 0, done.stderr
    assert """CXX is 'g++ "', expected a command of a shell""" in done.stdout


def test_without_a_command_main_lists_commands_with_examples_that_run(monkeypatch, capsys):
    called = []
    report = _warmup.Warmup(1, 1, 0.5)
    monkeypatch.setattr(_command, "warmup", lambda **more: called.append("warmup") or report)
    monkeypatch.setattr(_demo, "run", lambda *args: called.append("demo") or 0)
    monkeypatch.setattr(_info, "report", lambda: called.append("info") or "")
    assert main([]) == 0
    text = capsys.readouterr().out
    commands = text.partition("{")[2].partition("}")[0].split(",")
    examples = text.partition("examples:\n")[2].splitlines()
    for example in examples:
        assert main(example.strip().removeprefix("python -m cunorm ").split()) == 0
    assert sorted(called) == sorted(commands) == ["demo", "info", "warmup"]


def test_main_prints_the_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"cunorm {cunorm.__version__}\n"


@posix
@compiles
@pytest.mark.parametrize(
    ("command", "done_before"),
    [
        ("demo --device cpu", 0),
        ("demo --device cpu", 4),
        ("warmup --op l2_norm --width 8 --dtype float32 --device cpu", 0),
    ],
)
def test_an_interrupt_is_quiet_and_ends_the_compilers(command, done_before, tmp_path):
    children, once, runs = tmp_path / "children", tmp_path / "once", tmp_path / "runs"
    once.touch()
    interrupts = f'rm "{once}" && kill -s INT $PPID'
    compiles = f'echo >> "{runs}"; [ $(wc -l < "{runs}") -le {done_before} ] && exec $real "$@"\n'
    hangs = f'{ANSWERS}{compiles}sleep 60 & echo $! >> "{children}"; {interrupts}; wait'
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    code += "from tests.support.internals import _processes, main; _processes._PATIENCE = 60;"
    code += "sys.exit(main(sys.argv[1:]))"
    cache = os.fspath(tmp_path / "cache")
    start = time.monotonic()
    done = python("-c", code, *command.split(), CXX=script(tmp_path, hangs), CUNORM_CACHE_DIR=cache)
    assert time.monotonic() - start < 30, "a waiting thread delays the end"
    assert done.returncode == 128 + signal.SIGINT
    assert "Traceback" not in done.stderr
    assert "Interrupt" not in done.stderr
    started = [int(line) for line in children.read_text().split()]
    assert started
    assert not [*filter(is_running, started)]


def test_an_interrupt_of_an_import_is_quiet(monkeypatch, capsys):
    class Interrupted:
        @staticmethod
        def find_spec(name, *args):
            if name == "cupy":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    assert main(["demo"]) == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "")


@posix
def test_a_reader_that_wants_no_more_sees_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command, env = [sys.executable, "-m", "cunorm"], {**os.environ, "PYTHONUNBUFFERED": ""}
    options = {"stdout": writing, "stderr": subprocess.PIPE, "cwd": ROOT, "text": True}
    done = subprocess.run(command, **options, env=env, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [[], ["demo", "--device", "cpu"]])
def test_a_full_disk_is_an_error_in_one_line(command):
    with Path("/dev/full").open("w") as full:
        options = {"stdout": full, "stderr": subprocess.PIPE, "cwd": ROOT, "text": True}
        done = subprocess.run([sys.executable, "-m", "cunorm", *command], **options, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"python -m cunorm: .*No space left on device\n", done.stderr)


def test_an_interrupt_of_the_first_imports_is_quiet(tmp_path):
    (tmp_path / "numpy.py").write_text("raise KeyboardInterrupt\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = python("-m", "cunorm", "info", PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")
