# SPDX-License-Identifier: MIT
"""`python -m bench busy` times calls while other processes are busy, and ends the processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the bench compares with PyTorch")
from bench.compare import busy
from bench.timing.turns import Turn

ROOT = Path(__file__).parents[2]


def test_processes_are_busy_until_the_end(monkeypatch):
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, command):
            super().__init__(command)
            started.append(self)

    monkeypatch.setattr(busy.subprocess, "Popen", Noted)
    before = os.times()
    with pytest.raises(KeyboardInterrupt), busy.busy(2):
        time.sleep(0.2)
        assert [process.poll() for process in started] == [None, None]
        raise KeyboardInterrupt
    assert None not in [process.returncode for process in started]
    assert os.times().children_user > before.children_user


def test_medians_are_of_equally_many_calls_of_each_provider():
    left = {"cunorm": [1.0, 9.0, 2.0], "torch": [3.0, 3.0, 4.0]}
    turns = {name: Turn(times.copy().pop) for name, times in left.items()}
    assert busy.medians(turns, 3) == {"cunorm": 2.0, "torch": 3.0}


BUSY = """
import sys
from bench.compare import busy
busy.OPERATORS, busy.SHAPES = ("rms_norm",), ((8, 64),)
options = ["--processes", "1", "--calls", "3", "--threads", "1", "--dtype", "float32"]
print([busy.main([*options, "--most", most]) for most in ("1e9", "1e-9")])
"""


@pytest.mark.exhaustive
def test_the_largest_ratio_decides():
    command = [sys.executable, "-c", BUSY]
    environment = {**os.environ, "CUNORM_CXXFLAGS": "-O1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("rms_norm backward float32 8x64") == 2
    assert ran.stdout.endswith("[0, 1]\n")
