# SPDX-License-Identifier: MIT
"""`python -m bench` runs, checks before it times, and says what it was asked for."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the bench compares with PyTorch")

ROOT = Path(__file__).parent.parent
SMALL = ("--shapes", "64x64", "--seconds", "0.01", "--threads", "1")


def bench(*options):
    command = [sys.executable, "-m", "bench", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_bench_prints_every_point_and_writes_it(tmp_path):
    table = tmp_path / "table.csv"
    ran = bench(*SMALL, "--op", "rms_norm,add_layer_norm", "--dtype", "float32", "--out", table)
    assert ran.returncode == 0, ran.stderr
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    points = {(row["operator"], row["direction"]) for row in rows}
    operators, directions = ("rms_norm", "add_layer_norm"), ("forward", "backward")
    assert points == {(operator, way) for operator in operators for way in directions}
    assert all(float(row["cunorm_ms"]) > 0 < float(row["copy_ms"]) for row in rows)
    assert ran.stdout.count("geometric mean") == 6  # of each operator, and of both


def test_geometric_means_are_those_of_the_points_named():
    from bench import cpu
    from bench.cases import OPERATORS

    times = {"rms_norm": (1.0, 8.0, 4.0), "layer_norm": (2.0, 4.0, 1.0)}
    results = [
        cpu.Result(cpu.Point(operator, "backward", "float32", 1, 1), *times[operator.name])
        for operator in OPERATORS[:2]
    ]
    assert [line.split() for line in cpu.table(results, 1).splitlines()[-3:]] == [
        f"{name} backward float32 geometric mean × torch {means}".split()
        for name, means in (
            ("rms_norm", "8.00, worst 8.00, / copy 0.25"),
            ("layer_norm", "2.00, worst 2.00, / copy 2.00"),
            ("all", "4.00, worst 2.00, / copy 0.71"),
        )
    ]


def test_the_copy_moves_as_many_bytes():
    import torch

    from bench import cpu

    for dtype in (torch.float32, torch.bfloat16):
        assert 2 * cpu.copying(1200, dtype)().nbytes == 1200


@pytest.mark.parametrize(
    ("option", "value"), [("--op", "group"), ("--dtype", "int8"), ("--shapes", "64")]
)
def test_bench_names_what_it_does_not_know(option, value):
    ran = bench(*SMALL, option, value)
    assert ran.returncode == 2
    assert option in ran.stderr
    assert value in ran.stderr


def test_bench_does_not_time_a_wrong_result(monkeypatch):
    from bench import cases, cpu

    monkeypatch.setitem(cases.TOLERANCE, "float32", 0.0)
    point = cpu.Point(cases.OPERATORS[0], "forward", "float32", 64, 64)
    with pytest.raises(RuntimeError, match="nothing is timed"):
        cpu.measure(point, seconds=0.01)
