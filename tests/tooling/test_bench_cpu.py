# SPDX-License-Identifier: MIT
"""`python -m bench` runs, checks before it times, and says what it was asked for."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from bench import cases, grid, providers, timing
from bench.cases import DTYPES, OPERATORS
from bench.rows import read_csv

pytest.importorskip("torch", reason="the bench compares with PyTorch")

ROOT = Path(__file__).parents[2]
SMALL = ("--seconds", "0.01", "--threads", "1")


def bench(*options):
    command = [sys.executable, "-m", "bench", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_bench_prints_every_point_and_writes_every_provider(tmp_path):
    out = tmp_path / "table.csv"
    options = ("--shapes", "64x64,2x64x5x3", "--op", "rms_norm+post_gate,group_norm+silu")
    ran = bench(*SMALL, *options, "--dtype", "float32", "--out", out)
    assert ran.returncode == 0, ran.stderr
    rows = read_csv(out)
    named = ["copy", "cunorm", "torch"]
    points = {row.point: [] for row in rows}
    for row in rows:
        points[row.point].append(row.provider)
    assert points == {
        ("rms_norm+post_gate", "", "forward", "float32", "64x64"): [*named, "cunorm-ungated"],
        ("rms_norm+post_gate", "", "backward", "float32", "64x64"): [*named, "cunorm-ungated"],
        ("group_norm+silu", "NHWC", "forward", "float32", "2x64x5x3"): named,
        ("group_norm+silu", "NHWC", "backward", "float32", "2x64x5x3"): named,
        ("group_norm+silu", "NCHW", "forward", "float32", "2x64x5x3"): named,
        ("group_norm+silu", "NCHW", "backward", "float32", "2x64x5x3"): named,
    }
    assert all(row.host_us == row.p50_us > 0 for row in rows)  # small points are all host
    assert all((row.error is None) == (row.provider == "copy") for row in rows)
    assert {(row.threads, row.driver) for row in rows} == {(1, "")}
    assert all("1 of " in row.device and "torch" in row.versions for row in rows)
    assert "freed memory is kept" in ran.stdout
    for what in ("rms_norm+post_gate", "all gated", "group_norm+silu NHWC", "group_norm+silu both"):
        assert re.search(rf"^{re.escape(what)} forward float32 +of copy", ran.stdout, re.MULTILINE)


def test_the_cpu_grid_is_the_one_of_the_goals():
    points = list(grid.default_points("cpu", grid.DEFAULT_OPERATORS))
    assert len(points) == (7 * 10 + 2 * 5) * 2 * 2  # operators, shapes; directions and dtypes
    sizes = {dtype: [] for dtype in ("float32", "bfloat16")}
    for point in points:
        sizes[point.dtype].append(point.elements * DTYPES[point.dtype].itemsize / 2**20)
    assert (min(sizes["float32"]), max(sizes["float32"])) == (1, 64)
    assert (min(sizes["bfloat16"]), max(sizes["bfloat16"])) == (0.5, 32)
    small = {point.shape for point in points if point.shape[-1] == 256}
    assert small == {(1024, 256), (2048, 256), (65536, 256)}
    quick = list(grid.default_points("cpu", grid.QUICK_OPERATORS, quick=True))
    assert {point.shape for point in quick} == {(4096, 4096), (3000, 1003), (2, 320, 64, 64)}


def test_what_is_asked_for_fills_in_the_rest():
    assert timing.parse([]).providers == ["cunorm", "torch", "cunorm-ungated"]
    assert timing.parse(["--providers", "jax,cunorm"]).providers == [
        "jax",
        "cunorm",
        "cunorm-ungated",
    ]
    assert timing.parse(["--shapes", "1x32x2x2"]).op == ["group_norm+silu"]
    assert timing.parse(["--quick"]).seconds < timing.parse([]).seconds
    assert timing.parse(["--device", "cuda"]).providers == list(providers.LOADERS["cuda"])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--op", "group"),
        ("--dtype", "int8"),
        ("--shapes", "64"),
        ("--shapes", "0x64"),
        ("--shapes", "4x-3"),
        ("--threads", "0"),
        ("--threads", "two"),
        ("--calls", "0"),
        ("--seconds", "-1"),
        ("--seconds", "nan"),
        ("--seconds-total", "0"),
        ("--op", "group_norm"),
        ("--providers", "liger"),
    ],
)
def test_bench_names_what_it_does_not_know(option, value, capsys):
    with pytest.raises(SystemExit):
        timing.parse(["--shapes", "64x64", option, value])
    said = capsys.readouterr().err
    assert option in said
    assert value in said


@pytest.mark.parametrize(
    "options",
    [
        ("--device", "cuda"),
        ("--dtype", "float32"),
        ("--direction", "forward"),
        ("--shapes", "4x64"),
        ("--providers", "torch"),
        ("--quick",),
        ("--seconds", "1"),
        ("--seconds-total", "1"),
        ("--calls", "1"),
    ],
)
def test_host_refuses_what_it_would_ignore(options, capsys):
    with pytest.raises(SystemExit):
        timing.parse(["--host", *options])
    assert f"--host takes no {options[0]}\n" in capsys.readouterr().err
    timing.parse(["--host", "--op", "l2_norm", "--threads", "1"])


def test_a_csv_in_no_folder_is_refused_before_anything_is_timed(tmp_path, capsys):
    missing = tmp_path / "not" / "there.csv"
    with pytest.raises(SystemExit):
        timing.parse(["--out", str(missing)])
    assert str(missing.parent) in capsys.readouterr().err


def test_bench_prints_what_small_calls_cost_the_host(monkeypatch):
    from bench import host

    monkeypatch.setattr(host, "CALLS", 20)
    operators = [
        operator for operator in OPERATORS if operator.name in ("rms_norm", "add_rms_norm")
    ]
    operators += [operator for operator in OPERATORS if operator.name == "group_norm"]
    lines = host.table(host.times(operators, runs=1)).splitlines()[3:]
    shapes = [line.split()[-5 if line.startswith("cunorm") else -3] for line in lines]
    assert set(shapes) == {"1x64", "4x64", "1x64x2x2", "4x64x2x2"}
    # Operators, shapes, calls of cunorm's, those of group norms with a workspace too, and torch's.
    assert len(lines) == 2 * 2 * (7 + 2) + 2 * 2 * (9 + 2)
    assert all(float(time) > 0 for line in lines for time in line.split()[-2:])
    assert sum("_backward, out=, workspace=" in line for line in lines) == 8


def test_all_that_is_called_is_compiled_ahead():
    code = """
        import cunorm
        from bench import cpu, engine, grid, machine, providers

        names = ["add_layer_norm", "rms_norm+pre_gate", "l2_norm", "normalize"]
        shapes = [(70, 96), (1, 64, 300, 240)]
        points = list(grid.points(shapes, [*names, "group_norm+silu"], dtypes=["bfloat16"]))
        device = cpu.Cpu(threads=2)
        device.prepare(points)
        loaded = cunorm.cache_info().loaded
        found, _ = providers.load("cpu", ["cunorm", "cunorm-ungated"])
        for point in points:
            rows, failures = engine.time_point(device, point, found, machine.facts(device), 0.01)
            assert not failures and len(rows) >= 2
        print(loaded, cunorm.cache_info().loaded)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    before, after = ran.stdout.split()
    assert int(before) == int(after) >= 2 * 5


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_a_provider_that_leaves_out_a_term_of_the_formula_is_wrong_by_more_than_the_tolerance(name):
    operator = next(one for one in cases.OPERATORS if one.name == name)
    host = cases.host_operands(operator, "bfloat16", (2, 1 << 18))
    y = cases.oracle(operator, "forward", host)["y"]
    dx = cases.oracle(operator, "backward", host)["dx"]
    x, dy, weight = (host[key].astype(np.float64) for key in ("x", "dy", "weight"))
    bias = host["bias"].astype(np.float64) if operator.center else 0.0
    of_squares = np.sqrt((x * x).mean(-1, keepdims=True))
    divisor = x.std(-1, keepdims=True) if operator.center else of_squares
    wrong = {"no norm": x * weight + bias, "no mean": x / of_squares * weight + bias}
    if not operator.center:
        del wrong["no mean"]
    for result in wrong.values():
        assert cases.worst_error({"y": result}, {"y": y}) > cases.TOLERANCE["bfloat16"]
    no_means = {"dx": dy * weight / divisor}
    assert cases.worst_error(no_means, {"dx": dx}) > cases.TOLERANCE["bfloat16"]
