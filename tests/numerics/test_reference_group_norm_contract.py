# SPDX-License-Identifier: MIT
"""What the oracle's group norm promises besides its formulas: arguments, arrays, special groups."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cunorm import reference
from cunorm.results import GroupNormForward, GroupNormGrads

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]


def operands(shape=(3, 5, 8), dtype=np.float64) -> SimpleNamespace:
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name in ("x", "dy")}
    arrays |= {name: rng.standard_normal(shape[-1]).astype(dtype) for name in ("weight", "bias")}
    for array in arrays.values():
        array.flags.writeable = False
    return SimpleNamespace(**arrays)


def backward(a, f, groups, x=None, **told) -> GroupNormGrads:
    x = a.x if x is None else x
    statistics = {"mean": f.mean, "rstd": f.rstd}
    return reference.group_norm_backward(a.dy, x, groups, a.weight, a.bias, **statistics, **told)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
def test_a_gradient_that_is_not_needed_or_has_no_operand_is_none(needs):
    a = operands()
    f = reference.group_norm_forward(a.x, 2, a.weight, a.bias)
    every = backward(a, f, 2)
    names = tuple(itertools.compress(("x", "weight", "bias"), needs))
    for got, whole, needed in zip(backward(a, f, 2, needs=names), every, needs, strict=True):
        assert (got is not None) == needed
        if needed:
            np.testing.assert_array_equal(got, whole)
    a.weight = a.bias = None
    grads = backward(a, f, 2, needs=names)
    assert [grad is not None for grad in grads] == [needs[0], False, False]


def test_defaults_are_those_of_the_public_functions():
    a = operands()
    told = {"eps": 1e-5, "activation": "identity", "channel_axis": -1}
    f = reference.group_norm_forward(a.x, 2, a.weight, a.bias)
    explicit = reference.group_norm_forward(a.x, 2, a.weight, a.bias, **told)
    assert isinstance(f, GroupNormForward)
    for got, expected in zip(f, explicit, strict=True):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(reference.group_norm(a.x, 2, a.weight, a.bias), f.y)
    whole = reference.group_norm_forward(a.x, 8, a.weight, a.bias)
    np.testing.assert_array_equal(reference.instance_norm(a.x, a.weight, a.bias), whole.y)


@pytest.mark.parametrize("shape", [(3, 8), (3, 1, 8), (2, 3, 5, 8), (2, 2, 1, 3, 8)], ids=str)
def test_channels_first_is_channels_last_with_the_axis_moved(shape):
    a = operands(shape)
    f = reference.group_norm_forward(a.x, 4, a.weight, a.bias, activation="gelu")
    grads = backward(a, f, 4, activation="gelu")
    a.x, a.dy = (np.moveaxis(v, -1, 1) for v in (a.x, a.dy))
    told = {"activation": "gelu", "channel_axis": 1}
    first = reference.group_norm_forward(a.x, 4, a.weight, a.bias, **told)
    first_grads = backward(a, first, 4, **told)
    assert f.mean.shape == first.mean.shape == (shape[0], 4)
    for got, expected in [*zip(first, f, strict=True), *zip(first_grads, grads, strict=True)]:
        if got.shape == a.x.shape:
            expected = np.moveaxis(expected, -1, 1)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_backward_takes_the_rounding_of_the_mean_out(activation):
    a = operands()
    x = a.x + 1e4
    f = reference.group_norm_forward(x, 2)
    rounded = f._replace(mean=f.mean.astype(np.float32))
    assert np.max(np.abs(rounded.mean - f.mean)) > 1e-5
    exact = backward(a, f, 2, x, activation=activation)
    for got, expected in zip(backward(a, rounded, 2, x, activation=activation), exact, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


def test_parameter_gradients_of_many_positions_keep_their_digits():
    a = operands((2, 100_000, 2))
    a.dy = np.full(a.x.shape, 0.1)
    a.weight = a.bias = np.ones(2)
    f = reference.group_norm_forward(a.x, 2)
    grads = backward(a, f, 2)
    np.testing.assert_allclose(grads.dbias, math.fsum(a.dy[..., 0].flat), rtol=4 * 2.0**-53)


# --- arrays ---------------------------------------------------------------------------------------

LAYOUTS = {
    "every_other_sample": lambda a: np.repeat(a, 2, axis=0)[::2],
    "reversed": lambda a: a[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1],
    "transposed": lambda a: a.swapaxes(1, 2).copy().swapaxes(1, 2),
    "expanded": lambda a: np.broadcast_to(a[0], a.shape),
    "fortran": np.asfortranarray,
}


@pytest.mark.parametrize("channel_axis", [-1, 1])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(layout, dtype, channel_axis):
    a = operands((3, 8, 8), dtype)
    views = [layout(v) for v in (a.x, a.dy)]
    told = {"activation": "silu", "channel_axis": channel_axis}
    results = []
    for a.x, a.dy in (views, [np.ascontiguousarray(v) for v in views]):
        f = reference.group_norm_forward(a.x, 2, a.weight, a.bias, **told)
        results.append((*f, *backward(a, f, 2, **told)))
    for strided, contiguous in zip(*results, strict=True):
        assert strided.dtype == np.float64
        np.testing.assert_array_equal(strided, contiguous)


def test_no_samples_give_empty_results_and_zero_parameter_gradients():
    a = operands((0, 5, 8), np.float16)
    for channel_axis, shape in ((-1, (0, 5, 8)), (1, (0, 8, 5)), (1, (0, 8))):
        a.x = a.dy = np.zeros(shape, np.float16)
        told = {"activation": "silu", "channel_axis": channel_axis}
        f = reference.group_norm_forward(a.x, 2, a.weight, a.bias, **told)
        grads = backward(a, f, 2, **told)
        assert f.y.shape == grads.dx.shape == shape
        assert f.mean.shape == f.rstd.shape == (0, 2)
        np.testing.assert_array_equal(grads.dweight, np.zeros(8))
        np.testing.assert_array_equal(grads.dbias, np.zeros(8))


@pytest.mark.parametrize("channel_axis", [-1, 1])
def test_no_result_is_a_view_of_an_input_or_of_another(channel_axis):
    a = operands((2, 1, 1))
    f = reference.group_norm_forward(a.x, 1, a.weight, a.bias, channel_axis=channel_axis)
    arrays = [*vars(a).values(), *f, *backward(a, f, 1, channel_axis=channel_axis)]
    for one, other in itertools.combinations(arrays, 2):
        assert not np.shares_memory(one, other)


# --- special groups -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1 / 3, 1e4 + 0.1, -1e-9])
@pytest.mark.parametrize("positions", [1, 7, 1000])
def test_a_constant_group_is_exactly_bias(positions, value):
    a = operands()
    y = reference.group_norm(np.full((2, positions, 8), value), 2, a.weight, a.bias)
    np.testing.assert_array_equal(y, np.broadcast_to(a.bias, y.shape))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_poisons_its_own_group_only(value):
    a = operands()
    x = a.x.copy()
    x[2, 3, 5] = value  # the second of two groups
    clean = reference.group_norm(a.x, 2, a.weight, a.bias)
    f = reference.group_norm_forward(x, 2, a.weight, a.bias)
    grads = backward(a, f, 2, x)
    poisoned = np.zeros(x.shape, bool)
    poisoned[2, :, 4:] = True
    np.testing.assert_array_equal(np.isnan(f.y), poisoned)
    np.testing.assert_array_equal(f.y[~poisoned], clean[~poisoned])
    np.testing.assert_array_equal(np.isnan(grads.dx), poisoned)
    np.testing.assert_array_equal(np.isnan(grads.dweight), np.arange(8) >= 4)
    assert np.isfinite(grads.dbias).all()  # where there is no activation, it does not see x
    grads = backward(a, f, 2, x, activation="silu")
    np.testing.assert_array_equal(np.isnan(grads.dbias), np.arange(8) >= 4)


def test_large_float16_groups_do_not_overflow():
    x = np.full((1, 4096, 2), 65504, np.float16)
    x[:, ::2] = -65504
    np.testing.assert_allclose(np.abs(reference.group_norm(x, 1)), 1.0, rtol=1e-12)
