# SPDX-License-Identifier: MIT
"""The operators and commands of the GPU scripts, without a GPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from bench.plans import builds as gpu_builds
from bench.timing import engine
from bench.timing.arrays import upload
from bench.timing.cases import MODULATED, OPERATORS, QUANTIZED, bytes_moved
from bench.timing.gpu_timer import Gpu
from bench.timing.grid import DIRECTIONS, Point
from bench.timing.operands import host_operands
from bench.timing.providers import Cunorm
from tests import softgpu
from tests.support import internals

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "check_gpu.sh"
BY_LABEL = {operator.label: operator for operator in OPERATORS}
OF_CHANNELS = [operator for operator in OPERATORS if operator.of_channels]


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
    rows, images, _ = MODULATED
    moved = [bytes_moved(rows, direction, (4, 5, 96), 2) for direction in DIRECTIONS]
    assert moved == [2 * (2 * 1920 + 2 * 4 * 96), 2 * (3 * 1920 + 3 * 4 * 96) + 4 * 2 * 20]
    assert bytes_moved(images, "forward", (3, 64, 5, 7), 2) == 2 * (2 * elements + 3 * parameters)
    of_row, added, of_blocks, given = (
        bytes_moved(one, "forward", (5, 300), 2) - 2 * 300 for one in QUANTIZED
    )
    assert (of_row, added) == (3 * 1500 + 4 * 5, 7 * 1500 + 4 * 5)
    assert (of_blocks, given) == (3 * 1500 + 4 * 5 * 3, 3 * 1500)


@pytest.mark.parametrize("operator", OF_CHANNELS, ids=lambda operator: operator.label)
def test_images_have_the_memory_order_that_their_operator_names(operator):
    last = operator.memory == "NHWC"
    host = host_operands(operator, "bfloat16", (6, 32, 5, 3))
    for name in ("x", "dy"):
        on_gpu = upload(np, host[name], repeats=2)
        assert on_gpu.strides == host[name].strides
        assert on_gpu.transpose((0, 2, 3, 1) if last else (0, 1, 2, 3)).flags.c_contiguous
        assert np.array_equal(on_gpu, np.concatenate([host[name]] * 2))


# --- check_gpu.sh ---------------------------------------------------------------------------------

# A stand-in for Python: its smoke tests fail, and its tests hang if HANGS is set.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *find_spec* | *torch*triton*) ;;
  *getDeviceCount*) [[ ! $NO_GPU ]] || { echo Traceback && echo "it is not there" && exit 1; } ;;
  *bench.timing.smoke*) echo "a case FAILED" && exit 3 ;;
  *"-m pytest"*) echo "test_one PASSED" && [[ ! $HANGS ]] || exec sleep 60 ;;
  *--out*) echo row >"${@: -1}" && echo "torch is left out: it has no CUDA" ;;
esac
"""


def check_gpu(*arguments, **environment):
    command = [SCRIPT, *map(str, arguments)]
    env = {**os.environ, "HANGS": "", "NO_GPU": "", **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def stub(tmp_path):
    """Return an environment in which check_gpu.sh runs PYTHON and may take a second."""
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o700)
    few = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_HOME": str(tmp_path)}
    return {**few, "PYTHON": str(tmp_path / "python"), "CHECK_GPU_SECONDS": "1"}


def steps(output):
    """Return the steps of a dry run, and when each ends."""
    found = re.findall(r"^([\w.-]+) \(\d+ to (\d+) s\):", output, re.MULTILINE)
    return {name: int(end) for name, end in found}


def test_check_gpu_says_what_it_would_run_and_when(tmp_path):
    run = check_gpu("--unknown")
    assert (run.returncode, "[--dry-run] OUT_DIR" in run.stderr) == (2, True)
    out, program = tmp_path / "out", tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.touch(0o700)
    first = steps(check_gpu("--dry-run", out, CUDA_HOME=str(tmp_path)).stdout)
    names = ["info", "smoke", "compile", "tests", "memcheck", "racecheck", "timings"]
    assert list(first) == names
    assert first["timings"] < 7 * 60
    second = check_gpu("--second", "--dry-run", out).stdout
    assert list(steps(second)) == ["peers", "torch.compile", "features-off"]
    assert steps(second)["features-off"] < 4 * 60
    twice = steps(check_gpu("--dry-run", out, CHECK_GPU_SECONDS="840").stdout)
    assert twice["tests"] == 2 * first["tests"]
    files = re.findall(r"tests/\S+\.py", second)
    assert files
    assert all((ROOT / file).is_file() for file in files)
    assert not out.exists()


