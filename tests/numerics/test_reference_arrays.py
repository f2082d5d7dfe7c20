# SPDX-License-Identifier: MIT
"""The oracle and its arrays: layouts, no rows, no operand modified, special rows and groups."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cunorm import reference
from tests.support.operands import DTYPES
from tests.support.reference_cases import ROWS, group_norm, operands, row_norm

EVERY = ("residual", "weight", "bias", "gate")
SILU = {"activation": "silu"}

LAYOUTS = {
    "every_other_row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "reversed": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "transposed": lambda a: a.swapaxes(0, 1).copy().swapaxes(0, 1),
    "expanded": lambda a: np.broadcast_to(a[0], a.shape),
    "fortran": np.asfortranarray,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_strides_do_not_matter(layout, dtype):
    views, copies = operands((3, 8, 8), dtype=dtype), operands((3, 8, 8), dtype=dtype)
    for name in ROWS:
        setattr(views, name, layout(getattr(views, name)))
        setattr(copies, name, np.ascontiguousarray(getattr(views, name)))
    for run in (
        lambda a: row_norm(a, EVERY, center=True),
        lambda a: group_norm(a, 2, **SILU),
        lambda a: group_norm(a, 2, channel_axis=1, **SILU),
    ):
        for got, expected in zip(run(views), run(copies), strict=True):
            for field, right in zip(got, expected, strict=True):
                np.testing.assert_array_equal(field, right)
                assert field is None or field.flags.owndata or not np.shares_memory(field, views.x)


@pytest.mark.parametrize("shape", [(3, 8), (3, 1, 8), (2, 3, 5, 8), (2, 2, 1, 3, 8)], ids=str)
def test_channels_first_is_channels_last_with_the_axis_moved(shape):
    a, b = operands(shape), operands(shape)
    b.x, b.dy = (np.moveaxis(v, -1, 1) for v in (a.x, a.dy))
    results = [sum(group_norm(v, 4, channel_axis=i, **SILU), ()) for v, i in ((b, 1), (a, -1))]
    for got, expected in zip(*results, strict=True):
        expected = np.moveaxis(expected, -1, 1) if expected.shape == a.x.shape else expected
        np.testing.assert_array_equal(got, expected)


def test_zero_rows_give_empty_rows_and_zero_parameter_gradients():
    a = operands((0, 8), dtype=np.float16)
    told = {"center": True, "groups": 2, "gate_position": "pre"}
    for f, grads in (row_norm(a, EVERY, **told), group_norm(a, 2, **SILU)):
        assert f.y.shape == grads.dx.shape == (0, 8)
        assert f.mean.shape == f.rstd.shape == (0, 2)
        np.testing.assert_array_equal(grads.dweight, np.zeros(8))
        np.testing.assert_array_equal(grads.dbias, np.zeros(8))


def test_no_operand_is_modified_and_no_result_is_a_view_of_one_or_of_another():
    a = operands((2, 1, 1))  # read-only
    before = {name: array.copy() for name, array in vars(a).items()}
    told = {"center": True, "round_before_weight": True, "weight_offset": 1.0}
    for f, grads in (row_norm(a, EVERY, **told), group_norm(a, 1, channel_axis=1)):
        results = {id(array): array for array in (*f, *grads) if array is not None}
        arrays = [*vars(a).values(), *results.values()]
        for one, other in itertools.combinations(arrays, 2):
            assert not np.shares_memory(one, other)
    for name, array in vars(a).items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("position", ["pre", "post"])
def test_an_expanded_gate_has_a_full_gradient(position):
    a = operands((2, 3, 8))
    a.gate = np.broadcast_to(a.gate[:1, :1], a.x.shape)
    told = {"gate_position": position, "center": True}
    grads = row_norm(a, EVERY, **told)[1]
    a.gate = np.ascontiguousarray(a.gate)
    np.testing.assert_array_equal(grads.dgate, row_norm(a, EVERY, **told)[1].dgate)
    assert grads.dgate.strides == a.x.strides


# --- special rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1 / 3, 1e4 + 0.1, -1e-9])
@pytest.mark.parametrize("width", [1, 3, 7, 1000])
def test_what_is_constant_is_exactly_bias(width, value):
    bias = operands((width,)).x
    y = reference.layer_norm(np.full((2, width), value), np.full(width, 2.0), bias)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))
    y = reference.group_norm(np.full((2, width, 4), value), 2, np.full(4, 2.0), np.arange(4.0))
    np.testing.assert_array_equal(y, np.broadcast_to(np.arange(4.0), y.shape))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_poisons_its_own_group_only(value):
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
    np.testing.assert_array_equal(np.isnan(grads.dbias), channels)  # phi' sees x
    f = row_norm(a)[0]  # not centred: an infinity is that of its element's r alone
    assert np.isnan(f.y[2, 5])
    np.testing.assert_array_equal(f.y[:2], row_norm(clean)[0].y[:2])


@pytest.mark.parametrize("position", ["pre", "post"])
def test_a_nan_in_a_gate_poisons_its_group_before_the_norm_and_its_element_after(position):
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
    np.testing.assert_allclose(np.abs(reference.rms_norm(x)), 1.0, rtol=1e-12)
    y = reference.group_norm(x.reshape(1, 2048, 2), 1)
    np.testing.assert_allclose(np.abs(y), 1.0, rtol=1e-12)
