# SPDX-License-Identifier: MIT
"""What the oracle promises besides its formulas: rounding, arguments, layouts, special rows."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.support.operands import DTYPES
from tests.support.reference_cases import group_norm, operands, row_norm

BFLOAT16 = DTYPES["bfloat16"]
PAIRS = list(itertools.product(DTYPES.values(), repeat=2))
positions = pytest.mark.parametrize("position", ["pre", "post"])
GATED = ("weight", "bias", "gate")


def both(a, needs=None, activation="silu", **told):
    """Run a gated layer norm of groups, and a group norm, of rows that are samples."""
    more = {} if needs is None else {"needs": needs}
    yield row_norm(a, GATED, center=True, groups=2, **more, **told)
    needs = {} if needs is None else {"needs": tuple(n for n in needs if n != "gate")}
    yield group_norm(a, 2, activation=activation, **needs)


# --- rounding -------------------------------------------------------------------------------------


def nearest_bfloat16(values):
    """Round float64 to nearest even by looking the neighbours up in the list of all bfloat16."""
    bits = np.arange(0x7F80, dtype=np.uint16)  # zero and the positive finite numbers, in order
    numbers = bits.view(BFLOAT16).astype(np.float64)
    above = np.clip(np.searchsorted(numbers, np.abs(values)), 1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    middle = (low + high) / 2
    up = (np.abs(values) > middle) | ((np.abs(values) == middle) & (bits[above] % 2 == 0))
    return np.copysign(np.where(up, high, low), values)


def test_float64_is_rounded_once_to_bfloat16():
    numbers = np.arange(0x7F00, dtype=np.uint16).view(BFLOAT16).astype(np.float64)
    middles = (numbers[1:] + numbers[:-1]) / 2
    near_ties = [middles, middles * (1 + 2.0**-40), middles * (1 - 2.0**-40), numbers]
    values = np.concatenate([*near_ties, operands((1000,)).x, [5e-324, 1e-60]])
    values = np.concatenate([values, -values])
    got = reference.round_to(values, BFLOAT16)
    assert got.dtype == BFLOAT16
    np.testing.assert_array_equal(got.astype(np.float64), nearest_bfloat16(values))
    special = reference.round_to(np.array([np.inf, -np.inf, np.nan, 1e39, -1e300]), BFLOAT16)
    expected = [np.inf, -np.inf, np.nan, np.inf, -np.inf]
    np.testing.assert_array_equal(special.astype(np.float64), expected)


@pytest.mark.parametrize(("x_dtype", "expected"), [(np.float32, 1.0), (np.float64, 1 + 2.0**-10)])
def test_the_sum_is_float32_unless_an_operand_is_float64(x_dtype, expected):
    # A little more than a tie of float16, by less than float32 can tell.
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
        unrounded = x.astype(np.float64) + residual.astype(np.float64)
        assert residual_dtype.itemsize > 2 or np.any(result.residual.astype(float) != unrounded)
        result = add(x, None, residual_dtype=residual_dtype)
        assert result.residual.dtype == residual_dtype
        expected = x.astype(residual_dtype).astype(np.float64)
        if residual_dtype == BFLOAT16:
            expected = nearest_bfloat16(x.astype(np.float64))
        np.testing.assert_array_equal(result.residual.astype(np.float64), expected)
        np.testing.assert_array_equal(result.y, norm(result.residual))
    assert reference.normalize_forward(x).residual is None
    stream = reference.add_normalize(x, None).residual
    np.testing.assert_array_equal(stream, x)
    assert not np.shares_memory(stream, x)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("given", ["", "weight", "bias", "weight bias"])
def test_rounding_before_weight_is_to_the_dtype_of_x_and_not_of_the_stream(given, dtype):
    a = operands()
    x = reference.round_to(a.x, dtype)
    weight, bias = (getattr(a, n) if n in given else None for n in ("weight", "bias"))
    told = {"residual": a.residual, "c": 3.0}
    f = reference.normalize_forward(x, weight, bias, round_before_weight=True, **told)
    kr = reference.normalize_forward(x, **told).y
    n = reference.round_to(kr, dtype).astype(np.float64)
    assert np.any(n != kr)
    n = n if weight is None else n * weight
    np.testing.assert_array_equal(f.y, n if bias is None else n + bias)


def test_the_backward_rounds_to_x_dtype_what_dweight_and_dgate_have_and_nothing_else():
    a = operands()
    rounds = {"round_before_weight": True, "gate": a.gate, "gate_activation": "identity"}
    f, given = reference.normalize_forward(a.x, a.weight, a.bias), (a.dy, a.x, a.weight, a.bias)
    kr = reference.normalize_forward(a.x).y
    for dtype in (None, np.float64, np.float16):
        rounded = reference.round_to(kr, np.float64 if dtype is None else dtype).astype(np.float64)
        grads = reference.normalize_backward(*given, rstd=f.rstd, x_dtype=dtype, **rounds)
        expected = np.sum(a.dy * a.gate * rounded, axis=0)
        np.testing.assert_allclose(grads.dweight, expected, rtol=1e-14)
        np.testing.assert_array_equal(grads.dgate, a.dy * (rounded * a.weight + a.bias))
        told = {"gate": a.gate, "gate_activation": "identity"}
        plain = reference.normalize_backward(*given, rstd=f.rstd, **told)
        np.testing.assert_array_equal(grads.dx, plain.dx)
        np.testing.assert_array_equal(grads.dbias, plain.dbias)


def test_an_offset_is_added_to_weight_in_float64():
    a, offset = operands(dtype=BFLOAT16), 1 + 2.0**-30
    got = row_norm(a, weight_offset=offset)
    a.weight = a.weight.astype(np.float64) + offset
    for result, expected in zip(got, row_norm(a), strict=True):
        for field, right in zip(result, expected, strict=True):
            np.testing.assert_array_equal(field, right)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_backward_takes_the_rounding_of_the_mean_out(activation):
    a = operands((5, 64))
    x = a.x + 1e4
    f = reference.layer_norm_forward(x)
    g = reference.group_norm_forward(x, 1)
    for saved, backward in (
        (f, lambda **s: reference.layer_norm_backward(a.dy, x, a.weight, **s)),
        (g, lambda **s: reference.group_norm_backward(a.dy, x, 1, activation=activation, **s)),
    ):
        rounded = saved.mean.astype(np.float32)
        assert np.max(np.abs(rounded - saved.mean)) > 1e-5
        exact, got = (backward(mean=mean, rstd=saved.rstd) for mean in (saved.mean, rounded))
        for field, right in zip(got, exact, strict=True):
            if right is not None:
                np.testing.assert_allclose(field, right, rtol=1e-11, atol=1e-12)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
def test_l2_norm_adds_eps_to_the_sum_of_squares(groups):
    x = operands((5, 12)).x
    total = np.sum(x.reshape(5, groups, -1) ** 2, axis=-1) + 0.7
    f = reference.l2_norm_forward(x, eps=0.7, groups=groups)
    expected = x / np.sqrt(np.repeat(total, 12 // groups, axis=-1))
    np.testing.assert_allclose(f.y, expected, rtol=1e-14)
    rstd = np.sqrt(12 / groups / total)
    np.testing.assert_allclose(f.rstd, rstd if groups > 1 else rstd[:, 0], rtol=1e-14)
    np.testing.assert_array_equal(reference.l2_norm(x, eps=0.7, groups=groups), f.y)


@pytest.mark.parametrize("name", [name for name in reference.__all__ if "norm" in name])
def test_defaults_and_argument_order_are_those_of_the_public_functions(name):
    theirs = inspect.signature(getattr(cunorm, name)).parameters
    ours = inspect.signature(getattr(reference, name)).parameters
    for parameter in ours.keys() & theirs.keys() - {"mean"}:  # which its layer norm insists on
        assert ours[parameter].default == theirs[parameter].default
    positional = [
        [p.name for p in f.values() if p.kind is p.POSITIONAL_OR_KEYWORD] for f in (ours, theirs)
    ]
    assert positional[0] == positional[1]


NAMED = {"normalize": {}, "rms_norm": {}, "layer_norm": {"center": True, "eps": 1e-5}}
TOLD = {"groups": 2, "weight_offset": 1.0, "round_before_weight": True}
TOLD |= {"gate_activation": "tanh", "gate_position": "pre"}


@pytest.mark.parametrize("name", NAMED)
def test_named_forms_pass_every_option_on(name):
    a = operands(dtype=BFLOAT16)
    told = TOLD | {"gate": a.gate}
    parameters = (a.weight,) if name == "rms_norm" else (a.weight, a.bias)
    given = (a.x, *parameters)
    expected = reference.normalize_forward(*given, residual=a.residual, **told, **NAMED[name])
    got = getattr(reference, f"{name}_forward")(*given, residual=a.residual, **told)
    added = getattr(reference, f"add_{name}")(a.x, a.residual, *parameters, **told)
    for field, same in zip((*got, *added), (*expected, *expected[:2]), strict=True):
        np.testing.assert_array_equal(field, same)
    alone = reference.normalize_forward(*given, **told, **NAMED[name]).y
    np.testing.assert_array_equal(getattr(reference, name)(*given, **told), alone)

    saved = {"rstd": expected.rstd} | ({"mean": expected.mean} if name == "layer_norm" else {})
    told |= saved | {"d_residual": a.d_residual, "x_dtype": np.float16, "needs": ("x", "gate")}
    given, center = (a.dy, a.residual, *parameters), {"center": name == "layer_norm"}
    got = getattr(reference, f"{name}_backward")(*given, **told)
    expected = reference.normalize_backward(*given, **center, **told)
    for field, same in zip(got, expected, strict=True):
        np.testing.assert_array_equal(field, same)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_statistics_have_the_leading_axes_and_parameters_the_others(axis):
    a = operands((2, 3, 4), (2, 3, 4)[axis:])
    f, grads = row_norm(a, center=True, axis=axis)
    assert f.mean.shape == f.rstd.shape == a.x.shape[:axis]
    assert grads.dweight.shape == grads.dbias.shape == a.weight.shape
    assert f.y.shape == grads.dx.shape == a.x.shape
    np.testing.assert_allclose(f.mean, a.x.mean(axis=tuple(range(axis % 3, 3))), rtol=1e-13)


@positions
@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=4)))
def test_a_backward_gives_the_gradients_asked_for_of_operands_that_are_there(needs, position):
    a = operands()
    names = tuple(itertools.compress(("x", *GATED), needs))
    told = {"gate_position": position}
    for (_, whole), (_, grads) in zip(both(a, **told), both(a, needs=names, **told), strict=True):
        for field in grads._fields:
            if {"dresidual": "x"}.get(field, field[1:]) in names:
                np.testing.assert_array_equal(getattr(grads, field), getattr(whole, field))
            else:
                assert getattr(grads, field) is None
    assert row_norm(a, (), needs=names)[1][1:4] == (None, None, None)
    with pytest.raises(ValueError, match="mean"):
        reference.normalize_backward(a.dy, a.x, rstd=np.ones(5), center=True)


def test_bias_matters_to_the_gradient_of_a_post_gate_only():
    a = operands()
    for position in ("pre", "post"):
        grads = row_norm(a, GATED, gate_position=position)[1]
        others = row_norm(a, ("weight", "gate"), gate_position=position)[1]
        assert np.array_equal(grads.dgate, others.dgate) == (position == "pre")
        np.testing.assert_array_equal(grads.dx, others.dx)
        np.testing.assert_array_equal(grads.dweight, others.dweight)
