# SPDX-License-Identifier: MIT
"""The GPU's side of the timings, on a stand-in for CuPy: what they would run, and write."""

from __future__ import annotations

import math
import sys

import pytest
from fake_gpu import fake_cupy

from bench import gpu_timer, grid, timing
from bench.cases import OPERATORS
from bench.grid import Point
from bench.rows import read_csv

BY_LABEL = {operator.label: operator for operator in OPERATORS}
SMALL = ("--device", "cuda", "--seconds", "0.001")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(gpu_timer, "BATCH_SECONDS", 0.0)  # four calls a batch
    monkeypatch.setattr(gpu_timer, "ROTATED_BYTES", 1)  # two sets
    monkeypatch.setattr(gpu_timer._cuda, "nvrtc_version", lambda: (13, 3))
    device = gpu_timer.Gpu(fake_cupy(), None)
    monkeypatch.setattr(gpu_timer, "find", lambda: device)
    return device


def test_gpu_timings_write_every_provider_and_what_they_were_measured_on(gpu, tmp_path, capsys):
    pytest.importorskip("torch", reason="the bench compares with PyTorch")
    options = ("--shapes", "64x96", "--op", "rms_norm+post_gate", "--dtype", "bfloat16")
    providers = ("--providers", "cunorm-cupy,cunorm,torch")
    out = tmp_path / "gpu.csv"
    assert timing.main([*SMALL, *options, *providers, "--out", str(out)]) == 0
    rows = read_csv(out)
    named = ["copy", "cunorm-cupy", "cunorm", "torch", "cunorm-ungated"]
    assert [row.provider for row in rows] == named * 2
    assert [row.direction for row in rows] == ["forward"] * 5 + ["backward"] * 5
    assert {(row.device, row.driver, row.threads) for row in rows} == {("a GPU", "13.1", 1)}
    assert all("NVRTC 13.3; cupy 14.2; torch" in row.versions for row in rows)
    assert all(row.host_us > 0 for row in rows)  # of every call, as it is queued
    assert all(row.p20_us <= row.p50_us <= row.p80_us for row in rows)
    point = Point(BY_LABEL["rms_norm+post_gate"], "forward", "bfloat16", (64, 96))
    assert gpu._cupy.copied[0] == point.bytes // 2
    assert "/ ungated" in capsys.readouterr().out


def test_what_has_a_stream_of_its_own_is_timed_to_the_end_of_its_last_call(gpu):
    waited = []
    turn = gpu.turn([lambda: "first", lambda: "second"], waited.append)
    waited.clear()
    assert turn.seconds() > 0
    assert waited == ["second"]  # of four calls that rotate through two


def test_operands_rotate_and_repeat(gpu):
    first, second = gpu.operands(Point(BY_LABEL["rms_norm"], "forward", "float32", (1 << 12, 512)))
    assert first["x"].shape == (1 << 12, 512)
    assert (first["x"][: 1 << 11] == first["x"][1 << 11 :]).all()
    assert not any((first[name] is second[name]) for name in first)


def test_rows_are_halved_until_everything_fits_the_memory():
    point = Point(BY_LABEL["group_norm NHWC"], "forward", "bfloat16", (20, 128, 256, 256))
    arrays = gpu_timer.OPERAND_ARRAYS + gpu_timer.ARRAYS_OF_ONE * 3
    needed = 2 * arrays * 2 * point.elements  # two sets
    fits = gpu_timer.Gpu(fake_cupy(needed), None).fitting(point, 3)
    half = gpu_timer.Gpu(fake_cupy(needed - 1), None).fitting(point, 3)
    assert fits == point
    assert half.shape == (10, 128, 256, 256)
    assert gpu_timer.Gpu(fake_cupy(1), None).fitting(point, 3).shape == (1, 128, 256, 256)


def test_the_gpu_grid_is_that_of_the_goals_with_the_most_telling_shapes_first():
    shapes = grid.default_shapes("cuda")
    rows = [shape for shape in shapes if len(shape) == 2]
    assert rows[0] == (16384, 4096)
    assert len(set(shapes)) == len(shapes)
    assert all(1 << 16 <= math.prod(shape) <= 1 << 28 for shape in rows)
    assert {count for count, _ in rows} >= {1, 131072}
    assert {width for _, width in rows} >= {64, 262144}
    names = ["rms_norm", "group_norm+silu"]
    points = list(grid.default_points("cuda", names))
    orders = [point.operator.memory for point in points if point.operator.of_channels]
    assert orders.count("NHWC") == orders.count("NCHW") == 4 * (len(shapes) - len(rows))


def test_no_point_is_begun_when_the_time_is_over(gpu, tmp_path, capsys):
    pytest.importorskip("torch", reason="the bench compares with PyTorch")
    out = tmp_path / "gpu.csv"
    options = ("--op", "rms_norm", "--providers", "cunorm-cupy", "--out", str(out))
    assert timing.main([*SMALL, "--seconds-total", "1e-9", *options]) == 0
    assert read_csv(out) == []
    assert "points were left out" in capsys.readouterr().out


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SystemExit, match="cuda13"):
        timing.main(SMALL)
