# SPDX-License-Identifier: MIT
"""`python -m bench` runs, checks before it times, and says what it was asked for."""

import csv
import re
import subprocess
import sys
import textwrap
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
    assert {row["ungated_ms"] for row in rows} == {""}
    assert ran.stdout.count("geometric mean") == 6  # of each operator, and of both


def test_bench_times_gated_norms_beside_the_ungated(tmp_path):
    table = tmp_path / "table.csv"
    names = ["rms_norm", "layer_norm", "rms_norm+post_gate", "rms_norm+pre_gate"]
    ran = bench(*SMALL, "--dtype", "bfloat16", "--direction", "forward", "--out", table)
    assert ran.returncode == 0, ran.stderr
    with table.open(newline="") as file:
        rows = {row["operator"]: row for row in csv.DictReader(file)}
    assert [*rows] == names
    assert [float(row["ungated_ms"] or 0) > 0 for row in rows.values()] == [False] * 2 + [True] * 2
    assert ran.stdout.count("/ ungated") == 2 + 3  # the heading, each operator, and both
    assert "all gated forward bfloat16" in ran.stdout


def test_bench_times_group_norms_in_both_memory_orders(tmp_path):
    table = tmp_path / "table.csv"
    shapes = ("--shapes", "64x64,2x64x5x3,1x32x2x2")  # the first is no group norm's
    ran = bench(*SMALL, *shapes, "--op", "group_norm+silu,rms_norm", "--out", table)
    assert ran.returncode == 0, ran.stderr
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["operator"] == "group_norm+silu"]
    found = [(row["memory"], row["direction"], row["dtype"], row["shape"]) for row in rows]
    assert found == [
        (memory, direction, dtype, shape)
        for memory in ("NHWC", "NCHW")
        for direction in ("forward", "backward")
        for dtype in ("float32", "bfloat16")
        for shape in ("2x64x5x3", "1x32x2x2")
    ]
    assert all(float(row["cunorm_ms"]) > 0 < float(row["torch_ms"]) for row in rows)
    # Of each order and of both, each direction and dtype; and of rows, which are all.
    assert len(re.findall("group_norm.silu (NHWC|NCHW|both).*geometric mean", ran.stdout)) == 3 * 4
    assert ran.stdout.count("geometric mean") == 3 * 4 + 2 * 4


def test_shapes_choose_among_the_operators_of_the_default():
    ran = bench(*SMALL, "--shapes", "1x32x2x2", "--dtype", "float32", "--direction", "forward")
    assert ran.returncode == 0, ran.stderr
    points = [line.split()[:2] for line in ran.stdout.splitlines() if "1x32x2x2" in line]
    assert points == [["group_norm+silu", "NHWC"], ["group_norm+silu", "NCHW"]]


def test_bench_prints_what_small_calls_cost_the_host(monkeypatch):
    from bench import host
    from bench.cases import OPERATORS

    monkeypatch.setattr(host, "CALLS", 20)
    operators = [
        operator for operator in OPERATORS if operator.name in ("rms_norm", "add_rms_norm")
    ]
    operators += [operator for operator in OPERATORS if operator.name == "group_norm"]
    lines = host.table(operators, runs=1).splitlines()[3:]
    shapes = [line.split()[-5 if line.startswith("cunorm") else -3] for line in lines]
    assert set(shapes) == {"1x64", "4x64", "1x64x2x2", "4x64x2x2"}
    # Operators, shapes, calls of cunorm's, those of group norms with a workspace too, and torch's.
    assert len(lines) == 2 * 2 * (7 + 2) + 2 * 2 * (9 + 2)
    assert all(float(time) > 0 for line in lines for time in line.split()[-2:])
    assert sum("_backward, out=, workspace=" in line for line in lines) == 8


def test_bench_prints_what_autograd_costs_a_small_call(monkeypatch):
    from bench import host

    monkeypatch.setattr(host, "CALLS", 20)
    *_, empty, ours, torchs, more = host.autograd_table(runs=1).splitlines()
    assert (empty[:5], ours[:6], torchs[:5], more[:6]) == ("an em", "cunorm", "torch", "cunorm")
    assert len(torchs.split()) == 2 + 6
    of_ours, of_empty, differences = (
        [float(time) for time in line.split()[-6:]] for line in (ours, empty, more)
    )
    for cost, other, difference in zip(of_ours, of_empty, differences, strict=True):
        assert cost > 0 < other
        assert abs(difference - (cost - other)) < 0.16  # each is rounded to a tenth


