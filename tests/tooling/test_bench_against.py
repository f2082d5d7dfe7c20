# SPDX-License-Identifier: MIT
"""Two checkouts of cunorm are timed beside each other, and ratios are judged.

`against` imports two copies that share no module; `host` times small calls in processes.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the bench compares with PyTorch")
import cunorm
from bench.compare import against, copies, host, host_calls
from bench.report.ratios import Ratio
from bench.timing import grid
from bench.timing.cases import OPERATORS

ROOT = Path(__file__).parents[2]
SLOW = """
import time
from cunorm import l2_norm as _quick
def l2_norm(*arguments, **options):
    time.sleep(1e-3)
    return _quick(*arguments, **options)
"""


@pytest.fixture
def checkout(tmp_path):
    """Return another folder with the same sources."""
    folder = tmp_path / "other"
    shutil.copytree(ROOT / "cunorm", folder / "cunorm", ignore=shutil.ignore_patterns("__py*"))
    (folder / "kernels_cu").symlink_to(ROOT / "kernels_cu")
    return folder


def ours_loaded():
    return {name: module for name, module in sys.modules.items() if name.startswith("cunorm")}


def test_another_checkout_has_modules_of_its_own(checkout):
    before, path = ours_loaded(), list(sys.path)
    other = copies.load(checkout)
    assert (ours_loaded(), sys.path) == (before, path)
    pairs = [
        (cunorm, other),
        (cunorm._backends.cpu.compile, other._backends.cpu.compile),
        (cunorm._backends.cpu.threads, other._backends.cpu.threads),
    ]
    for ours, theirs in pairs:
        assert Path(ours.__file__).is_relative_to(ROOT)
        assert Path(theirs.__file__).is_relative_to(checkout)
    for name in ("rms_norm", "layer_norm_backward", "warmup", "set_num_threads"):
        assert Path(getattr(other, name).__globals__["__file__"]).is_relative_to(checkout)
    threads, others = (copy._backends.cpu.threads for copy in (cunorm, other))
    count = threads.thread_count()
    other.set_num_threads(count + 1)
    assert (threads.thread_count(), others.thread_count()) == (count, count + 1)


def test_a_checkout_that_would_share_modules_is_refused(checkout):
    assert list(copies.late_imports(ROOT / "cunorm")) == []
    results = checkout / "cunorm" / "results.py"
    results.write_text(results.read_text() + "def late():\n    from cunorm import rms_norm\n")
    with pytest.raises(ImportError, match=r"results\.py:\d+ imports cunorm in a function"):
        copies.load(checkout)
    with pytest.raises(ImportError, match="is no checkout"):
        copies.load(checkout / "cunorm")


def ratio(value, shape="64x64", dtype="float32"):
    return Ratio("rms_norm", "", "forward", dtype, shape, value)


def test_a_mean_or_a_point_beyond_its_limit_is_a_loss():
    assert against.beyond([ratio(1.2), ratio(0.9)]) == []
    assert against.beyond([ratio(1.04), ratio(1.07)]) == ["LOSS geometric mean 1.055"]
    lost = ["LOSS 1.300 rms_norm forward float32 64x64"]
    assert against.beyond([ratio(1.3), ratio(0.5)]) == lost
    assert against.beyond([])


def test_the_table_has_the_mean_and_the_worst_point_of_each_group():
    found = [ratio(2.0), ratio(0.5, "256x256"), ratio(1.1, "256x256", "bfloat16")]
    lines = [re.sub(" +", " ", line) for line in against.table(found).splitlines()]
    assert lines[1:5] == [
        "rms_norm forward float32 1.000 2.000 at 64x64",
        "rms_norm forward bfloat16 1.100 1.100 at 256x256",
        "small calls 2.000 2.000 at rms_norm forward float32 64x64",
        "all 1.032 2.000 at rms_norm forward float32 64x64",
    ]


@pytest.mark.parametrize(
    ("measured", "counts"), [([1.2], 1.2), ([1.5, 1.1, 1.0], 1.1), ([1.5, 1.0, 1.4], 1.4)]
)
def test_a_point_beyond_the_limit_is_timed_twice_more(measured, counts):
    left = iter(measured)
    point = grid.Point(OPERATORS[0], "forward", "float32", (64, 64))
    (found,) = against.median_ratios([point], lambda point: [ratio(next(left))])
    assert found.value == counts
    assert next(left, None) is None


@pytest.mark.exhaustive
def test_two_copies_are_timed_as_they_are_compiled_for_an_architecture(checkout, tmp_path):
    out = tmp_path / "rows.csv"
    points = ("--op", "rms_norm", "--shapes", "8x64", "--seconds", "0.01", "--out", out)
    command = [sys.executable, "-m", "bench", "against", checkout, "--march", "x86-64-v2", *points]
    environment = {**os.environ, "CUNORM_CXXFLAGS": "-O1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == ("LOSS" in ran.stdout), ran.stdout + ran.stderr  # the time is short
    assert "compiled with -march=x86-64-v2, no AVX-512" in ran.stdout
    assert len(out.read_text().splitlines()) >= 1 + 2 * 2 * 3


def test_an_unknown_architecture_is_named(monkeypatch, capsys):
    monkeypatch.setenv("CUNORM_CXXFLAGS", "")
    assert against.main([str(ROOT), "--march", "abacus"]) == 1
    assert "abacus" in capsys.readouterr().err


# --- the host time of small calls -----------------------------------------------------------------


def test_calls_on_new_memory_have_other_addresses_and_on_new_rows_other_shapes(monkeypatch):
    outs, shapes, plain = [], [], cunorm.rms_norm

    def noted(x, out=None, **options):
        outs.append(out)
        shapes.append(tuple(x.shape))
        return plain(x, out=out, **options)

    monkeypatch.setattr(host_calls, "CALLS", 20)
    monkeypatch.setattr(host_calls, "FEW_CALLS", 20)
    monkeypatch.setattr(cunorm, "rms_norm", noted)
    new_out, new_rows, second_call = host_calls.memory_timers("NumPy", np.asarray).values()
    assert new_out() > 0
    assert new_out() > 0
    assert len({out.ctypes.data for out in outs}) == len(outs) == 2 * (1 + 20)
    for timer, calls in ((new_rows, 1), (second_call, 2)):
        shapes.clear()
        timer()
        timer()
        assert calls * len(set(shapes)) == len(shapes) == 2 * calls * (1 + 20)


@pytest.mark.exhaustive  # 8 s: two processes import PyTorch and time all calls
def test_another_checkout_is_timed_beside_this_one(monkeypatch, capsys, checkout):
    with (checkout / "cunorm" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write(SLOW)
    for name in ("PROCESSES", "RUNS", "IMPORTS"):
        monkeypatch.setattr(host, name, 1)
    assert host.main(["--against", str(checkout), "--op", "l2_norm"]) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if " 4x64 NumPy" in line]
    ratios = {line[:50].rstrip(): float(line.split()[-1]) for line in lines}
    assert 4 * ratios["cunorm l2_norm"] < ratios["cunorm l2_norm_forward"]


def test_the_host_times_of_two_checkouts_are_medians_and_their_ratio():
    key = ("cunorm rms_norm", "4x64", "NumPy")
    this, other = {key: [1.0, 3.0, 2.0]}, {key: [4.0, 9.0, 4.0]}
    assert host.table([this]).splitlines()[-1].split()[-2:] == ["2.0", "1.0"]
    assert host.table([this, other]).splitlines()[-1].split()[-3:] == ["4.0", "2.0", "0.500"]
    seconds = {host.IMPORT: [2000.0]}
    assert host.table([seconds]).splitlines()[-1].split()[-1] == "2.0"  # ms


def test_calls_of_other_checkouts_use_only_public_names():
    providers = [f"timing/providers/{name}" for name in ("__init__", "base", "ours", "autograd")]
    for name in ("compare/host_calls", "timing/cases", "timing/arrays", *providers):
        text = (ROOT / "bench" / f"{name}.py").read_text("utf-8")
        assert not re.search(r"cunorm(\.\w+)*\._|from cunorm[\w.]* import .*\b_", text)
