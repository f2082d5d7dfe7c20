# SPDX-License-Identifier: MIT
"""The group norms on a GPU, from CuPy, PyTorch and JAX arrays, held to the same bounds.

Some of it, of which there are builds for a CPU anyway, on NumPy arrays too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import GroupNormForward, GroupNormGrads
from tests.support.gpu_arrays import OnCupy, OnJax, OnTorch
from tests.support.group_norm_cases import Results, Sizes, check
from tests.support.operands import assert_same_bits, at, draw, optional

gpu_only = pytest.mark.gpu

# Of which a block has whole groups, and of which it has not; in lines of any alignment.
SIZES = (
    Sizes(3, (7,), 3, 1),
    Sizes(2, (8, 8), 32, 8),
    Sizes(1, (31, 33), 40, 5),
    Sizes(2, (64, 64), 96, 6),
    Sizes(2, (16, 16), 320, 32),
    Sizes(20, (), 640, 32),
    Sizes(2, (5003,), 10, 10),
)


class OnNumpy:
    """Leaves arrays where they are."""

    def put(self, array: Any) -> Any:
        return array

    def get(self, array: Any) -> Any:
        return array


DEVICES = [pytest.param(on, marks=gpu_only) for on in (OnCupy, OnTorch, OnJax)]


@pytest.fixture(params=DEVICES, ids=["cupy", "torch", "jax"])
def gpu(request: Any) -> Any:
    return request.param()


@pytest.fixture(params=[OnNumpy, *DEVICES], ids=["numpy", "cupy", "torch", "jax"])
def anywhere(request: Any) -> Any:
    return request.param()


def laid_out(on: Any, array: Any, channel_axis: int, memory: str) -> Any:
    """Put an array on the device, its channels last or first in memory; JAX knows one order."""
    axis = {"last": -1, "first": 1}[memory]
    dense = on.put(np.array(np.moveaxis(array, channel_axis, axis), order="C"))
    axes = list(range(array.ndim))
    axes.insert(channel_axis % array.ndim, axes.pop(axis))
    permute = getattr(dense, "permute", None) or dense.transpose
    return permute(*axes)


def run(on: Any, x: Any, dy: Any, groups: int, channel_axis: int, activation: str | None) -> Any:
    """Run forward and backward; `group_norm_cases.run` for arrays of any device."""
    channels = x.shape[channel_axis]
    parameters = [on.put(optional(name, channels, "float32")) for name in ("weight", "bias")]
    told = {"activation": activation, "channel_axis": channel_axis}
    f = cunorm.group_norm_forward(x, groups, *parameters, **told)
    saved = {"mean": f.mean, "rstd": f.rstd}
    grads = cunorm.group_norm_backward(dy, x, groups, *parameters, **saved, **told)
    assert all(type(result) is type(x) for result in (*f, *grads))
    return Results(*map(on.get, (*f, *grads)))


def check_sizes(on: Any, dtype: str, memory: str, channel_axis: int, mean: float = 0.0) -> None:
    for sizes in SIZES:
        shape = sizes.shape(channel_axis)
        x, dy = draw("x", shape, dtype, mean=mean), draw("dy", shape, dtype)
        given = [laid_out(on, array, channel_axis, memory) for array in (x, dy)]
        results = run(on, *given, sizes.groups, channel_axis, "silu")
        with at(*sizes, mean):
            check(results, x, dy, sizes.groups, channel_axis, "silu")


@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize("channel_axis", [-1, 1])
@pytest.mark.parametrize("memory", ["last", "first"])
def test_both_layouts_are_within_their_bounds(anywhere, memory, channel_axis, mean):
    check_sizes(anywhere, "float32", memory, channel_axis, mean)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("memory", ["last", "first"])
def test_every_dtype_is_within_its_bounds(gpu, memory, dtype):
    check_sizes(gpu, dtype, memory, {"last": -1, "first": 1}[memory])


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "sigmoid", "tanh"])
def test_every_activation_is_within_its_bounds(gpu, activation):
    for sizes in SIZES[:4]:
        shape = sizes.shape(-1)
        x, dy = draw("x", shape, "float32"), draw("dy", shape, "float32")
        results = run(gpu, gpu.put(x), gpu.put(dy), sizes.groups, -1, activation)
        with at(*sizes):
            check(results, x, dy, sizes.groups, -1, activation)


@pytest.mark.parametrize("memory", ["last", "first"])
def test_a_sample_does_not_depend_on_the_others_nor_on_alignment_nor_on_the_run(anywhere, memory):
    channel_axis = {"last": -1, "first": 1}[memory]
    for sizes in (Sizes(9, (4096,), 96, 6), Sizes(9, (64,), 32, 8), Sizes(9, (31,), 40, 5)):
        shape, told = sizes.shape(channel_axis), (sizes.groups, channel_axis, "silu")
        arrays = [draw(name, shape, "float32") for name in ("x", "dy")]
        padded = [np.pad(array, [(0, 0), (0, 0), (1, 0)]) for array in arrays]
        whole, again = (run(anywhere, *map(anywhere.put, arrays), *told) for _ in range(2))
        alone = run(anywhere, *(anywhere.put(array[4:5]) for array in arrays), *told)
        shifted = run(anywhere, *(anywhere.put(array)[..., 1:] for array in padded), *told)
        for field in Results._fields:
            right = getattr(whole, field)
            with at(*sizes, field):
                assert_same_bits(getattr(again, field), right)
                assert_same_bits(getattr(shifted, field), right)
                if field in ("y", "mean", "rstd", "dx"):
                    assert_same_bits(getattr(alone, field), right[4:5])


@gpu_only
def test_torch_tensors_of_channels_last_give_such():
    gpu = OnTorch()
    torch = gpu.torch
    x, dy = (draw(name, (2, 32, 8, 8), "bfloat16") for name in ("x", "dy"))
    given = [gpu.put(array).to(memory_format=torch.channels_last) for array in (x, dy)]
    f = cunorm.group_norm_forward(given[0], 8, channel_axis=1)
    saved = {"mean": f.mean, "rstd": f.rstd, "channel_axis": 1}
    grads = cunorm.group_norm_backward(given[1], given[0], 8, **saved)
    for result in (f.y, grads.dx):
        assert result.is_contiguous(memory_format=torch.channels_last)


@gpu_only
def test_out_is_written_in_place_on_the_current_stream_and_captured_in_a_graph():
    gpu = OnTorch()
    torch = gpu.torch
    x, weight = draw("x", (4, 64, 64, 96), "float32"), draw("weight", 96, "float32")
    expected = gpu.get(cunorm.group_norm(gpu.put(x), 6, gpu.put(weight)))
    given = gpu.put(x), 6, gpu.put(weight)
    y, size = (
        torch.empty_like(given[0]),
        cunorm.workspace_size("group_norm", given[0], num_groups=6),
    )
    told = {"out": y, "workspace": torch.empty(size, dtype=torch.uint8, device="cuda")}
    assert cunorm.group_norm(*given, **told) is y
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cunorm.group_norm(*given, **told)
    given[0].mul_(2)
    graph.replay()
    assert_same_bits(gpu.get(y), gpu.get(cunorm.group_norm(*given)))
    given[0].mul_(0.5)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        given[0].mul_(4)
        given[0].mul_(0.25)
        assert cunorm.group_norm(*given, out=given[0]) is given[0]
    stream.synchronize()
    assert_same_bits(gpu.get(given[0]), expected)


@gpu_only
def test_no_samples_give_zero_parameter_gradients():
    gpu = OnCupy()
    x, weight = gpu.put(np.zeros((0, 5, 96), np.float32)), gpu.put(np.ones(96, np.float32))
    statistic = gpu.put(np.zeros((0, 6), np.float32))
    grads = cunorm.group_norm_backward(x, x, 6, weight, mean=statistic, rstd=statistic)
    assert isinstance(grads, GroupNormGrads)
    assert grads.dx.shape == (0, 5, 96)
    assert not gpu.get(grads.dweight).any()
    f = cunorm.group_norm_forward(x, 6, weight)
    assert isinstance(f, GroupNormForward)
    assert f.mean.shape == (0, 6)
