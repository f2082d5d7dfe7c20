# SPDX-License-Identifier: MIT
"""What the GPU scripts would run, run where there is no GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from bench.cases import (
    OPERATORS,
    TOLERANCE,
    backward,
    check,
    host_operands,
    saved_forward,
    torch_backward,
    torch_forward,
    worst_error,
)
from cunorm import reference

SCRIPT = Path(__file__).parent.parent / "bench" / "check_gpu.sh"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_operator_of_the_gpu_scripts_matches_the_oracle(operator, dtype):
    assert check(operator, dtype, (5, 33), np.asarray, np.asarray) <= TOLERANCE[dtype]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_torchs_side_of_the_timings_computes_the_same(operator):
    torch = pytest.importorskip("torch")
    host = host_operands(operator, "float32", 9, 64)
    tensors = {name: torch.from_numpy(array) for name, array in host.items()}
    saved = saved_forward(reference, operator, host)
    gradients = backward(reference, operator, host, saved)()
    outputs = [saved.y, saved.residual] if operator.has_residual else [saved.y]
    names = ["dresidual" if name == "residual" else f"d{name}" for name in operator.inputs]
    expected = [*outputs, *(getattr(gradients, name) for name in names)]
    forward = torch_forward(torch, operator, tensors)()
    results = [
        *(forward if operator.has_residual else [forward]),
        *torch_backward(torch, operator, tensors)(),
    ]
    assert worst_error(results, expected) < 1e-6


@pytest.mark.parametrize("arguments", [(), ("--unknown",), ("one", "two")])
def test_check_gpu_refuses_wrong_arguments_with_its_usage(arguments):
    run = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "check_gpu.sh [--dry-run] OUT_DIR" in run.stderr


def test_check_gpu_says_what_it_would_run_in_under_eight_minutes(tmp_path):
    run = subprocess.run(
        [SCRIPT, "--dry-run", tmp_path], capture_output=True, text=True, check=True
    )
    limits = [int(part.split(" s)")[0]) for part in run.stdout.split("(at most ")[1:]]
    sanitizers = 0 if "compute-sanitizer is not installed" not in run.stdout else 2 * 60
    assert sum(limits) + sanitizers < 8 * 60
    assert list(tmp_path.iterdir()) == []
