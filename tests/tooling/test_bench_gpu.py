# SPDX-License-Identifier: MIT
"""What the GPU scripts would run, run where there is no GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bench import gpu_check, peers
from bench.arrays import upload
from bench.cases import (
    OPERATORS,
    TOLERANCE,
    bytes_moved,
    check,
    host_operands,
    oracle,
    worst_error,
)

SCRIPT = Path(__file__).parents[2] / "bench" / "check_gpu.sh"
BY_LABEL = {operator.label: operator for operator in OPERATORS}
OF_CHANNELS = [operator for operator in OPERATORS if operator.of_channels]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.label)
def test_every_operator_of_the_gpu_scripts_matches_the_oracle(operator, dtype):
    shape = (3, 96, 5, 7) if operator.of_channels else (5, 33)
    assert check(operator, dtype, shape, np.asarray, np.asarray) <= TOLERANCE[dtype]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.label)
def test_torchs_side_of_the_timings_computes_the_same(operator):
    torch = pytest.importorskip("torch")
    assert_torch_agrees(torch, operator, peers.torch_function(torch, operator, 64))


@pytest.mark.parametrize(
    "label", ["rms_norm+post_gate", "rms_norm+groups", "add_normalize", "group_norm+silu NHWC"]
)
def test_what_torch_compiles_computes_the_same(label):
    torch = pytest.importorskip("torch")
    operator = BY_LABEL[label]
    function = peers.torch_function(torch, operator, 64)
    # All that torch.compile does but to generate code, which takes long.
    assert_torch_agrees(torch, operator, peers.compiled(torch, function, "aot_eager"))


def assert_torch_agrees(torch, operator, function):
    host = host_operands(operator, "float32", (9, 64, 5, 3)[: operator.axes])
    tensors = {name: torch.from_numpy(array) for name, array in host.items()}
    y = peers.torch_forward(function, operator, tensors)()
    call = peers.torch_backward(torch, function, operator, tensors)
    for _ in range(2):  # timings repeat it
        results = {"forward": y if operator.has_residual else (y,), "backward": call()}
        for direction, found in results.items():
            named = dict(zip(operator.outputs(direction), found, strict=True))
            assert worst_error(named, oracle(operator, direction, host)) < 1e-6


def test_a_mean_is_wrong_by_deviations():
    expected = {"mean": np.array([1e-9, 0.0]), "rstd": np.array([0.5, 0.25])}
    right = {"mean": np.array([2e-9, 1e-9]), "rstd": np.array([0.5, 0.25])}
    wrong = right | {"mean": np.array([1e-9, 0.4])}
    assert worst_error(right, expected) < 1e-8
    assert worst_error(wrong, expected) == pytest.approx(0.4 / 4)  # the largest deviation is 4
    assert worst_error(right | {"mean": None}, expected) == np.inf
    assert worst_error(right | {"rstd": np.array([0.5, np.nan])}, expected) == np.inf


def test_a_call_moves_the_bytes_of_its_operands():
    rows, width, row_sized = 48, 96, 48 * 96
    counts = {
        name: [
            bytes_moved(operator, direction, (rows, width), 2) / (2 * row_sized)
            for direction in ("forward", "backward")
        ]
        for name, operator in BY_LABEL.items()
        if not operator.of_channels
    }
    assert [round(count) for count in counts["rms_norm"]] == [2, 3]
    assert [round(count) for count in counts["add_rms_norm"]] == [4, 4]
    assert [round(count) for count in counts["rms_norm+post_gate"]] == [3, 5]
    assert [round(count) for count in counts["rms_norm+pre_gate"]] == [3, 5]
    statistics = [4 * groups * rows / (2 * row_sized) for groups in (1, 24)]
    assert counts["rms_norm+groups"][1] - counts["rms_norm"][1] == pytest.approx(
        statistics[1] - statistics[0]
    )


@pytest.mark.parametrize("operator", OF_CHANNELS, ids=lambda operator: operator.label)
def test_a_group_norm_moves_x_dy_dx_parameters_and_statistics(operator):
    elements, itemsize, channels, statistics = 3 * 64 * 5 * 7, 2, 64, 2 * 3 * 32
    forward, backward = (
        bytes_moved(operator, direction, (3, channels, 5, 7), itemsize)
        for direction in ("forward", "backward")
    )
    assert forward == itemsize * (2 * elements + 2 * channels)
    assert backward == itemsize * (3 * elements + 3 * channels) + 4 * statistics


@pytest.mark.parametrize("operator", OF_CHANNELS, ids=lambda operator: operator.label)
def test_images_lie_in_the_memory_order_that_their_operator_names(operator):
    last = operator.memory == "NHWC"
    host = host_operands(operator, "bfloat16", (6, 32, 5, 3))
    for name in ("x", "dy"):
        assert host[name].shape == (6, 32, 5, 3)
        on_gpu = upload(np, host[name], repeats=2)
        assert on_gpu.strides == host[name].strides
        assert on_gpu.transpose((0, 2, 3, 1) if last else (0, 1, 2, 3)).flags.c_contiguous
        assert np.array_equal(on_gpu, np.concatenate([host[name]] * 2))
    assert upload(np, host["weight"], repeats=2).shape == (32,)


def test_the_sanitizers_see_every_kind_of_norm():
    points = {operator.label: gpu_check.points(operator) for operator in OPERATORS}
    assert [name for name in points if not points[name]] == ["normalize", "add_normalize"]
    assert points["rms_norm+pre_gate"] == points["rms_norm"] == gpu_check.POINTS
    assert 0 < len(points["rms_norm+groups"]) < len(gpu_check.POINTS)
    assert points["group_norm+silu NHWC"] == points["group_norm+silu NCHW"] == gpu_check.OF_CHANNELS


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
    assert len(limits) == 7
    assert sum(limits) + len(limits) * until_killed < 8 * 60
    assert list(tmp_path.iterdir()) == []
