# SPDX-License-Identifier: MIT
"""The GPU's timings with a stand-in for CuPy: the calls, and the CSV."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from bench.report.records import read_csv
from bench.timing import command as timing
from bench.timing import engine, gpu_timer, providers
from bench.timing.cases import OPERATORS, QUANTIZED, TOLERANCE
from bench.timing.grid import Point
from bench.timing.rows import Environment, Row

torch = pytest.importorskip("torch", reason="the bench compares with PyTorch")

BY_LABEL = {operator.label: operator for operator in OPERATORS}
FACTS = Environment("2026-01-02", "0123456", "a GPU", "13.1", "cunorm 0", 1)
SMALL = ("--device", "cuda", "--seconds", "0.001")
OURS = ("--op", "rms_norm", "--dtype", "float32", "--providers", "cunorm-cupy")


class Event:
    def record(self):
        self.time = time.perf_counter()

    def synchronize(self):
        pass


def fake_cupy(free_bytes=1 << 30):
    """Return the part of CuPy that the timings use, on NumPy arrays."""

    def empty(shape, dtype):
        if isinstance(shape, int):  # for a copy, which needs only a pointer
            return SimpleNamespace(data=SimpleNamespace(ptr=shape))
        return np.empty(shape, dtype)

    copied = []
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            memcpyDeviceToDevice=3,
            memcpyAsync=lambda target, source, size, kind, stream: copied.append(size),
            deviceSynchronize=lambda: None,
            memGetInfo=lambda: (free_bytes, 2 * free_bytes),
            driverGetVersion=lambda: 13010,
            getDeviceProperties=lambda device: {"name": b"a GPU"},
        ),
        Event=Event,
        get_elapsed_time=lambda before, after: 1e3 * (after.time - before.time),
    )
    return SimpleNamespace(
        __version__="14.2",
        RawKernel=lambda *_: lambda *_: None,
        asarray=np.array,  # a copy, as from host to GPU
        empty=empty,
        cuda=cuda,
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
        copied=copied,
    )


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(gpu_timer, "BATCH_SECONDS", 0.0)  # four calls a batch
    monkeypatch.setattr(gpu_timer, "ROTATED_BYTES", 1)  # two sets
    monkeypatch.setattr(gpu_timer._cuda, "nvrtc_version", lambda: (13, 3))
    device = gpu_timer.Gpu(fake_cupy(), None)
    monkeypatch.setattr(gpu_timer, "find", lambda: device)
    monkeypatch.setattr(providers, "require_gpu", lambda arrays: None)
    return device


def test_gpu_timings_write_every_provider_and_the_machine(gpu, tmp_path, capsys):
    options = ("--shapes", "64x96", "--op", "rms_norm+post_gate", "--dtype", "float32")
    chosen = ("--providers", "cunorm-cupy,cunorm,torch")
    out = tmp_path / "gpu.csv"
    assert timing.main([*SMALL, *options, *chosen, "--out", str(out)]) == 0
    rows = read_csv(out, Row)
    named = ["copy", "cunorm-cupy", "cunorm", "torch", "cunorm-ungated"]
    assert [row.provider for row in rows] == named * 2
    assert [row.direction for row in rows] == ["forward"] * 5 + ["backward"] * 5
    assert {(row.device, row.driver, row.threads) for row in rows} == {("a GPU", "13.1", 1)}
    assert all("NVRTC 13.3; cupy 14.2; torch" in row.versions for row in rows)
    assert all(row.host_us > 0 for row in rows)  # the host's time to queue a call
    assert all(row.p20_us <= row.p50_us <= row.p80_us for row in rows)
    point = Point(BY_LABEL["rms_norm+post_gate"], "forward", "float32", (64, 96))
    assert gpu._cupy.copied[0] == point.bytes // 2
    assert "× cunorm-ungated" in capsys.readouterr().out


def test_a_provider_with_its_own_stream_is_timed_to_the_end_of_its_last_call(gpu):
    waited = []
    turn = gpu.turn([lambda: "first", lambda: "second"], waited.append)
    waited.clear()
    assert turn.seconds() > 0
    assert waited == ["second"]  # the last of four calls in turn


def test_points_rotate_through_more_than_any_l2_as_far_as_memory_allows():
    point = Point(BY_LABEL["l2_norm"], "forward", "bfloat16", (1, 1 << 16))
    assert gpu_timer._sets(point, 1 << 40) * point.bytes >= 512 << 20
    assert gpu_timer._sets(point, 16 << 30) * point.bytes == 256 << 20
    assert gpu_timer._sets(point, 0) == 2


def test_rows_are_halved_only_until_two_sets_fit_the_memory():
    small = Point(BY_LABEL["l2_norm"], "forward", "bfloat16", (64, 1024))
    for free in (1 << 30, 8 << 30, 1 << 37):  # not to make room for more sets
        assert gpu_timer.Gpu(fake_cupy(free), None).fitting(small, 10) == small
    point = Point(BY_LABEL["group_norm NHWC"], "forward", "bfloat16", (20, 128, 256, 256))
    arrays = gpu_timer.OPERAND_ARRAYS + gpu_timer.ARRAYS_OF_ONE * 3
    needed = 2 * arrays * 2 * point.elements  # two sets
    for free, rows in ((needed, 20), (needed - 1, 10), (1, 1)):
        assert gpu_timer.Gpu(fake_cupy(free), None).fitting(point, 3).shape[0] == rows


def test_turns_go_on_with_the_set_that_was_used_least_recently(gpu):
    used = []
    calls = [[lambda name=name, i=i: used.append((name, i)) for i in range(11)] for name in "ab"]
    turns = [gpu.turn(some) for some in calls]
    used.clear()
    for turn in turns * 4:
        turn.seconds()  # four calls
    assert {name for name, _ in used} == {"a", "b"}
    sets = [index for _, index in used]
    assert sets == [(sets[0] + index) % 11 for index in range(32)]


def test_rows_are_in_the_csv_as_soon_as_they_are_timed(gpu, tmp_path, monkeypatch, capsys):
    time_point, out = engine.time_point, tmp_path / "gpu.csv"
    written = []

    def interrupted(device, point, *rest):
        written.append([(row.direction, row.provider) for row in read_csv(out, Row)])
        if point.direction == "backward":
            raise KeyboardInterrupt
        return time_point(device, point, *rest)

    monkeypatch.setattr(engine, "time_point", interrupted)
    with pytest.raises(KeyboardInterrupt):
        timing.main([*SMALL, *OURS, "--shapes", "64x96", "--out", str(out)])
    assert written == [[], [("forward", "copy"), ("forward", "cunorm-cupy")]]
    assert "rms_norm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("cunorm", 16), ("cunorm-ungated", 2), ("cunorm-autograd", 16)),
        *(("torch", 16), ("cunorm-jax", 14), ("jax", 9)),
    ],
)
def test_each_provider_computes_what_the_oracle_does(gpu, name, count):
    if "jax" in name:
        pytest.importorskip("jax", reason="JAX is not installed")
    provider = providers.LOADERS["cpu"][name]()
    operators = [one for one in OPERATORS if provider.supports(one)]
    assert len(operators) == count
    for operator in operators[:: 5 if "jax" in name else 1]:  # JAX compiles each, which is slow
        for direction in ("forward", "backward"):
            shape = (3, 64, 5, 3) if operator.of_channels else (9, 100)
            point = Point(operator, direction, "float32", shape)
            errors, failures = engine.check(gpu, point, [provider])
            assert not failures, failures[0]
            assert errors[name] <= TOLERANCE["float32"]


@pytest.mark.parametrize("name", ["cunorm", "cunorm-autograd", "torch"])
def test_a_provider_quantises_what_the_oracle_normalises(gpu, name):
    provider = providers.LOADERS["cpu"][name]()
    for operator in QUANTIZED:
        (direction,) = operator.directions
        point = Point(operator, direction, "float32", (9, 196))  # a short last block
        errors, failures = engine.check(gpu, point, [provider])
        assert not failures, failures[0]
        assert TOLERANCE["float32"] < errors[name] <= operator.tolerance("float32")


def test_a_provider_that_is_wrong_is_not_timed(monkeypatch, gpu):
    found = providers.load("cuda", ["cunorm-cupy", "torch"])
    right = found[0].calls

    def wrong(operator, direction, sets):
        return [lambda call=call: 1.01 * call() for call in right(operator, direction, sets)]

    monkeypatch.setattr(found[0], "calls", wrong)
    point = Point(BY_LABEL["rms_norm"], "forward", "float32", (64, 96))
    rows, (failure,) = engine.time_point(gpu, point, found, FACTS, 0.001)
    assert [row.provider for row in rows] == ["copy", "torch"]
    assert "wrong by 1.0e-02" in str(failure)
    assert failure.is_ours
    assert engine.failures_at(gpu, point, found) == 1  # what the smoke test and sanitizers count


def test_a_library_that_is_not_there_or_has_no_cuda_is_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (found,) = providers.load("cuda", ["liger", "cunorm-cupy", "torch"])
    assert found.name == "cunorm-cupy"
    printed = capsys.readouterr().err
    assert "liger is left out: ModuleNotFoundError: " in printed
    assert "torch is left out: ImportError: torch is built without CUDA" in printed
    assert providers.load("cpu", ["torch"])


def test_the_ungated_norm_has_its_own_bytes_and_the_copy_has_the_gated_norms_bytes(gpu):
    found = providers.load("cpu", ["cunorm-numpy", "cunorm-ungated"])
    point = Point(BY_LABEL["rms_norm+post_gate"], "forward", "float32", (64, 96))
    rows, failures = engine.time_point(gpu, point, found, FACTS, 0.001)
    assert not failures
    arrays = {row.provider: round(row.bytes / (4 * 64 * 96)) for row in rows}
    assert arrays == {"copy": 3, "cunorm-numpy": 3, "cunorm-ungated": 2}
    copy, ours, _ = rows
    assert (copy.of_copy, copy.error) == (pytest.approx(1), None)
    assert ours.of_copy == pytest.approx(copy.p50_us / ours.p50_us)
    assert ours.gb_per_s == pytest.approx(ours.bytes / ours.p50_us / 1e3)
