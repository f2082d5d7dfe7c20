# SPDX-License-Identifier: MIT
"""The operators and commands of the GPU scripts, without a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bench import peers
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

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "check_gpu.sh"
BY_LABEL = {operator.label: operator for operator in OPERATORS}
OF_CHANNELS = [operator for operator in OPERATORS if operator.of_channels]


@pytest.mark.parametrize("label", [*BY_LABEL, "rms_norm, bfloat16"])
def test_every_operator_of_the_gpu_scripts_matches_the_oracle(label):
    operator = BY_LABEL[label.removesuffix(", bfloat16")]
    dtype = "float32" if label in BY_LABEL else "bfloat16"
    shape = (3, 64, 5, 3) if operator.of_channels else (9, 96)
    assert check(operator, dtype, shape, np.asarray, np.asarray) <= TOLERANCE[dtype]


@pytest.mark.parametrize("label", ["rms_norm+post_gate", "group_norm+silu NHWC"])
def test_what_torch_compiles_computes_the_same(label):
    torch = pytest.importorskip("torch")
    operator = BY_LABEL[label]
    # All of torch.compile but code generation, which takes long.
    function = peers.compiled(torch, peers.torch_function(torch, operator, 64), "aot_eager")
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
    rows, width = 48, 96
    arrays = {"rms_norm": (2, 3), "add_rms_norm": (4, 4), "rms_norm+pre_gate": (3, 5)}
    for label, counts in arrays.items():
        for direction, count in zip(("forward", "backward"), counts, strict=True):
            moved = bytes_moved(BY_LABEL[label], direction, (rows, width), 2)
            assert round(moved / (2 * rows * width)) == count
    elements, parameters, statistics = 3 * 64 * 5 * 7, 2 * 64, 2 * 3 * 32
    for operator in OF_CHANNELS:
        forward = bytes_moved(operator, "forward", (3, 64, 5, 7), 2)
        backward = bytes_moved(operator, "backward", (3, 64, 5, 7), 2)
        assert forward == 2 * (2 * elements + parameters)
        assert backward == 2 * (3 * elements + 3 * 64) + 4 * statistics


@pytest.mark.parametrize("operator", OF_CHANNELS, ids=lambda operator: operator.label)
def test_images_lie_in_the_memory_order_that_their_operator_names(operator):
    last = operator.memory == "NHWC"
    host = host_operands(operator, "bfloat16", (6, 32, 5, 3))
    for name in ("x", "dy"):
        on_gpu = upload(np, host[name], repeats=2)
        assert on_gpu.strides == host[name].strides
        assert on_gpu.transpose((0, 2, 3, 1) if last else (0, 1, 2, 3)).flags.c_contiguous
        assert np.array_equal(on_gpu, np.concatenate([host[name]] * 2))


def test_check_gpu_says_what_it_would_run_in_under_eight_minutes(tmp_path):
    run = subprocess.run([SCRIPT, "--unknown"], capture_output=True, text=True, check=False)
    assert (run.returncode, "[--dry-run] OUT_DIR" in run.stderr) == (2, True)
    run = subprocess.run(
        [SCRIPT, "--dry-run", tmp_path / "out"], capture_output=True, text=True, check=True
    )
    limits = [int(part.split(" s)")[0]) for part in run.stdout.split("(at most ")[1:]]
    limits += 2 * [60] if "compute-sanitizer is not installed" in run.stdout else []
    limits += [55] if "torch or triton is not installed" in run.stdout else []
    (until_killed,) = map(int, re.findall(r"--kill-after=(\d+)", SCRIPT.read_text()))
    files = re.findall(r"tests/\S+\.py", run.stdout)
    assert files
    assert all((ROOT / file).is_file() for file in files)
    assert len(limits) == 7
    assert sum(limits) + len(limits) * until_killed < 8 * 60
    assert list(tmp_path.iterdir()) == []
