# SPDX-License-Identifier: MIT
"""The oracle's contract besides its formulas: where it rounds, and its arguments."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.support.host_code import nearest_even
from tests.support.operands import DTYPES
from tests.support.reference_cases import group_norm, operands, row_norm

BFLOAT16 = DTYPES["bfloat16"]
PAIRS = list(itertools.product(DTYPES.values(), repeat=2))
GATED = ("weight", "bias", "gate")


# --- rounding -------------------------------------------------------------------------------------


def test_float64_is_rounded_once_to_bfloat16():
    numbers = np.arange(0x7F00, dtype=np.uint16).view(BFLOAT16).astype(np.float64)
    middles = (numbers[1:] + numbers[:-1]) / 2
    near_ties = [middles, middles * (1 + 2.0**-40), middles * (1 - 2.0**-40), numbers]
    values = np.concatenate([*near_ties, operands((1000,)).x, [5e-324, 1e-60, np.inf, 1e39]])
    values = np.concatenate([values, -values])
    got = reference.round_to(values, BFLOAT16)
    assert got.dtype == BFLOAT16
    np.testing.assert_array_equal(got.view(np.uint16), nearest_even("bfloat16", values))
    assert np.isnan(reference.round_to(np.array([np.nan]), BFLOAT16))


@pytest.mark.parametrize(("x_dtype", "expected"), [(np.float32, 1.0), (np.float64, 1 + 2.0**-10)])
def test_the_sum_is_float32_unless_an_operand_is_float64(x_dtype, expected):
    # The sum exceeds a tie of float16 by less than float32 can resolve.
    x = np.array([[2.0**-11 + 2.0**-34]], x_dtype)
    result = reference.normalize_forward(x, residual=np.ones((1, 1), np.float16))
    assert result.residual.astype(np.float64) == expected


@pytest.mark.parametrize(("x_dtype", "residual_dtype"), PAIRS, ids=str)
def test_add_is_sum_then_norm_and_without_a_residual_the_stream_is_x(x_dtype, residual_dtype):
    a = operands()
    x, residual = a.x.astype(x_dtype), a.residual.astype(residual_dtype)
    for name in ("normalize", "rms_norm", "layer_norm"):
        parameters = [a.weight, a.bias][: 1 if name == "rms_norm" else 2]
        norm, add = getattr(reference, name), getattr(reference, f"add_{name}")
        result = add(x, residual, *parameters)
        np.testing.assert_array_equal(result.y, norm(result.residual, *parameters))
        result = add(x, None, residual_dtype=residual_dtype)
        np.testing.assert_array_equal(result.residual, reference.round_to(x, residual_dtype))
        np.testing.assert_array_equal(result.y, norm(result.residual))
    stream = reference.add_normalize(x, None).residual
    np.testing.assert_array_equal(stream, x)
    assert not np.shares_memory(stream, x)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)], ids=str)
def test_rounding_before_weight_is_to_the_dtype_of_x_and_not_of_the_stream(dtype):
    a = operands()
    x, options = reference.round_to(a.x, dtype), {"residual": a.residual, "c": 3.0}
    kr = reference.normalize_forward(x, **options).y
    n = reference.round_to(kr, dtype).astype(np.float64)
    assert np.any(n != kr)
    for weight, bias in itertools.product((None, a.weight), (None, a.bias)):
        f = reference.normalize_forward(x, weight, bias, round_before_weight=True, **options)
        expected = n * (1.0 if weight is None else weight) + (0.0 if bias is None else bias)
        np.testing.assert_array_equal(f.y, expected)


def test_the_backward_rounds_to_x_dtype_only_in_dweight_and_dgate():
    a = operands()
    gated = {"gate": a.gate, "gate_activation": "identity"}
    f, given = reference.normalize_forward(a.x, a.weight, a.bias), (a.dy, a.x, a.weight, a.bias)
    kr = reference.normalize_forward(a.x).y
    plain = reference.normalize_backward(*given, rstd=f.rstd, **gated)
    for dtype in (None, np.float64, np.float16):
        rounded = reference.round_to(kr, np.float64 if dtype is None else dtype).astype(np.float64)
        options = gated | {"rstd": f.rstd, "x_dtype": dtype, "round_before_weight": True}
        grads = reference.normalize_backward(*given, **options)
        expected = np.sum(a.dy * a.gate * rounded, axis=0)
        np.testing.assert_allclose(grads.dweight, expected, rtol=1e-14)
        np.testing.assert_array_equal(grads.dgate, a.dy * (rounded * a.weight + a.bias))
        np.testing.assert_array_equal(grads.dx, plain.dx)
        np.testing.assert_array_equal(grads.dbias, plain.dbias)


def test_an_offset_is_added_to_weight_in_float64():
    a, offset = operands(dtype=BFLOAT16), 1 + 2.0**-30
    got = row_norm(a, weight_offset=offset)
    a.weight = a.weight.astype(np.float64) + offset
    for field, right in zip(sum(got, ()), sum(row_norm(a), ()), strict=True):
        np.testing.assert_array_equal(field, right)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_backward_corrects_the_rounding_of_the_mean(activation):
    a = operands((5, 64))
    x = a.x + 1e4
    f, g = reference.layer_norm_forward(x), reference.group_norm_forward(x, 1)
    for saved, backward in (
        (f, lambda **s: reference.layer_norm_backward(a.dy, x, a.weight, **s)),
        (g, lambda **s: reference.group_norm_backward(a.dy, x, 1, activation=activation, **s)),
    ):
        rounded = saved.mean.astype(np.float32)
        assert np.max(np.abs(rounded - saved.mean)) > 1e-5
        exact, got = (backward(mean=mean, rstd=saved.rstd) for mean in (saved.mean, rounded))
        np.testing.assert_allclose(got.dx, exact.dx, rtol=1e-11, atol=1e-12)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
def test_l2_norm_adds_eps_to_the_sum_of_squares(groups):
    x = operands((5, 12)).x
    total = np.sum(x.reshape(5, groups, -1) ** 2, axis=-1) + 0.7
    f = reference.l2_norm_forward(x, eps=0.7, groups=groups)
    expected = x / np.sqrt(np.repeat(total, 12 // groups, axis=-1))
    np.testing.assert_allclose(f.y, expected, rtol=1e-14)
    np.testing.assert_allclose(f.rstd.reshape(total.shape), np.sqrt(12 / groups / total), 1e-14)


@pytest.mark.parametrize("name", [name for name in reference.__all__ if "norm" in name])
def test_defaults_and_argument_order_are_those_of_the_public_functions(name):
    theirs = inspect.signature(getattr(cunorm, name)).parameters
    ours = inspect.signature(getattr(reference, name)).parameters
    for parameter in ours.keys() & theirs.keys():
        assert ours[parameter].default == theirs[parameter].default
    positional = [
        [p.name for p in f.values() if p.kind is p.POSITIONAL_OR_KEYWORD] for f in (ours, theirs)
    ]
    assert positional[0] == positional[1]


@pytest.mark.parametrize("name", ["normalize", "rms_norm", "layer_norm"])
def test_named_norms_pass_every_option_on(name):
    a, own = operands(dtype=BFLOAT16), {"center": True, "eps": 1e-5} if name == "layer_norm" else {}
    options = {"groups": 2, "weight_offset": 1.0, "round_before_weight": True, "gate": a.gate}
    options |= {"gate_activation": "tanh", "gate_position": "pre"}
    parameters = (a.weight,) if name == "rms_norm" else (a.weight, a.bias)
    given = (a.x, *parameters)
    expected = reference.normalize_forward(*given, residual=a.residual, **options, **own)
    got = getattr(reference, f"{name}_forward")(*given, residual=a.residual, **options)
    added = getattr(reference, f"add_{name}")(a.x, a.residual, *parameters, **options)
    for field, same in zip((*got, *added), (*expected, *expected[:2]), strict=True):
        np.testing.assert_array_equal(field, same)
    alone = reference.normalize_forward(*given, **options, **own).y
    np.testing.assert_array_equal(getattr(reference, name)(*given, **options), alone)

    options |= {"rstd": expected.rstd} | ({"mean": expected.mean} if own else {})
    options |= {"d_residual": a.d_residual, "x_dtype": np.float16, "needs": ("x", "gate")}
    given = (a.dy, a.residual, *parameters)
    got = getattr(reference, f"{name}_backward")(*given, **options)
    expected = reference.normalize_backward(*given, center=bool(own), **options)
    for field, same in zip(got, expected, strict=True):
        np.testing.assert_array_equal(field, same)


@pytest.mark.parametrize("position", ["pre", "post"])
def test_a_backward_gives_the_requested_gradients_of_present_operands(position):
    a, options = operands(), {"gate_position": position, "center": True, "groups": 2}
    whole = row_norm(a, GATED, **options)[1], group_norm(a, 2, activation="silu")[1]
    for needs in [(), ("x",), ("weight", "gate"), ("bias",), ("x", "bias")]:
        of_group = tuple(name for name in needs if name != "gate")
        some = row_norm(a, GATED, needs=needs, **options)[1]
        for complete, grads in zip(
            whole, (some, group_norm(a, 2, activation="silu", needs=of_group)[1]), strict=True
        ):
            for field in grads._fields:
                if {"dresidual": "x"}.get(field, field[1:]) in needs:
                    np.testing.assert_array_equal(getattr(grads, field), getattr(complete, field))
                else:
                    assert getattr(grads, field) is None
    assert row_norm(a, ())[1][1:4] == (None, None, None)
    with pytest.raises(ValueError, match="mean"):
        reference.normalize_backward(a.dy, a.x, rstd=np.ones(5), center=True)
