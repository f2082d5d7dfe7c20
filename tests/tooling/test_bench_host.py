# SPDX-License-Identifier: MIT
"""`python -m bench --host` times small calls, here and in another checkout."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the bench compares with PyTorch")
import cunorm
from bench.compare import host, host_against, host_calls
from bench.timing import command as timing
from bench.timing.cases import OPERATORS

ROOT = Path(__file__).parents[2]
SLOW = """
import time
from cunorm import l2_norm as _quick
def l2_norm(*arguments, **options):
    time.sleep(1e-4)
    return _quick(*arguments, **options)
"""


def operators(*names):
    return [one for one in OPERATORS if one.name in names]


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Reduce the numbers of calls and processes."""
    monkeypatch.setattr(host_calls, "CALLS", 20)
    for module, name in ((host, "RUNS"), (host_against, "RUNS"), (host_against, "PAIRS")):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(host, "IMPORTS", 1)


@pytest.mark.parametrize("wrong", ["--device cuda", "--shapes 4x64", "--quick", "--calls 1"])
def test_host_refuses_options_that_it_would_ignore(wrong, capsys):
    with pytest.raises(SystemExit):
        timing.parse(["--host", *wrong.split()])
    assert f"--host takes no {wrong.split()[0]}\n" in capsys.readouterr().err
    timing.parse(["--host", "--op", "l2_norm", "--threads", "1"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (f"--against {ROOT}", "--against needs --host"),
        ("--host --against /not/there", "--against: /not/there is no checkout of cunorm"),
    ],
)
def test_against_needs_a_checkout_and_host(wrong, message, capsys):
    with pytest.raises(SystemExit):
        timing.parse(wrong.split())
    assert message in capsys.readouterr().err


def test_bench_prints_the_host_time_of_small_calls():
    timers = host_calls.operator_timers(operators("rms_norm", "group_norm"))
    found = host.figures(host.times(timers, runs=1))
    lines = host.table("on float32", found).splitlines()[3:]
    shapes = [line.split()[-5 if line.startswith("cunorm") else -3] for line in lines]
    assert set(shapes) == {"1x64", "4x64", "1x64x2x2", "4x64x2x2"}
    # For each of two shapes: calls of cunorm (of group norms also with a workspace) and of torch.
    assert len(lines) == 2 * (7 + 2) + 2 * 2 * (9 + 2)
    assert all(float(time) > 0 for line in lines for time in line.split()[-2:])


def test_every_call_on_new_memory_has_another_address_and_on_new_rows_another_shape(monkeypatch):
    outs, shapes = [], []
    plain = cunorm.rms_norm

    def noted(x, out=None, **options):
        outs.append(out)
        shapes.append((type(x), tuple(x.shape)))
        return plain(x, out=out, **options)

    monkeypatch.setattr(cunorm, "rms_norm", noted)
    timers = host_calls.memory_timers()
    for (call, _, kind), timer in timers.items():
        outs.clear()
        shapes.clear()
        assert timer() > 0
        assert timer() > 0
        if "new out=" in call:
            address = (lambda out: out.ctypes.data) if kind == "NumPy" else lambda t: t.data_ptr()
            assert len({address(out) for out in outs}) == len(outs) == 2 * (1 + 20)
        elif "new number" in call:
            assert len(set(shapes)) == len(shapes) == 2 * (1 + 20)
        elif "second call" in call:
            assert 2 * len(set(shapes)) == len(shapes) == 2 * 2 * (1 + 20)
        else:
            assert len(set(shapes)) == 1
            assert len(shapes) == 2 * (1 + 20)
    assert len(timers) == 2 * 5


def test_a_run_prints_and_writes_each_call(tmp_path, capsys):
    out = tmp_path / "host.csv"
    assert timing.main(["--host", "--op", "rms_norm", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for call in {row["call"] for row in rows}:
        assert f"\n{call}" in printed
    assert {row["kind"] for row in rows} >= {"NumPy", "torch", "torch, no_grad", "process"}
    assert all(0 < float(row["minimum_us"]) <= float(row["median_us"]) for row in rows)
    assert re.search(r"\ncunorm.torch.rms_norm, more than empty +4x64( +-?\d+\.\d){6}\n", printed)
    assert re.search(r"\nimport cunorm, after numpy: \d+\.\d ms", printed)


@pytest.mark.exhaustive  # 8 s: two processes import PyTorch and time all calls
def test_another_checkout_is_timed_beside_this_one(tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(ROOT / "cunorm", other / "cunorm", ignore=shutil.ignore_patterns("__py*"))
    (other / "kernels_cu").symlink_to(ROOT / "kernels_cu")
    with (other / "cunorm" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write(SLOW)
    out = tmp_path / "host.csv"
    command = ["--host", "--against", str(other), "--op", "l2_norm", "--out", str(out)]
    assert timing.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    ratios = {
        line[:50].rstrip(): float(line.split()[-1]) for line in lines if " 4x64 NumPy" in line
    }
    assert 4 * ratios["cunorm l2_norm"] < ratios["cunorm l2_norm_forward"]
    assert any(line.startswith("import cunorm, after numpy") for line in lines)
    with out.open(encoding="utf-8") as file:
        assert len({row["commit"] for row in csv.DictReader(file)}) == 2


def test_calls_of_other_checkouts_use_only_public_names():
    for name in ("compare/host_calls", "timing/cases", "timing/peers", "timing/arrays"):
        text = (ROOT / "bench" / f"{name}.py").read_text("utf-8")
        assert not re.search(r"cunorm(\.\w+)*\._|from cunorm[\w.]* import .*\b_", text)
