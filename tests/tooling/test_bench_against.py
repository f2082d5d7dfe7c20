# SPDX-License-Identifier: MIT
"""Two checkouts of cunorm are imported as copies that share no module, and ratios are judged."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the bench compares with PyTorch")
import cunorm
from bench.compare import against, copies
from bench.report.ratios import Ratio
from bench.timing import grid
from bench.timing.cases import OPERATORS

ROOT = Path(__file__).parents[2]


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
