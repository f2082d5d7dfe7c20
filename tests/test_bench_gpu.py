# SPDX-License-Identifier: MIT
"""What the GPU scripts would run, run where there is no GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bench import gpu_check, peers
from bench.cases import (
    OPERATORS,
    TOLERANCE,
    backward,
    bytes_moved,
    check,
    host_operands,
    training_forward,
    worst_error,
)
from cunorm import reference

SCRIPT = Path(__file__).parent.parent / "bench" / "check_gpu.sh"
BY_NAME = {operator.name: operator for operator in OPERATORS}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_operator_of_the_gpu_scripts_matches_the_oracle(operator, dtype):
    assert check(operator, dtype, (5, 33), np.asarray, np.asarray) <= TOLERANCE[dtype]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_torchs_side_of_the_timings_computes_the_same(operator):
    torch = pytest.importorskip("torch")
    assert_torch_agrees(torch, operator, peers.torch_function(torch, operator, 64))


@pytest.mark.parametrize("name", ["rms_norm+post_gate", "rms_norm+groups", "add_normalize"])
def test_what_torch_compiles_computes_the_same(name):
    torch = pytest.importorskip("torch")
    function = peers.torch_function(torch, BY_NAME[name], 64)
    # All that torch.compile does but to generate code, which takes long.
    assert_torch_agrees(torch, BY_NAME[name], peers.compiled(torch, function, "aot_eager"))


def assert_torch_agrees(torch, operator, function):
    host = host_operands(operator, "float32", 9, 64)
    tensors = {name: torch.from_numpy(array) for name, array in host.items()}
    saved = training_forward(reference, operator, host)()
    gradients = backward(reference, operator, host, saved)()
    outputs = [saved.y, saved.residual] if operator.has_residual else [saved.y]
    names = ["dresidual" if name == "residual" else f"d{name}" for name in operator.leaves]
    expected = [*outputs, *(getattr(gradients, name) for name in names)]
    forward = peers.torch_forward(function, operator, tensors)()
    call = peers.torch_backward(torch, function, operator, tensors)
    for _ in range(2):  # timings repeat it
        results = [*(forward if operator.has_residual else [forward]), *call()]
        assert worst_error(results, expected) < 1e-6


def test_a_call_moves_the_bytes_of_its_operands():
    rows, width, row_sized = 48, 96, 48 * 96
    counts = {
        name: [
            bytes_moved(operator, direction, rows, width, 2) / (2 * row_sized)
            for direction in ("forward", "backward")
        ]
        for name, operator in BY_NAME.items()
    }
    assert [round(count) for count in counts["rms_norm"]] == [2, 3]
    assert [round(count) for count in counts["add_rms_norm"]] == [4, 4]
    assert [round(count) for count in counts["rms_norm+post_gate"]] == [3, 5]
    assert [round(count) for count in counts["rms_norm+pre_gate"]] == [3, 5]
    statistics = [4 * groups * rows / (2 * row_sized) for groups in (1, 24)]
    assert counts["rms_norm+groups"][1] - counts["rms_norm"][1] == pytest.approx(
        statistics[1] - statistics[0]
    )


def test_the_sanitizers_see_every_kind_of_norm():
    points = {operator.name: gpu_check.points(operator) for operator in OPERATORS}
    assert [name for name in points if not points[name]] == ["normalize", "add_normalize"]
    assert points["rms_norm+pre_gate"] == points["rms_norm"] == gpu_check.POINTS
    assert 0 < len(points["rms_norm+groups"]) < len(gpu_check.POINTS)


@pytest.mark.parametrize("arguments", [(), ("--unknown",), ("one", "two")])
def test_check_gpu_refuses_wrong_arguments_with_its_usage(arguments):
    run = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "check_gpu.sh [--dry-run] OUT_DIR" in run.stderr


def test_check_gpu_says_what_it_would_run_in_under_eight_minutes(tmp_path):
    run = subprocess.run(
        [SCRIPT, "--dry-run", tmp_path / "out"], capture_output=True, text=True, check=True
    )
    limits = [int(part.split(" s)")[0]) for part in run.stdout.split("(at most ")[1:]]
    limits += 2 * [60] if "compute-sanitizer is not installed" in run.stdout else []
    limits += [55] if "torch or triton is not installed" in run.stdout else []
    (until_killed,) = map(int, re.findall(r"--kill-after=(\d+)", SCRIPT.read_text()))
    assert len(limits) == 6
    assert sum(limits) + len(limits) * until_killed < 8 * 60
    assert list(tmp_path.iterdir()) == []
