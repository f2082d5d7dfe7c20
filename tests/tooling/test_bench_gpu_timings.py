# SPDX-License-Identifier: MIT
"""The GPU's side of the timings, on a stand-in for CuPy: what they would run, and write."""

from __future__ import annotations

import math
import os
import signal
import sys

import pytest

from bench import engine, gpu_timer, grid, providers, timing
from bench.cases import OPERATORS
from bench.grid import Point
from bench.rows import read_csv
from tests.support.fake_gpu import fake_cupy

BY_LABEL = {operator.label: operator for operator in OPERATORS}
SMALL = ("--device", "cuda", "--seconds", "0.001")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(gpu_timer, "BATCH_SECONDS", 0.0)  # four calls a batch
    monkeypatch.setattr(gpu_timer, "ROTATED_BYTES", 1)  # two sets
    monkeypatch.setattr(gpu_timer._cuda, "nvrtc_version", lambda: (13, 3))
    device = gpu_timer.Gpu(fake_cupy(), None)
    monkeypatch.setattr(gpu_timer, "find", lambda: device)
    monkeypatch.setattr(providers, "require_gpu", lambda arrays: None)
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


def test_small_points_rotate_through_more_than_any_l2_as_far_as_memory_allows():
    point = Point(BY_LABEL["l2_norm"], "forward", "bfloat16", (1, 1 << 16))
    assert gpu_timer._sets(point, 1 << 40) * point.bytes >= 512 << 20
    assert gpu_timer._sets(point, 16 << 30) * point.bytes == 256 << 20
    assert gpu_timer._sets(point, 0) == 2
    tiny = Point(BY_LABEL["l2_norm"], "forward", "bfloat16", (1, 64))
    assert gpu_timer._sets(tiny, 1 << 40) == gpu_timer.MOST_SETS
    # However many are timed, rows are halved for want of memory and not for many sets.
    for free in (1 << 30, 8 << 30, 1 << 37):
        assert gpu_timer.Gpu(fake_cupy(free), None).fitting(point, 10) == point


def test_turns_go_on_with_the_set_that_was_used_least_recently(gpu):
    used = []
    calls = [[lambda name=name, i=i: used.append((name, i)) for i in range(11)] for name in "ab"]
    turns = [gpu.turn(some) for some in calls]
    used.clear()
    for _ in range(4):
        for turn in turns:
            turn.seconds()  # four calls
    assert {name for name, _ in used} == {"a", "b"}
    sets = [index for _, index in used]
    assert sets == [(sets[0] + place) % 11 for place in range(32)]


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


def test_points_that_become_the_same_while_they_are_timed_have_one_row(gpu, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="the bench compares with PyTorch")
    time_point = engine.time_point

    def smaller(device, point, *rest):
        return time_point(
            device, Point(point.operator, point.direction, point.dtype, (64, 96)), *rest
        )

    monkeypatch.setattr(engine, "time_point", smaller)
    out = tmp_path / "gpu.csv"
    options = ("--op", "rms_norm", "--dtype", "float32", "--direction", "forward")
    shapes = ("--providers", "cunorm-cupy", "--shapes", "256x96,128x96", "--out", str(out))
    assert timing.main([*SMALL, *options, *shapes]) == 0
    assert [row.provider for row in read_csv(out)] == ["copy", "cunorm-cupy"]


def test_what_was_timed_is_written_where_the_run_is_terminated(gpu, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="the bench compares with PyTorch")
    time_point, before = engine.time_point, signal.getsignal(signal.SIGTERM)

    def terminated(device, point, *rest):
        if point.direction == "backward":
            os.kill(os.getpid(), signal.SIGTERM)
        return time_point(device, point, *rest)

    monkeypatch.setattr(engine, "time_point", terminated)
    out = tmp_path / "gpu.csv"
    options = ("--op", "rms_norm", "--dtype", "float32", "--providers", "cunorm-cupy")
    with pytest.raises(SystemExit) as ended:
        timing.main([*SMALL, *options, "--shapes", "64x96", "--out", str(out)])
    assert ended.value.code == 128 + signal.SIGTERM
    assert [(row.direction, row.provider) for row in read_csv(out)] == [
        ("forward", "copy"),
        ("forward", "cunorm-cupy"),
    ]
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SystemExit, match="cuda13"):
        timing.main(SMALL)
