# SPDX-License-Identifier: MIT
"""Gates, groups, offsets and roundings of the row norms on a GPU, held to the same bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import NormForward, NormGrads
from tests.support.bounds import check_backward, check_forward
from tests.support.gpu_arrays import OnCupy, OnJax, OnTorch, get_all, put_all
from tests.support.operands import DTYPES, assert_same_bits, at, draw, row_count

pytestmark = pytest.mark.gpu

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


@pytest.fixture(params=[OnCupy, OnTorch, OnJax], ids=["cupy", "torch", "jax"])
def gpu(request: Any) -> Any:
    return request.param()


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


@pytest.mark.parametrize("kind", [OnCupy, OnTorch])  # JAX's arrays are immutable
@pytest.mark.parametrize("variant", VARIANTS)
def test_parameter_gradients_are_added_to_arrays_with_one_rounding(kind, variant):
    gpu = kind()
    given, norm = draw_variant(variant, "bfloat16", 500, rows=300)
    on = put_all(gpu, given)
    wide = {f"d{name}": np.zeros(given[name].shape) for name in ("weight", "bias")}
    before = {name: draw(name, array.shape, "float32") for name, array in wide.items()}
    exact = NormGrads(**put_all(gpu, wide))
    out = NormGrads(**put_all(gpu, {name: array.copy() for name, array in before.items()}))
    run_variant(on, norm, out=exact)
    run_variant(on, norm, out=out, accumulate=True)
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
