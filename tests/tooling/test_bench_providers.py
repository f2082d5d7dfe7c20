# SPDX-License-Identifier: MIT
"""The providers of the timings compute what the oracle does, and one that does not is left out."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from bench import engine, gpu_timer, providers
from bench.cases import OPERATORS, TOLERANCE
from bench.grid import Point
from bench.machine import Facts
from bench.providers.base import require_gpu
from tests.support.fake_gpu import fake_cupy

torch = pytest.importorskip("torch", reason="the bench compares with PyTorch")

BY_LABEL = {operator.label: operator for operator in OPERATORS}
FACTS = Facts("2026-01-02", "0123456", "a GPU", "13.1", "cunorm 0", 1)


@pytest.fixture(autouse=True)
def any_framework_will_do(monkeypatch):
    monkeypatch.setattr(providers, "require_gpu", lambda arrays: None)


@pytest.fixture(scope="module")
def gpu():
    return gpu_timer.Gpu(fake_cupy(), None)


def points_of(provider, dtype="float32"):
    for operator in OPERATORS:
        for direction in ("forward", "backward"):
            if provider.supports(operator, direction, dtype):
                shape = (3, 64, 5, 3) if operator.of_channels else (9, 96)
                yield Point(operator, direction, dtype, shape)


def assert_right(device, provider, dtype="float32"):
    operators = set()
    for point in points_of(provider, dtype):
        errors, failures = engine.check(device, point, [provider])
        assert not failures, failures[0]
        assert errors[provider.name] <= TOLERANCE[dtype]
        operators.add(point.operator.label)
    return operators


@pytest.mark.parametrize(
    ("name", "count"),
    [("cunorm", 16), ("cunorm-ungated", 2), ("cunorm-numpy", 16), ("torch", 16)],
)
def test_each_provider_computes_what_the_oracle_does(gpu, name, count):
    provider = providers.LOADERS["cpu"][name]()
    assert len(assert_right(gpu, provider)) == count


@pytest.mark.parametrize(("name", "count"), [("cunorm-jax", 14), ("jax", 9)])
def test_jax_computes_what_the_oracle_does(gpu, name, count):
    pytest.importorskip("jax", reason="without JAX it is no provider")
    assert len(assert_right(gpu, providers.LOADERS["cpu"][name]())) == count


def test_a_provider_that_is_wrong_is_not_timed(monkeypatch, gpu):
    monkeypatch.setattr(gpu_timer, "ROTATED_BYTES", 1)
    found, _ = providers.load("cuda", ["cunorm-cupy", "torch"])
    right = found[0].calls

    def wrong(operator, direction, sets):
        return [lambda call=call: 1.01 * call() for call in right(operator, direction, sets)]

    monkeypatch.setattr(found[0], "calls", wrong)
    point = Point(BY_LABEL["rms_norm"], "forward", "float32", (64, 96))
    rows, (failure,) = engine.time_point(gpu, point, found, FACTS, 0.001)
    assert [row.provider for row in rows] == ["copy", "torch"]
    assert "wrong by 1.0e-02" in str(failure)
    assert failure.is_ours


def test_a_library_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    found, failures = providers.load("cuda", ["liger", "cunorm-cupy"])
    assert [provider.name for provider in found] == ["cunorm-cupy"]
    assert isinstance(failures["liger"], ImportError)


def test_a_torch_without_cuda_is_left_out_on_a_gpu(monkeypatch):
    monkeypatch.setattr(providers, "require_gpu", require_gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, failures = providers.load("cuda", ["cunorm", "cunorm-cupy", "torch"])
    assert [provider.name for provider in found] == ["cunorm-cupy"]
    assert list(failures) == ["cunorm", "torch"]
    for error in failures.values():
        assert isinstance(error, ImportError)
        assert "without CUDA" in str(error)
    assert providers.load("cpu", ["torch"])[0]


def test_the_ungated_has_its_own_bytes_and_the_copy_those_of_the_gated(monkeypatch, gpu):
    monkeypatch.setattr(gpu_timer, "ROTATED_BYTES", 1)
    found, _ = providers.load("cpu", ["cunorm-numpy", "cunorm-ungated"])
    point = Point(BY_LABEL["rms_norm+post_gate"], "forward", "float32", (64, 96))
    rows, failures = engine.time_point(gpu, point, found, FACTS, 0.001)
    assert not failures
    arrays = {row.provider: round(row.bytes / (4 * 64 * 96)) for row in rows}
    assert arrays == {"copy": 3, "cunorm-numpy": 3, "cunorm-ungated": 2}
    copy, ours, _ = rows
    assert copy.of_copy == pytest.approx(1)
    assert ours.of_copy == pytest.approx(copy.p50_us / ours.p50_us)
    assert ours.gb_per_s == pytest.approx(ours.bytes / ours.p50_us / 1e3)
    assert np.isfinite(ours.error)
    assert copy.error is None
