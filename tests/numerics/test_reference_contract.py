# SPDX-License-Identifier: MIT
"""The oracle's contract besides its formulas: where it rounds, its arguments, any data."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.support.host_code import nearest_even
from tests.support.operands import DTYPES
from tests.support.reference_cases import ROWS, group_norm, operands, row_norm

BFLOAT16 = DTYPES["bfloat16"]
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


def test_without_a_residual_the_stream_is_a_copy_of_x_in_residual_dtype():
    a = operands()
    for dtype in DTYPES.values():
        result = reference.add_layer_norm(a.x, None, residual_dtype=dtype)
        np.testing.assert_array_equal(result.residual, reference.round_to(a.x, dtype))
        np.testing.assert_array_equal(result.y, reference.layer_norm(result.residual))
    stream = reference.add_normalize(a.x, None).residual
    np.testing.assert_array_equal(stream, a.x)
    assert not np.shares_memory(stream, a.x)


@pytest.mark.parametrize("dtype", [None, np.float64, np.float16])
def test_the_backward_rounds_before_weight_to_x_dtype_which_is_by_default_xs(dtype):
    a = operands()
    saved, kr = {"rstd": reference.rms_norm_forward(a.x).rstd}, reference.rms_norm(a.x)
    rounded = reference.round_to(kr, dtype or np.float64).astype(np.float64)
    options = saved | {"x_dtype": dtype, "round_before_weight": True}
    grads = reference.rms_norm_backward(a.dy, a.x, a.weight, **options)
    np.testing.assert_allclose(grads.dweight, np.sum(a.dy * rounded, axis=0), rtol=1e-14)
    plain = reference.rms_norm_backward(a.dy, a.x, a.weight, **saved)
    np.testing.assert_array_equal(grads.dx, plain.dx)


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


@pytest.mark.parametrize("position", ["pre", "branch"])
@pytest.mark.parametrize("name", ["normalize", "rms_norm", "layer_norm"])
def test_named_norms_pass_every_option_on(name, position):
    a, own = operands(dtype=BFLOAT16), {"center": True, "eps": 1e-5} if name == "layer_norm" else {}
    options = {"weight": a.weight, "bias": a.bias, "gate": a.gate, "gate_position": position}
    options |= {"groups": 2, "weight_offset": 1.0, "round_before_weight": True}
    options |= {"gate_activation": "tanh"}
    expected = reference.normalize_forward(a.x, residual=a.residual, **options, **own)
    got = getattr(reference, f"{name}_forward")(a.x, residual=a.residual, **options)
    added = getattr(reference, f"add_{name}")(a.x, a.residual, **options)
    for field, same in zip((*got, *added), (*expected, *expected[:2]), strict=True):
        np.testing.assert_array_equal(field, same)
    alone = reference.normalize_forward(a.x, **options, **own).y
    np.testing.assert_array_equal(getattr(reference, name)(a.x, **options), alone)

    options |= {"rstd": expected.rstd} | ({"mean": expected.mean} if own else {})
    options |= {"d_residual": a.d_residual, "x_dtype": np.float16, "branch": a.x}
    options |= {"needs": ("x", "bias", "gate")}
    got = getattr(reference, f"{name}_backward")(a.dy, a.residual, **options)
    expected = reference.normalize_backward(a.dy, a.residual, center=bool(own), **options)
    for field, same in zip(got, expected, strict=True):
        np.testing.assert_array_equal(field, same)


@pytest.mark.parametrize("position", ["pre", "post", "branch"])
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
    saved = {"rstd": np.ones(5), "gate": a.gate, "gate_position": "branch"}
    with pytest.raises(ValueError, match="mean"):
        reference.normalize_backward(a.dy, a.x, center=True, **saved)
    with pytest.raises(ValueError, match="branch"):
        reference.normalize_backward(a.dy, a.x, **saved)
    assert reference.normalize_backward(a.dy, a.x, needs=("x",), **saved).dx.shape == a.x.shape


# --- arrays ---------------------------------------------------------------------------------------

EVERY = ("residual", "weight", "bias", "gate")


def with_parameters(a, weight, bias):
    return SimpleNamespace(**vars(a) | {"weight": weight, "bias": bias})


SILU = {"activation": "silu"}
BRANCH = {"gate_position": "branch"}
RUNS = (
    lambda a: row_norm(a, EVERY, center=True),
    lambda a: row_norm(a, EVERY, **BRANCH),
    lambda a: group_norm(a, 2, **SILU),
    lambda a: group_norm(a, 2, channel_axis=1, **SILU),
    lambda a: row_norm(with_parameters(a, a.gate, a.residual), center=True),
    lambda a: group_norm(with_parameters(a, a.gate[:, 0], a.residual[:1, 0]), 2, **SILU),
)
LAYOUTS = {
    "every_other_row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "reversed": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "transposed": lambda a: a.swapaxes(0, 1).copy().swapaxes(0, 1),
    "expanded": lambda a: np.broadcast_to(a[0], a.shape),
    "fortran": np.asfortranarray,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_do_not_matter(layout):
    for dtype in DTYPES.values():
        views, copies = operands((3, 8, 8), dtype=dtype), operands((3, 8, 8), dtype=dtype)
        for name in ROWS:
            setattr(views, name, layout(getattr(views, name)))
            setattr(copies, name, np.ascontiguousarray(getattr(views, name)))
        for run in RUNS:
            for field, right in zip(sum(run(views), ()), sum(run(copies), ()), strict=True):
                np.testing.assert_array_equal(field, right)


def test_no_operand_is_modified_and_no_result_is_a_view():
    a = operands((2, 1, 1))  # read-only
    before = {name: array.copy() for name, array in vars(a).items()}
    options = {"center": True, "round_before_weight": True, "weight_offset": 1.0}
    for f, grads in (
        row_norm(a, EVERY, **options),
        row_norm(a, EVERY, **options, **BRANCH),
        group_norm(a, 1, channel_axis=1),
    ):
        results = {id(array): array for array in (*f, *grads) if array is not None}
        arrays = [*vars(a).values(), *results.values()]
        for one, other in itertools.combinations(arrays, 2):
            assert not np.shares_memory(one, other)
    for name, array in vars(a).items():
        np.testing.assert_array_equal(array, before[name])


def test_zero_rows_give_empty_rows_and_zero_parameter_gradients():
    a = operands((0, 8), dtype=np.float16)
    options = {"center": True, "groups": 2, "gate_position": "pre"}
    for f, grads in (row_norm(a, EVERY, **options), group_norm(a, 2, **SILU)):
        assert f.y.shape == grads.dx.shape == (0, 8)
        assert f.mean.shape == f.rstd.shape == (0, 2)
        np.testing.assert_array_equal(grads.dweight, np.zeros(8))
        np.testing.assert_array_equal(grads.dbias, np.zeros(8))
    a = with_parameters(a, a.x, a.weight[None])
    for _, grads in (row_norm(a, EVERY, **options | BRANCH), group_norm(a, 2, **SILU)):
        assert grads.dweight.shape == (0, 8)
        np.testing.assert_array_equal(grads.dbias, np.zeros((1, 8)))


# --- special rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1 / 3, 1e4 + 0.1, -1e-9])
@pytest.mark.parametrize("width", [1, 3, 1000])
def test_constant_rows_and_groups_give_exactly_bias(width, value):
    bias = operands((width,)).x
    y = reference.layer_norm(np.full((2, width), value), np.full(width, 2.0), bias)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))
    y = reference.group_norm(np.full((2, width, 4), value), 2, np.full(4, 2.0), np.arange(4.0))
    np.testing.assert_array_equal(y, np.broadcast_to(np.arange(4.0), y.shape))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_affect_only_their_own_group(value):
    clean, a = operands((3, 8)), operands((3, 8))
    a.x = a.x.copy()
    a.x[2, 5] = value  # the second of two groups
    poisoned, channels = np.zeros(a.x.shape, bool), np.arange(8) >= 4
    poisoned[2, 4:] = True
    for run in (
        lambda a: row_norm(a, center=True, groups=2),
        lambda a: group_norm(a, 2),
        lambda a: group_norm(a, 2, **SILU),
    ):
        (f, grads), (right, _) = run(a), run(clean)
        np.testing.assert_array_equal(np.isnan(f.y), poisoned)
        np.testing.assert_array_equal(f.y[~poisoned], right.y[~poisoned])
        np.testing.assert_array_equal(np.isnan(grads.dx), poisoned)
        np.testing.assert_array_equal(np.isnan(grads.dweight), channels)
    # grads are those of the last run, in which SiLU's slope depends on x.
    np.testing.assert_array_equal(np.isnan(grads.dbias), channels)


@pytest.mark.parametrize("position", ["pre", "post"])
def test_nan_in_a_gate_before_a_norm_poisons_its_group_and_after_it_its_element(position):
    a = operands()
    a.gate = a.gate.copy()
    a.gate[2, 5] = np.nan
    f, grads = row_norm(a, ("weight", "bias", "gate"), groups=2, gate_position=position)
    expected = np.zeros(a.x.shape, bool)
    expected[2, 4:] = True
    np.testing.assert_array_equal(np.isnan(grads.dx), expected)
    if position == "post":
        expected[2, [4, 6, 7]] = False
    np.testing.assert_array_equal(np.isnan(f.y), expected)
    np.testing.assert_array_equal(np.isnan(grads.dgate), expected)


def test_large_float16_values_do_not_overflow():
    x = np.full((1, 4096), 65504, np.float16)
    x[0, ::2] = -65504
    for y in (reference.rms_norm(x), reference.group_norm(x.reshape(1, 2048, 2), 1)):
        np.testing.assert_allclose(np.abs(y), 1.0, rtol=1e-12)
