# SPDX-License-Identifier: MIT
"""The row norms on a GPU, from CuPy, PyTorch and JAX arrays, held to the same bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import NormForward, NormGrads
from tests.support.bounds import check_backward, check_forward
from tests.support.gpu_arrays import OnCupy, OnJax, OnTorch, get_all, put_all
from tests.support.operands import (
    DTYPES,
    NORMS,
    WIDTHS,
    assert_same_bits,
    at,
    draw,
    parameters,
    row_count,
    saved,
    weight_and_bias,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[OnCupy, OnTorch, OnJax], ids=["cupy", "torch", "jax"])
def gpu(request: Any) -> Any:
    return request.param()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_forward_and_backward_are_within_their_bounds(gpu, name, dtype):
    norm = NORMS[name]
    for width in WIDTHS:
        shape = (row_count(width), width)
        x, dy = draw("x", shape, dtype), draw("dy", shape, dtype)
        given = parameters(norm, width, dtype)
        on_gpu = put_all(gpu, {"x": x, "dy": dy, **given})
        params = {key: on_gpu[key] for key in given}
        forward = getattr(cunorm, f"{name}_forward")(on_gpu["x"], **params, **norm.asked())
        backward = getattr(cunorm, f"{name}_backward")
        grads = backward(
            on_gpu["dy"], on_gpu["x"], **params, **saved(norm, forward), **norm.asked()
        )
        assert type(forward.y) is type(grads.dx) is type(on_gpu["x"])
        operands, meaning = weight_and_bias(given), norm.meaning(width)
        with at(f"width {width}"):
            check_forward(get_all(gpu, forward), x, *operands, **meaning)
            check_backward(get_all(gpu, grads), dy, x, *operands, **meaning)


def test_a_float32_stream_takes_a_bfloat16_branch_and_gives_both_gradients(gpu):
    shape = (1000, 1024)
    x, dy = draw("x", shape, "bfloat16"), draw("dy", shape, "bfloat16")
    residual, d_residual = draw("residual", shape, "float32"), draw("d", shape, "float32")
    weight = draw("weight", 1024, "float32")
    given = {"x": x, "dy": dy, "residual": residual, "d_residual": d_residual, "weight": weight}
    on = put_all(gpu, given)
    forward = cunorm.rms_norm_forward(on["x"], on["weight"], residual=on["residual"])
    check_forward(get_all(gpu, forward), x, weight, None, residual, eps=1e-6)
    grads = cunorm.rms_norm_backward(
        on["dy"],
        forward.residual,
        on["weight"],
        rstd=forward.rstd,
        d_residual=on["d_residual"],
        x_dtype="bfloat16",
    )
    grads, stream = get_all(gpu, grads), gpu.get(forward.residual)
    assert grads.dx.dtype == DTYPES["bfloat16"]
    assert grads.dresidual.dtype == np.float32
    check_backward(grads, dy, stream, weight, None, d_residual, eps=1e-6)


@pytest.mark.parametrize("width", (64, 1000, 8192, 65536))
def test_a_row_does_not_depend_on_the_others_nor_on_alignment(width):
    gpu = OnCupy()
    x = draw("x", (37, width), "float32")
    weight = gpu.put(draw("weight", width, "float32"))
    whole = gpu.get(cunorm.layer_norm(gpu.put(x), weight))
    alone = gpu.get(cunorm.layer_norm(gpu.put(x[5:6]), weight))
    assert_same_bits(alone, whole[5:6])
    padded = gpu.cupy.zeros((37, width + 1), np.float32)
    padded[:, 1:] = gpu.put(x)
    assert_same_bits(gpu.get(cunorm.layer_norm(padded[:, 1:], weight)), whole)


def test_parameter_gradients_repeat_to_the_bit():
    gpu = OnCupy()
    x, dy = gpu.put(draw("x", (5000, 768), "float32")), gpu.put(draw("dy", (5000, 768), "float32"))
    weight = gpu.put(draw("weight", 768, "float32"))
    rstd = cunorm.rms_norm_forward(x, weight).rstd
    first, second = (cunorm.rms_norm_backward(dy, x, weight, rstd=rstd) for _ in range(2))
    assert_same_bits(gpu.get(first.dweight), gpu.get(second.dweight))


def test_out_is_written_in_place_and_on_the_current_stream():
    gpu = OnTorch()
    torch = gpu.torch
    x = draw("x", (512, 4096), "float32")
    expected = gpu.get(cunorm.rms_norm(gpu.put(x)))
    tensor = gpu.put(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        tensor.mul_(2)
        tensor.mul_(0.5)
        assert cunorm.rms_norm(tensor, out=tensor) is tensor
    stream.synchronize()
    assert_same_bits(gpu.get(tensor), expected)


def test_calls_are_captured_in_a_cuda_graph_after_one_warm_call():
    gpu = OnTorch()
    torch = gpu.torch
    x = gpu.put(draw("x", (64, 1024), "float32"))
    y = torch.empty_like(x)
    cunorm.rms_norm(x, out=y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cunorm.rms_norm(x, out=y)
    x.copy_(gpu.put(draw("other", (64, 1024), "float32")))
    graph.replay()
    check_forward(NormForward(gpu.get(y)), gpu.get(x), None, None, eps=1e-6)


def test_zero_rows_give_zero_parameter_gradients():
    gpu = OnCupy()
    empty, weight = gpu.put(np.zeros((0, 96), np.float32)), gpu.put(np.ones(96, np.float32))
    rstd = gpu.put(np.zeros(0, np.float32))
    grads = cunorm.rms_norm_backward(empty, empty, weight, rstd=rstd)
    assert isinstance(grads, NormGrads)
    assert grads.dx.shape == (0, 96)
    assert not gpu.get(grads.dweight).any()
