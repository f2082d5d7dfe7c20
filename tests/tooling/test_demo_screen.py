# SPDX-License-Identifier: MIT
"""What the demo shows on a terminal, and elsewhere."""

from __future__ import annotations

import io
import re
import sys

import numpy as np
import pytest

from tests.support.internals import _demo, _demo_device, _demo_inputs, main
from tests.support.processes import python

GREEN, RED = "\033[32m", "\033[31m"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """Return a function that runs a quick demo, on streams of some kind, and returns its output."""
    monkeypatch.setattr(_demo_inputs, "LARGEST", {"float32": 1e10})
    monkeypatch.setattr(_demo_device, "REPEATS", 1)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    path = tmp_path / "input.npy"
    np.save(path, np.random.default_rng(0).standard_normal((6, 100), dtype=np.float32))

    def run(out=io.StringIO, err=io.StringIO, expected=0):
        streams = out(), err()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", streams[0])
            patch.setattr(sys, "stderr", streams[1])
            status = main(["demo", "--quick", "--device", "cpu", "--input", str(path)])
        assert status == expected
        return tuple(stream.getvalue() for stream in streams)

    return run


@pytest.mark.parametrize("err", [io.StringIO, Terminal])
def test_a_pipe_gets_the_rows_alone(demo, err):
    out, shown = demo(err=err)
    assert out.count("\nrms_norm ") == 2
    assert not CONTROL.search(out)
    assert err is Terminal or shown == ""


def test_a_terminal_shows_green_rows_above_a_bar_of_what_is_compiled(demo):
    pytest.importorskip("tqdm")
    out, err = demo(Terminal, Terminal)
    assert (
        len(re.findall(rf"^rms_norm .*{re.escape(GREEN)}0\.\d+\x1b\[0m$", out, re.MULTILINE)) == 2
    )
    assert RED not in out
    total = int(re.search(r"\r0/(\d+) builds \|", err)[1])
    assert f"\r3/{total} builds |" in err
    assert f"\r{total}/{total} builds |" in err
    assert " compiling rms_norm" in err
    assert " compiling layer_norm, add_rms_norm" in err
    assert f"\r3/{total} builds |" in err.split(" compiling layer_norm")[0]
    assert "compiling" not in err.rpartition(f"\r{total}/{total} builds |")[2], "rows are timed"
    assert err.endswith("\r"), "nothing is left of the bar"


def test_without_tqdm_a_terminal_shows_what_is_compiled_in_lines(demo, monkeypatch):
    for name in ("tqdm", "tqdm.auto"):
        monkeypatch.setitem(sys.modules, name, None)
    _, err = demo(Terminal, Terminal)
    assert err.startswith("compiling rms_norm\ncompiling layer_norm, ")
    assert not CONTROL.search(err)
    assert "\n\n" not in err


@pytest.mark.parametrize(
    ("out", "environment", "has_colours"),
    [
        (Terminal, {}, True),
        (Terminal, {"NO_COLOR": "1"}, False),
        (Terminal, {"NO_COLOR": ""}, True),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {"FORCE_COLOR": "1"}, True),
        (io.StringIO, {"FORCE_COLOR": ""}, False),
        (Terminal, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colours_are_for_terminals_unless_the_environment_says_otherwise(
    demo, monkeypatch, out, environment, has_colours
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (GREEN in demo(out)[0]) == has_colours
    assert ("\033" in demo(out)[0]) == has_colours


def test_what_is_wrong_is_red(demo, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(_demo.Operator, "errors", lambda *args: (0.5, float("nan")))
    out, _ = demo(expected=1)
    assert re.search(rf"backward .*{re.escape(RED)}nan  WRONG\x1b", out)
    assert re.search(rf"forward .*{re.escape(GREEN)}0.500\x1b", out)
    assert f"{RED}4 of 8 results are further off" in out


def test_a_cxx_that_no_shell_would_take_is_an_error_of_the_options():
    done = python("-m", "cunorm", "demo", "--device", "cpu", CXX='g++ "')
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")
    assert """error: CXX is 'g++ "', expected a command of a shell""" in done.stderr


def test_a_cxx_that_does_not_answer_is_named_beside_the_device(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, np.eye(4, 8, dtype=np.float32))
    options = ("demo", "--quick", "--device", "cpu", "--input", str(path))
    done = python("-m", "cunorm", *options, CXX="/nowhere/c++")
    (line,) = (one for one in done.stdout.splitlines() if one.startswith("device: "))
    assert line.endswith(" (CXX=/nowhere/c++ does not answer)")
    assert (done.returncode, done.stderr) == (0, "")
