# SPDX-License-Identifier: MIT
"""Gates, groups, offsets and roundings of the row norms, on any device."""

import numpy as np
import pytest

import cunorm
from tests.support.bounds import check_backward, check_forward
from tests.support.gpu_arrays import OnCupy, OnJax, OnTorch, get_all, put_all
from tests.support.operands import DTYPES, assert_same_bits, at, draw, row_count

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
variants = pytest.mark.parametrize("variant", VARIANTS)
HOST_WIDTHS = (1, 2, 31, 33, 127, 128, 1000, 4096, 20480)


def drawn(variant, dtype, width, rows=None):
    """Draw all operands, and what the norm is told besides; the gate is of another dtype than x."""
    norm = ALL | VARIANTS[variant]
    columns = width * norm.get("groups", 1)
    shape = (rows or row_count(columns), columns)
    wide = "float64" if dtype == "float64" else "float32"
    given = {name: draw(name, shape, dtype) for name in ("x", "dy")}
    given |= {name: draw(name, shape, wide) for name in ("residual", "d_residual")}
    given |= {name: draw(name, columns, "float32") for name in ("weight", "bias")}
    if "gate_position" in norm:
        given["gate"] = draw("gate", shape, "float16")
    return given, norm


def run(on, given, norm, **more):
    """Run a forward with a residual, and its backward."""
    there = put_all(on, given)
    named = {name: there[name] for name in ("weight", "bias", "gate") if name in there}
    f = cunorm.normalize_forward(there["x"], residual=there["residual"], **named, **norm)
    saved = {"rstd": f.rstd, "mean": f.mean, "d_residual": there["d_residual"]}
    saved |= {"x_dtype": there["x"].dtype}
    grads = cunorm.normalize_backward(there["dy"], f.residual, **named, **saved, **norm, **more)
    return get_all(on, f), get_all(on, grads)


def check(given, norm, f, grads):
    told = norm | {"gate": given.get("gate"), "eps": 1e-6}
    parameters = (given["weight"], given["bias"])
    check_forward(f, given["x"], *parameters, given["residual"], **told)
    back = (given["dy"], f.residual, *parameters, given["d_residual"])
    return check_backward(grads, *back, x_dtype=given["x"].dtype, **told)


@pytest.mark.parametrize("dtype", DTYPES)
@variants
def test_gates_and_groups_are_within_their_bounds(anywhere, variant, dtype):
    narrow = dtype in ("float16", "float64")
    for width in (33, 1000)[narrow::2] if anywhere.is_gpu else HOST_WIDTHS:
        given, norm = drawn(variant, dtype, width, rows=5 if anywhere.is_gpu else None)
        with at(f"width {width}"):
            worst = check(given, norm, *run(anywhere, given, norm))
            expected = {"dx", "dresidual", "dweight", "dbias"}
            assert worst.keys() == expected | ({"dgate"} if "gate" in given else set())


@pytest.mark.parametrize("needs", [("x",), ("weight",), ("bias",), ("gate",)], ids=str)
@pytest.mark.parametrize("variant", ["pre-gate", "post-gate, groups, rounded"])
def test_a_gradient_alone_is_the_one_among_all(device, variant, needs):
    given, norm = drawn(variant, "bfloat16", 33, rows=7)
    whole, grads = run(device, given, norm)[1], run(device, given, norm, needs=needs)[1]
    wanted = {"dx", "dresidual"} if needs == ("x",) else {f"d{needs[0]}"}
    for field in grads._fields:
        assert (getattr(grads, field) is not None) == (field in wanted)
    if device.is_gpu and needs[0] in ("weight", "bias"):  # other plans may add in another order
        check(given, norm, run(device, given, norm)[0], grads)
        return
    for field in wanted:
        assert_same_bits(getattr(grads, field), getattr(whole, field), field)


def test_heads_of_a_fused_qkv_and_an_expanded_gate_are_read_where_they_are(anywhere):
    qkv, gate = draw("x", (50, 3, 8, 64), "bfloat16"), draw("gate", (50, 1, 64), "bfloat16")
    weight = draw("weight", 64, "float32")
    there = put_all(anywhere, {"x": qkv, "gate": gate, "weight": weight})
    wide = {
        OnTorch: lambda array: array.expand(50, 8, 64),
        OnCupy: lambda array: anywhere.cupy.broadcast_to(array, (50, 8, 64)),
        OnJax: lambda array: None,
    }.get(type(anywhere), lambda array: np.broadcast_to(array, (50, 8, 64)))(there["gate"])
    told = {} if wide is None else {"gate": np.broadcast_to(gate, (50, 8, 64))}
    f = cunorm.rms_norm_forward(there["x"][:, 1], there["weight"], gate=wide)
    check_forward(get_all(anywhere, f), qkv[:, 1], weight, None, eps=1e-6, **told)


def test_the_new_stream_and_its_gradient_pass_a_gate_untouched(device):
    given, norm = drawn("pre-gate, groups", "float32", 33, rows=7)
    given["dy"] = np.zeros_like(given["dy"])
    f, grads = run(device, given, norm)
    assert_same_bits(f.residual, given["x"] + given["residual"])
    assert_same_bits(grads.dx, given["d_residual"])
    assert not grads.dgate.any()


def test_swish_is_silu_and_the_default():
    x, gate = draw("x", (5, 40), "float32"), draw("gate", (5, 40), "float32")
    y = cunorm.rms_norm(x, gate=gate)
    for name in ("silu", "swish"):
        assert_same_bits(cunorm.rms_norm(x, gate=gate, gate_activation=name), y)
    x = draw("x", (3, 7, 10), "float32")
    y = cunorm.group_norm(x, 5, activation="silu")
    assert_same_bits(cunorm.group_norm(x, 5, activation="swish"), y)