def test_check_gpu_runs_all_steps_though_some_fail_and_keeps_their_output(tmp_path, stub):
    run = check_gpu(tmp_path / "out", **stub, HANGS="yes")
    log = (tmp_path / "out" / "check_gpu.log").read_text()
    assert run.returncode == 1
    assert "test_one PASSED" in log
    assert (tmp_path / "out" / "timings.csv").read_text() == "row\n"
    summary = log.rpartition("\n\n")[2]
    verdicts = dict(re.findall(r"^(\w+): (\w+)", summary, re.MULTILINE))
    assert verdicts == {
        **{"info": "passed", "smoke": "FAILED", "compile": "passed", "tests": "STOPPED"},
        **{"memcheck": "skipped", "calls": "passed", "racecheck": "skipped", "timings": "passed"},
    }
    assert "\n  without: torch is left out: it has no CUDA\n" in summary
    assert "FAILED or STOPPED: smoke, tests; " in summary
    assert "  | a case FAILED" in run.stdout
    run = check_gpu("--second", tmp_path / "out", **stub)  # adds to the log of the first part
    assert run.returncode == 0, run.stdout
    log = (tmp_path / "out" / "check_gpu.log").read_text()
    assert all(f"\n{name}: passed" in log for name in ("timings", "peers", "features-off"))
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["check_gpu.log", "peers.csv", "timings.csv", "torch.compile.csv"]


@pytest.mark.parametrize(
    ("wrong", "value", "message"),
    [
        ("CHECK_GPU_SECONDS", "20s", "CHECK_GPU_SECONDS is 20s"),
        ("NO_GPU", "yes", "no GPU: it is not there; "),
    ],
)
def test_check_gpu_runs_nothing_without_a_gpu_or_with_a_wrong_setting(
    tmp_path, stub, wrong, value, message
):
    ran = check_gpu(tmp_path / "out", **(stub | {wrong: value}))
    assert ran.returncode == 2
    assert message in ran.stderr + ran.stdout
    assert {path.name for path in (tmp_path / "out").glob("*")} <= {"check_gpu.log"}


@pytest.mark.parametrize(
    ("sent", "of_interrupts"),
    [(signal.SIGINT, signal.SIG_DFL), (signal.SIGTERM, signal.SIG_IGN)],
    ids=["an interrupt", "a termination in the background, where interrupts are ignored"],
)
def test_a_signal_ends_check_gpu_and_its_step(tmp_path, stub, sent, of_interrupts):
    env = {**os.environ, **stub, "HANGS": "1", "NO_GPU": "", "CHECK_GPU_SECONDS": "420"}
    log, deadline = tmp_path / "out" / "check_gpu.log", time.monotonic() + 20
    before = signal.signal(signal.SIGINT, of_interrupts)
    try:
        ran = subprocess.Popen(
            [SCRIPT, tmp_path / "out"], env=env, stdout=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with ran:
        try:
            while not (log.exists() and "test_one PASSED" in log.read_text("utf-8")):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            ran.send_signal(sent)
            assert "\ntests: stopped by a signal\n" in ran.communicate(timeout=15)[0]
            assert ran.returncode == 130
        finally:
            ran.kill()


# --- the list of builds ---------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_recorded_builds_are_those_of_these_kernels(tmp_path):
    """If this fails, run `python -m bench builds record`."""
    builds = gpu_builds.read(gpu_builds.LIST)
    gpu_builds.write(tmp_path / "list", builds)
    assert (tmp_path / "list").read_text() == gpu_builds.LIST.read_text()
    assert [build for build in gpu_builds._of_calls() if build not in set(builds)] == []
    some = {build.kernel: build for build in builds if "fp32" in str(build)}
    assert {build.kernel for build in builds} <= set(some)
    assert [gpu_builds._error_of(build) for build in list(some.values())[:3]] == ["", "", ""]


@pytest.mark.gpu
@pytest.mark.skipif(not softgpu.is_loaded(), reason="the software GPU's cache is a folder")
def test_a_call_compiles_nothing_after_its_builds_are_compiled_ahead(tmp_path, monkeypatch):
    import cupy

    operator, shape = BY_LABEL["add_rms_norm"], (5, 96)
    monkeypatch.setenv("SOFTGPU_PTX", str(tmp_path))
    monkeypatch.setattr(internals._cuda, "loaded", internals.OnceMap())
    builds = set(gpu_builds._builds_of(operator, "float32", shape))
    assert {gpu_builds._error_of(build) for build in builds} == {""}
    ahead = set(tmp_path.iterdir())  # builds that earlier tests loaded are not there
    monkeypatch.setattr(internals._cuda, "loaded", internals.OnceMap())
    device, ours = Gpu(cupy, None), [Cunorm("cunorm-cupy", "own")]
    for direction in DIRECTIONS:
        assert engine.failures_at(device, Point(operator, direction, "float32", shape), ours) == 0
    assert set(tmp_path.iterdir()) == ahead
