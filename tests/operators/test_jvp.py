# SPDX-License-Identifier: MIT
"""Tangents of norms: `normalize_jvp`, its named forms, `group_norm_jvp`, and that of dx."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.support.internals import ACTIVATIONS
from tests.support.jvp import JvpCall
from tests.support.operands import DTYPES, assert_same_bits, draw
from tests.support.ulps import assert_within, rounding, unit

RMS = {"center": False, "bias": None}
# Rows near zero and far from it, one column, several rows of a parameter, rows with many axes.
DATA: dict[str, dict[str, Any]] = {
    "near zero": {},
    "far from zero": {"mean": 1e4, "c": 3.0},
    "one column": {"shape": (7, 1), "mean": 3.0},
    "own parameters": {"shape": (2, 3, 34), "own": (2, 1)},
    "several axes": {"shape": (3, 4, 2, 17), "axis": -2},
    "small deviation": {"mean": 300.0, "deviation": 1e-3, "eps": 1e-12},
    "only x": {"tangents": ("x",)},
    "only weight": {"tangents": ("weight",), "mean": 30.0},
    "only bias": {"tangents": ("bias",), "bias": "float32"},
    "no rows": {"shape": (0, 34)},
}


IN_CI = [(name, data) for name in ("layer_norm", "rms_norm") for data in [*DATA][:4]]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        pytest.param(*one, marks=() if one in IN_CI else pytest.mark.exhaustive)
        for one in product(("layer_norm", "rms_norm"), DATA)
    ],
)
def test_tangents_are_those_of_the_oracle(name, data):
    JvpCall((RMS if name == "rms_norm" else {}) | DATA[data]).check()


def drawn(seed: int) -> dict[str, Any]:
    """Draw a case."""
    rng = random.Random(seed)
    x = rng.choice([*DTYPES])
    case: dict[str, Any] = {"x": x, "dy": rng.choice([x, "float32"]), "seed": seed}
    case |= {name: rng.choice([None, x, "float32"]) for name in ("weight", "bias")}
    case |= {"tangent": rng.choice([None, "float32", "bfloat16"]), "center": rng.random() < 0.6}
    case |= {"c": rng.choice([None, 1.0, 3.0]), "weight_offset": rng.choice([0.0, 1.0])}
    width = rng.choice([1, 2, 7, 16, 33, 128, 501, 2048, 20_000])
    case["shape"] = (*rng.choice([(1,), (6,), (2, 3), (2, 1, 3)]), width)
    far = {"float16": 30.0, "bfloat16": 300.0}.get(x, 1e4)
    case |= {"mean": rng.choice([0.0, far, -far]), "eps": rng.choice([1e-5, 1e-2])}
    if rng.random() < 0.2:
        case["groups"] = rng.choice([n for n in (1, 2, 3) if width % n == 0])
    elif rng.random() < 0.2 and len(case["shape"]) > 2:
        case["axis"] = -2
    elif rng.random() < 0.3 and len(case["shape"]) == 3:
        case["own"] = (2, 1)
    if rng.random() < 0.6:
        case |= {"gate": rng.choice([x, "float32"]), "gate_position": rng.choice(["pre", "post"])}
        case["gate_activation"] = rng.choice([*ACTIVATIONS])
        case |= {"mean": 0.0} if case["gate_position"] == "pre" else {}
    case["round_before_weight"] = rng.random() < 0.3
    given = [one for one in ("x", "weight", "bias", "gate") if one == "x" or case.get(one)]
    case["tangents"] = tuple(one for one in given if rng.random() < 0.75) or ("x",)
    case["dtype"] = rng.choice([None, "float32", "bfloat16"])
    return case


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(200))
def test_drawn_tangents_are_those_of_the_oracle(seed):
    JvpCall(drawn(seed)).check()


def test_a_jvp_is_the_transpose_of_the_backward():
    """The sum of dy * y' is the sum of each gradient times its tangent."""
    case = {"gate": "float64", "mean": 3.0, "weight_offset": 1.0}
    for position in ("pre", "post"):
        call = JvpCall(
            case
            | dict.fromkeys(("x", "weight", "bias", "dy"), "float64")
            | {"gate_position": position}
        )
        grads = cunorm.normalize_backward(
            call.dy, **call.operands, **call.statistics, **call.options
        )
        forward = (call.dy * call.jvp()).sum()
        reverse = sum(
            (getattr(grads, f"d{name}") * call.tangents[f"{name}_tangent"]).sum()
            for name in ("x", "weight", "bias", "gate")
        )
        assert forward == pytest.approx(reverse, rel=1e-12)


def test_the_derivative_of_dx_is_symmetric_in_dr_and_the_tangent():
    call = JvpCall(dict.fromkeys(("x", "dy"), "float64") | {"weight": None, "mean": 3.0})
    first = call.second()
    call.dy, call.tangents["x_tangent"] = call.tangents["x_tangent"], call.dy
    np.testing.assert_allclose(call.second(), first, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "l2_norm"])