def test_norms_that_are_timed_under_autograd_are_recorded_and_equal():
    import torch

    from bench import cases, host

    empty, *norms = (call(*leaves) for call, leaves in host._contestants().values())
    assert all(y.requires_grad and y.shape == (4, 64) for y in (empty, *norms))
    ours, theirs = norms
    torch.testing.assert_close(ours, theirs, rtol=cases.TOLERANCE["float32"], atol=0)
    with torch.no_grad():
        assert not any(call().requires_grad for call in host._forwards().values())
    for call, count in zip(host._with_backwards().values(), (1, 2, 2), strict=True):
        assert len(call()) == count


def test_geometric_means_are_those_of_the_points_named():
    from bench import cpu, cpu_report
    from bench.cases import OPERATORS

    times = {"rms_norm": (1.0, 8.0, 4.0), "layer_norm": (2.0, 4.0, 1.0)}
    results = [
        cpu.Result(cpu.Point(operator, "backward", "float32", (1, 1)), *times[operator.name])
        for operator in OPERATORS[:2]
    ]
    assert [line.split() for line in cpu_report.table(results, 1, 1).splitlines()[-3:]] == [
        f"{name} backward float32 geometric mean × torch {means}".split()
        for name, means in (
            ("rms_norm", "8.00, worst 8.00, / copy 0.25"),
            ("layer_norm", "2.00, worst 2.00, / copy 2.00"),
            ("all ungated", "4.00, worst 2.00, / copy 0.71"),
        )
    ]


def test_the_ratio_to_the_ungated_is_that_of_the_gated_points():
    from bench import cpu, cpu_report
    from bench.cases import OPERATORS

    by_name = {operator.name: operator for operator in OPERATORS}
    results = [
        cpu.Result(
            cpu.Point(by_name[name], "forward", "float32", (rows, 1)), 2.0, 8.0, 1.0, ungated
        )
        for name, rows, ungated in (
            ("rms_norm+post_gate", 1, 1.0),
            ("rms_norm+post_gate", 2, 0.5),
            ("rms_norm+pre_gate", 1, 2.0),
            ("layer_norm", 1, None),
        )
    ]
    ends = [
        line.split("/ copy")[-1].split() for line in cpu_report.table(results, 1, 1).splitlines()
    ]
    assert ends[-5:] == [
        end.split()
        for end in (
            "2.00, / ungated 2.83, worst 4.00",
            "2.00, / ungated 1.00, worst 1.00",
            "2.00",
            "2.00, / ungated 2.00, worst 4.00",
            "2.00",
        )
    ]


def test_the_copy_moves_as_many_bytes():
    import torch

    from bench import cpu

    for dtype in (torch.float32, torch.bfloat16):
        assert 2 * cpu.copying(1200, dtype)().nbytes == 1200


@pytest.mark.parametrize(
    ("option", "value"),
    [("--op", "group"), ("--dtype", "int8"), ("--shapes", "64"), ("--op", "group_norm")],
)
def test_bench_names_what_it_does_not_know(option, value):
    ran = bench(*SMALL, option, value)
    assert ran.returncode == 2
    assert option in ran.stderr
    assert value in ran.stderr


def test_all_that_is_called_is_compiled_ahead():
    code = """
        import cunorm
        from bench import cpu
        from bench.cases import OPERATORS

        names = ["rms_norm+groups", "add_layer_norm", "rms_norm+pre_gate", "l2_norm", "normalize"]
        names.append("group_norm+silu")
        shapes = {2: [(70, 96)], 4: [(2, 32, 3, 5), (3, 64, 150, 120)]}
        points = [
            cpu.Point(operator, direction, "bfloat16", shape)
            for operator in OPERATORS
            if operator.name in names
            for shape in shapes[operator.axes]
            for direction in ("forward", "backward")
        ]
        cpu.compile_ahead(points)
        loaded = cunorm.cache_info().loaded
        for point in points:
            cpu.measure(point, seconds=0.01)
        print(loaded, cunorm.cache_info().loaded)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    before, after = ran.stdout.split()
    assert int(before) == int(after) >= 2 * 5


def test_bench_does_not_time_a_wrong_result(monkeypatch):
    from bench import cases, cpu

    monkeypatch.setitem(cases.TOLERANCE, "float32", 0.0)
    point = cpu.Point(cases.OPERATORS[0], "forward", "float32", (64, 64))
    with pytest.raises(RuntimeError, match="nothing is timed"):
        cpu.measure(point, seconds=0.01)
