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
from tests.support.processes import ROOT, is_running, python

VERSIONS = ("cunorm", "numpy", "torch", "jax", "model", "threads used", "C++", "CPU builds")
NO_COMPILER = "none found: install g++ or clang++"


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, (np.__version__, *(f"\n  {name} " for name in VERSIONS))),
        ({"PATH": "", "CXX": ""}, (NO_COMPILER,)),
        ({"PATH": "", "CXX": "nothing"}, (NO_COMPILER, " (CXX=nothing does not answer)\n")),
        pytest.param(
            {"CXX": "/nowhere/c++"}, (" (CXX=/nowhere/c++ does not answer)\n",), marks=compiles
        ),
        ({"CXX": 'g++ "'}, ("""CXX is 'g++ "', expected a command of a shell""",)),
    ],
)
def test_info_shows_versions_devices_compilers_caches_and_faults(environment, shown):
    done = python("-m", "cunorm", "info", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert [text for text in shown if text not in done.stdout] == []
    assert (NO_COMPILER in done.stdout) == (environment.get("PATH") == "")


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


def test_an_error_of_a_stream_without_a_descriptor_is_printed(monkeypatch, capsys):
    def full():
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(_info, "report", full)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main(["info"]) == 1
    assert capsys.readouterr().err == "python -m cunorm: [Errno 28] no space\n"


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
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
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


@posix
def test_a_reader_that_wants_no_more_sees_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = into(writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["", "demo --device cpu"])
def test_a_full_disk_is_an_error_in_one_line(command):
    with Path("/dev/full").open("w") as full:
        done = into(full, *command.split())
    assert done.returncode == 1
    assert re.fullmatch(r"python -m cunorm: .*No space left on device\n", done.stderr)


def into(stdout, *arguments):
    """Run the command line with another standard output."""
    command, env = (
        [sys.executable, "-m", "cunorm", *arguments],
        {**os.environ, "PYTHONUNBUFFERED": ""},
    )
    options = {"stdout": stdout, "stderr": subprocess.PIPE, "cwd": ROOT, "text": True, "env": env}
    return subprocess.run(command, **options, check=False)


def test_an_interrupt_of_the_first_imports_is_quiet(tmp_path):
    (tmp_path / "numpy.py").write_text("raise KeyboardInterrupt\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = python("-m", "cunorm", "info", PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")