def test_named_forms_are_those_of_normalize(name):
    x, v = draw("x", (5, 34), "float32", mean=1.0), draw("v", (5, 34), "float32")
    saved = getattr(cunorm, f"{name}_forward")(x)
    options = {"rstd": saved.rstd, "x_tangent": v}
    if name == "layer_norm":
        options["mean"] = saved.mean
    generic = {"center": name == "layer_norm", "c": 1 if name == "l2_norm" else None}
    expected = cunorm.normalize_jvp(x, **options, **generic)
    assert_same_bits(getattr(cunorm, f"{name}_jvp")(x, **options), expected)
    exact = getattr(reference, f"{name}_jvp")(x, **options)
    np.testing.assert_allclose(expected, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["x", "x_tangent"])
def test_a_tangent_may_be_written_over_an_input_and_has_the_same_bits(name):
    call = JvpCall({"shape": (5, 3000)})
    expected = call.jvp()
    given = (call.operands | call.tangents)[name]
    assert call.jvp(out=given) is given
    assert_same_bits(given, expected)


def test_no_bit_of_a_row_depends_on_other_rows_or_on_strides():
    call, apart = JvpCall({"shape": (40, 700), "gate": "float32"}), slice(7, 9)
    expected = call.jvp()[apart]
    for arrays in (call.operands, call.tangents, call.statistics):
        for name, array in arrays.items():
            if name in ("mean", "rstd"):
                arrays[name] = array[apart].copy()
            elif array.ndim == 2:
                arrays[name] = np.empty((2, 701), array.dtype)[:, 1:]
                arrays[name][...] = array[apart]
    assert_same_bits(call.jvp(), expected)


# --- group norms ----------------------------------------------------------------------------------

GROUPS = [
    ("float32", (3, 50, 32), 4, "silu", (), "wb"),
    ("float32", (3, 50, 32), 4, None, (), "w"),
    ("bfloat16", (2, 7, 9, 33), 3, "gelu", (), "wb"),
    ("float64", (2, 1000, 16), 2, "tanh", (2,), "wb"),
    ("float16", (5, 64, 32), 32, "relu", (1,), ""),
    ("float32", (2, 9000, 8), 1, "sigmoid", (), "b"),
]


GROUPS_IN_CI = [(-1, GROUPS[0]), (1, GROUPS[2])]


@pytest.mark.parametrize(
    ("channel_axis", "case"),
    [
        pytest.param(*one, marks=() if one in GROUPS_IN_CI else pytest.mark.exhaustive)
        for one in product((-1, 1), GROUPS)
    ],
)
def test_tangents_of_group_norms_are_those_of_the_oracle(case, channel_axis):
    dtype, shape, num_groups, activation, own, tangents = case
    channels = shape[-1]
    shape = shape if channel_axis == -1 else (shape[0], channels, *shape[1:-1])
    mean = 30.0 if dtype in ("float16", "bfloat16") else 1e4
    x, v = draw("x", shape, dtype, mean=mean), draw("v", shape, dtype)
    row = (*own, channels)
    weight, bias = draw("weight", row, dtype, mean=1.0), draw("bias", row, "float32")
    given = {"x_tangent": v}
    given |= {"weight_tangent": draw("dw", row, "float32")} if "w" in tangents else {}
    given |= {"bias_tangent": draw("db", row, dtype)} if "b" in tangents else {}
    options = {"activation": activation, "channel_axis": channel_axis}
    saved = reference.group_norm_forward(x, num_groups, weight, bias, **options)
    compute = "float64" if dtype == "float64" else "float32"
    given |= {"mean": saved.mean.astype(compute), "rstd": saved.rstd.astype(compute)}
    got = cunorm.group_norm_jvp(x, num_groups, weight, bias, **given, **options)
    exact = reference.group_norm_jvp(x, num_groups, weight, bias, **given, **options)
    assert got.strides == x.strides
    # An activation's derivative is off by that of n, which has a few roundings of its own.
    error = 32 * unit(compute) * np.abs(exact).max()
    assert_within(got, exact, error + rounding(np.abs(exact) + error, dtype, compute))


def test_a_group_norms_jvp_is_the_transpose_of_its_backward():
    x, v, dy = (draw(name, (2, 50, 32), "float64", mean=1.0) for name in ("x", "v", "dy"))
    weight, bias, dw, db = (draw(name, 32, "float64") for name in ("weight", "bias", "dw", "db"))
    saved = cunorm.group_norm_forward(x, 4, weight, bias, activation="silu")
    given = {"mean": saved.mean, "rstd": saved.rstd, "activation": "silu"}
    tangents = {"x_tangent": v, "weight_tangent": dw, "bias_tangent": db}
    forward = cunorm.group_norm_jvp(x, 4, weight, bias, **given, **tangents)
    grads = cunorm.group_norm_backward(dy, x, 4, weight, bias, **given)
    forward, *reverse = (
        (one.astype(float) * other).sum()
        for one, other in ((forward, dy), (grads.dx, v), (grads.dweight, dw), (grads.dbias, db))
    )
    assert forward == pytest.approx(sum(reverse), rel=1e-12)
