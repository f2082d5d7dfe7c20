# SPDX-License-Identifier: MIT
"""The row norms on a GPU, from CuPy, PyTorch and JAX arrays, held to the same bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bounds import check_backward, check_forward
from operands import (
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

import cunorm
from cunorm import NormForward, NormGrads

pytestmark = pytest.mark.gpu


class OnCupy:
    """Moves arrays between NumPy and CuPy; bfloat16 as the integers it is stored as."""

    def __init__(self) -> None:
        self.cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

    def put(self, array: Any) -> Any:
        return self.cupy.asarray(array.view(f"u{array.itemsize}")).view(array.dtype)

    def get(self, array: Any) -> Any:
        return self.cupy.asnumpy(array.view(f"u{array.itemsize}")).view(array.dtype)


class OnTorch:
    """Moves arrays between NumPy and PyTorch on CUDA."""

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        if not self.torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")

    def put(self, array: Any) -> Any:
        raw = self.torch.from_numpy(array.view(f"i{array.itemsize}"))
        return raw.cuda().view(getattr(self.torch, array.dtype.name))

    def get(self, tensor: Any) -> Any:
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        raw = tensor.view(getattr(self.torch, f"int{8 * dtype.itemsize}"))
        return raw.cpu().numpy().view(dtype)


class OnJax:
    """Moves arrays between NumPy and JAX on CUDA."""

    def __init__(self) -> None:
        self.jax = pytest.importorskip("jax", reason="JAX is not installed")
        try:
            self.device = self.jax.devices("cuda")[0]
        except RuntimeError as error:
            pytest.skip(f"this JAX has no CUDA: {error}")

    def put(self, array: Any) -> Any:
        if array.dtype == np.float64:
            pytest.skip("JAX has no float64 unless it is enabled")
        return self.jax.device_put(array, self.device)

    def get(self, array: Any) -> Any:
        return np.asarray(array)


@pytest.fixture(params=[OnCupy, OnTorch, OnJax], ids=["cupy", "torch", "jax"])
def gpu(request: Any) -> Any:
    return request.param()


def put_all(gpu: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: gpu.put(array) for name, array in arrays.items()}


def get_all(gpu: Any, result: Any) -> Any:
    return type(result)(*(None if field is None else gpu.get(field) for field in result))


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


ALL = {"weight_offset": 1.0, "center": True, "c": 3.0}
VARIANTS = {
    "pre-gate": {"gate_activation": "gelu", "gate_position": "pre"},
    "post-gate": {"gate_activation": "silu", "gate_position": "post"},
    "groups": {"groups": 4},
    "pre-gate, groups": {"gate_activation": "tanh", "gate_position": "pre", "groups": 4},
    "post-gate, groups, rounded": {
        "gate_activation": "gelu_tanh",
        "gate_position": "post",
        "groups": 4,
        "round_before_weight": True,
    },
}


def draw_variant(variant, dtype, width, rows=None):
    """Draw all operands, and what the norm is told besides; the gate is of another dtype than x."""
    norm = ALL | VARIANTS[variant]
    columns = width * norm.get("groups", 1)
    shape = (rows or row_count(columns), columns)
    given = {name: draw(name, shape, dtype) for name in ("x", "dy")}
    given |= {name: draw(name, shape, "float32") for name in ("residual", "d_residual")}
    given |= {name: draw(name, columns, "float32") for name in ("weight", "bias")}
    if "gate_position" in norm:
        given["gate"] = draw("gate", shape, "float16")
    return given, norm


def run_variant(on, norm, **more):
    """Run a forward with a residual, and its backward."""
    given = {name: on[name] for name in ("weight", "bias", "gate") if name in on}
    forward = cunorm.normalize_forward(on["x"], residual=on["residual"], **given, **norm)
    saved = {"rstd": forward.rstd, "mean": forward.mean, "d_residual": on["d_residual"]}
    saved |= {"x_dtype": on["x"].dtype}
    grads = cunorm.normalize_backward(on["dy"], forward.residual, **given, **saved, **norm, **more)
    return forward, grads


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gates_and_groups_are_within_their_bounds(gpu, variant, dtype):
    for width in (1, 33, 128, 1000, 4096, 20480):
        given, norm = draw_variant(variant, dtype, width)
        forward, grads = (get_all(gpu, r) for r in run_variant(put_all(gpu, given), norm))
        told = norm | {"gate": given.get("gate"), "eps": 1e-6}
        parameters = (given["weight"], given["bias"])
        with at(f"width {width}"):
            check_forward(forward, given["x"], *parameters, given["residual"], **told)
            back = (given["dy"], forward.residual, *parameters, given["d_residual"])
            worst = check_backward(grads, *back, x_dtype=DTYPES[dtype], **told)
            assert worst.keys() >= {"dx", "dresidual", "dweight", "dbias"}
            assert ("dgate" in worst) == ("gate" in given)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameter_gradients_are_added_to_arrays_with_one_rounding(gpu, variant):
    given, norm = draw_variant(variant, "bfloat16", 500, rows=300)
    on = put_all(gpu, given)
    wide = {f"d{name}": np.zeros(given[name].shape) for name in ("weight", "bias")}
    before = {name: draw(name, array.shape, "float32") for name, array in wide.items()}
    try:
        exact = NormGrads(**put_all(gpu, wide))
        out = NormGrads(**put_all(gpu, {name: array.copy() for name, array in before.items()}))
        run_variant(on, norm, out=exact)
        run_variant(on, norm, out=out, accumulate=True)
    except (TypeError, ValueError) as error:
        if type(gpu) is OnJax:
            assert "out" in str(error)  # JAX's arrays are immutable
            return
        raise
    for name, array in before.items():
        added = (array.astype(np.float64) + gpu.get(getattr(exact, name))).astype(np.float32)
        assert_same_bits(gpu.get(getattr(out, name)), added, name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gated_row_does_not_depend_on_the_others_and_repeats_to_the_bit(variant):
    gpu = OnCupy()
    given, norm = draw_variant(variant, "float32", 1000, rows=37)
    whole, again = (run_variant(put_all(gpu, given), norm) for _ in range(2))
    one = {n: a[5:6] if a.ndim == 2 else a for n, a in given.items()}
    alone = run_variant(put_all(gpu, one), norm)
    for results, same, part in zip(whole, again, alone, strict=True):
        for name, array in get_all(gpu, results)._asdict().items():
            if array is None:
                continue
            assert_same_bits(gpu.get(getattr(same, name)), array, name)
            if name not in ("dweight", "dbias"):
                assert_same_bits(gpu.get(getattr(part, name)), array[5:6], name)


@pytest.mark.parametrize("needs", [("x",), ("weight",), ("bias",), ("gate",)], ids=str)
@pytest.mark.parametrize("variant", ["pre-gate", "post-gate, groups, rounded"])
def test_a_gradient_alone_is_the_one_among_all_within_its_bound(gpu, variant, needs):
    given, norm = draw_variant(variant, "bfloat16", 1000)
    forward, grads = run_variant(put_all(gpu, given), norm, needs=needs)
    grads, stream = get_all(gpu, grads), gpu.get(forward.residual)
    back = (given["dy"], stream, given["weight"], given["bias"], given["d_residual"])
    told = norm | {"gate": given["gate"], "eps": 1e-6, "x_dtype": DTYPES["bfloat16"]}
    worst = check_backward(grads, *back, **told)
    assert worst.keys() == ({"dx", "dresidual"} if needs == ("x",) else {f"d{needs[0]}"})


def test_heads_of_a_fused_qkv_and_an_expanded_gate_are_read_where_they_are(gpu):
    qkv, gate = draw("x", (50, 3, 8, 64), "bfloat16"), draw("gate", (50, 1, 64), "bfloat16")
    weight = draw("weight", 64, "float32")
    on = put_all(gpu, {"x": qkv, "gate": gate, "weight": weight})
    q = on["x"][:, 1]
    wide = on["gate"].expand(50, 8, 64) if type(gpu) is OnTorch else None
    if type(gpu) is OnCupy:
        wide = gpu.cupy.broadcast_to(on["gate"], (50, 8, 64))
    told = {} if wide is None else {"gate": np.broadcast_to(gate, (50, 8, 64))}
    y = cunorm.rms_norm(q, on["weight"], gate=wide)
    check_forward(NormForward(gpu.get(y)), qkv[:, 1], weight, None, eps=1e-6, **told)


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
