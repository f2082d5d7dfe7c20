# SPDX-License-Identifier: MIT
"""The providers of the timings compute what the oracle does, and one that does not is left out."""

from __future__ import annotations

import sys
from types import ModuleType

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


# --- libraries that need a GPU: stand-ins that take what these take ------------------------------


def layer_norm(x, weight, bias, eps):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x, weight, eps, offset=0.0):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight + offset, eps)


def module_of(monkeypatch, name, **functions):
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules.get(parent) or module_of(monkeypatch, parent), child, module)
    return module


def function_of(apply):
    return type("Function", (), {"apply": staticmethod(apply)})


def stand_in_for_liger(monkeypatch):
    def rms(x, weight, eps, offset, casting_mode, in_place):
        assert (casting_mode, in_place) == ("gemma", False)
        return rms_norm(x, weight, eps, offset)

    def add(x, residual, weight, eps, offset, casting_mode, in_place):
        return rms(x + residual, weight, eps, offset, casting_mode, in_place), x + residual

    def group(x, weight, bias, num_channels, num_groups, eps):
        assert num_channels == x.shape[1]
        return torch.nn.functional.group_norm(x, num_groups, weight, bias, eps)

    module_of(
        monkeypatch,
        "liger_kernel.ops",
        LigerRMSNormFunction=function_of(rms),
        LigerFusedAddRMSNormFunction=function_of(add),
        LigerLayerNormFunction=function_of(layer_norm),
        LigerGroupNormFunction=function_of(group),
    )
    return {"rms_norm", "rms_norm+offset", "add_rms_norm", "layer_norm", "group_norm NCHW"}


def stand_in_for_fla(monkeypatch):
    def with_residual(norm):
        def call(x, weight, bias, residual=None, eps=1e-5, prenorm=False):
            stream = x if residual is None else x + residual
            y = norm(stream, weight, bias, eps)
            return (y, stream) if prenorm else y

        return call

    def gated(x, g, weight, bias, activation="swish", eps=1e-6):
        assert (bias, activation) == (None, "swish")
        return rms_norm(x, weight, eps) * torch.nn.functional.silu(g)

    rms = with_residual(lambda x, weight, bias, eps: rms_norm(x, weight, eps))
    layer = with_residual(layer_norm)
    l2 = torch.nn.functional.normalize
    module_of(monkeypatch, "fla.modules.layernorm", rms_norm=rms, layer_norm=layer)
    module_of(monkeypatch, "fla.modules.fused_norm_gate", rms_norm_gated=gated)
    module_of(monkeypatch, "fla.modules.l2norm", l2_norm=lambda x, eps: l2(x, dim=-1, eps=eps))
    names = {"rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"}
    return names | {"rms_norm+post_gate", "l2_norm"}


def stand_in_for_quack(monkeypatch):
    def rms(x, weight, residual=None, eps=1e-6, prenorm=False, weight_offset=0.0):
        stream = x if residual is None else x + residual
        y = rms_norm(stream, weight, eps, weight_offset)
        return (y, stream) if prenorm else y

    def layer_norm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
        assert weight.dtype == bias.dtype == torch.float32
        y = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)
        rstd = (x.float().var(-1, correction=0) + eps).rsqrt()
        return (y, rstd, x.float().mean(-1)) if return_rstd and return_mean else y

    def layer_norm_bwd(x, weight, dout, rstd, mean, has_bias=True):
        n = (x.float() - mean[:, None]) * rstd[:, None]
        dn = dout.float() * weight
        dx = dn - dn.mean(-1, keepdim=True) - n * (dn * n).mean(-1, keepdim=True)
        return (dx * rstd[:, None]).to(x.dtype), (dout * n).sum(0), dout.float().sum(0)

    module_of(
        monkeypatch,
        "quack.rmsnorm",
        rmsnorm=rms,
        layernorm_fwd=layer_norm_fwd,
        layernorm_bwd=layer_norm_bwd,
    )
    sys.modules["quack"].rmsnorm = rms  # as quack/__init__.py has it
    return {"rms_norm", "rms_norm+offset", "add_rms_norm", "layer_norm"}


STAND_INS = {"liger": stand_in_for_liger, "fla": stand_in_for_fla, "quack": stand_in_for_quack}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", STAND_INS)
def test_libraries_for_gpus_are_given_what_they_take(monkeypatch, gpu, name, dtype):
    expected = STAND_INS[name](monkeypatch)
    (provider,), failures = providers.load("cuda", [name])
    assert not failures
    assert assert_right(gpu, provider, dtype) == expected


# --- what goes wrong -----------------------------------------------------------------------------


def test_a_library_whose_functions_differ_is_reported_alone(monkeypatch, gpu):
    monkeypatch.setattr(gpu_timer, "ROTATED_BYTES", 1)
    stand_in_for_fla(monkeypatch)
    sys.modules["fla.modules.layernorm"].rms_norm = lambda x, weight: x  # another's API
    found, _ = providers.load("cuda", ["cunorm-cupy", "fla", "torch"])
    point = Point(BY_LABEL["rms_norm"], "forward", "float32", (64, 96))
    rows, (failure,) = engine.time_point(gpu, point, found, FACTS, 0.001)
    assert [row.provider for row in rows] == ["copy", "cunorm-cupy", "torch"]
    assert "rms_norm forward float32 64x96, fla: TypeError" in str(failure)
    assert not failure.is_ours


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
