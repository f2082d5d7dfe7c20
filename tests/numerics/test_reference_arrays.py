# SPDX-License-Identifier: MIT
"""The oracle's arrays: layouts, groups, zero rows, special rows, unmodified operands."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cunorm import reference
from tests.support.operands import DTYPES
from tests.support.reference_cases import ROWS, group_norm, operands, row_norm

EVERY = ("residual", "weight", "bias", "gate")
SILU = {"activation": "silu"}
RUNS = (
    lambda a: row_norm(a, EVERY, center=True),
    lambda a: group_norm(a, 2, **SILU),
    lambda a: group_norm(a, 2, channel_axis=1, **SILU),
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
    for f, grads in (row_norm(a, EVERY, **options), group_norm(a, 1, channel_axis=1)):
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


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", ["pre", "post"])
def test_groups_are_norms_of_slices_side_by_side(position):
    options = {"c": 2.0, "center": True, "gate_position": position, "weight_offset": 1.0}
    a, given = operands((2, 3, 12)), ("weight", "bias", "gate")
    f, grads = row_norm(a, given, groups=3, **options)
    assert f.rstd.shape == (2, 3, 3)
    for group in range(3):
        own = np.s_[..., 4 * group : 4 * group + 4]
        part = type(a)(**{name: array[own] for name, array in vars(a).items()})
        alone, alone_grads = row_norm(part, given, **options)
        np.testing.assert_array_equal(f.y[own], alone.y)
        np.testing.assert_array_equal(f.rstd[..., group], alone.rstd)
        for field in ("dx", "dweight", "dbias", "dgate"):
            np.testing.assert_array_equal(getattr(grads, field)[own], getattr(alone_grads, field))


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_a_group_norm_of_one_position_is_a_layer_norm_of_groups(groups):
    a = operands((5, 6))
    got, expected = group_norm(a, groups, eps=0.3), row_norm(a, eps=0.3, center=True, groups=groups)
    for result, like in zip(got, expected, strict=True):
        for name, array in result._asdict().items():
            right = getattr(like, name).reshape(array.shape)
            np.testing.assert_allclose(array, right, rtol=1e-13, atol=1e-14, err_msg=name)


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
