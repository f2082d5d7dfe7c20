# SPDX-License-Identifier: MIT
"""What a row's results do not depend on, to the last bit."""

from __future__ import annotations

import pytest
from operands import assert_same_bits

from cunorm.results import NormForward, NormGrads

from .arrays import EPS, FAMILIES, LAYOUTS, Operands, empty, saved, spread
from .emulator import unavailable
from .kernels import Plan, emulate_backward, emulate_forward

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

ROWS, LEADING = 42, (2, 3, 7)
PER_ROW = {"y", "residual", "mean", "rstd", "dx", "dresidual"}

# The layout of the arrays and what the plan is told, by what differs from the usual.
PLACES = {
    **{layout: (layout, {}) for layout in LAYOUTS if layout != "contiguous"},
    "one element off": ("contiguous", {"offset": 1}),
    "two elements off": ("contiguous", {"offset": 2}),
    "after a guard page": ("contiguous", {"at": "start"}),
}
ORDERS = {
    "reverse": {"order": "reverse"},
    **{f"random {seed}": {"order": "random", "seed": seed} for seed in range(3)},
}
GRIDS = {"one block": 1, "two blocks": 2, "five blocks": 5}

every_kind = pytest.mark.parametrize("kind", FAMILIES)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def forward(kind, dtype, *, layout="contiguous", rows=None, in_place=False, **plan):
    """Run a forward with every operand, of all rows or of these."""
    width, team = FAMILIES[kind]
    make = Operands((*LEADING, width), far=True)
    x, residual = (arranged(make.rows(dtype), dtype, layout, rows) for _ in range(2))
    return emulate_forward(
        *(x, make.param(dtype), make.param(dtype)),
        residual=residual,
        center=True,
        eps=EPS,
        out=results({"y": x, "new_residual": residual}, dtype, layout, in_place),
        plan=Plan(team=team, **plan),
    ).result


def backward(kind, dtype, *, layout="contiguous", rows=None, in_place=False, **plan):
    """Run a backward with every operand, of all rows or of these."""
    width, team = FAMILIES[kind]
    make = Operands((*LEADING, width), far=True)
    dy, x, d_residual = (
        arranged(make.rows(dtype, near=near), dtype, layout, rows) for near in (True, False, True)
    )
    return emulate_backward(
        *(dy, x, make.param(dtype), make.param(dtype)),
        d_residual=d_residual,
        center=True,
        out=results({"dx": dy, "dresidual": d_residual}, dtype, layout, in_place),
        plan=Plan(team=team, **plan),
        **saved(x, center=True),
    ).result


def arranged(values, dtype, layout, rows):
    """Return all rows, or these, in a layout."""
    if rows is not None:
        values = values.reshape(ROWS, -1)[rows][None, None]
    return spread(values, dtype, layout)


def results(inputs, dtype, layout, in_place):
    """Return where results go: to the inputs, or to others of their layout."""
    if in_place:
        return inputs
    return {name: empty(array.shape, dtype, layout) for name, array in inputs.items()}


def assert_same(result, usual, rows=None, names=None):
    """Compare each field by its bits; `rows` says which ones of the usual result these are."""
    assert isinstance(result, NormForward | NormGrads)
    compared = 0
    for name, field, other in zip(result._fields, result, usual, strict=True):
        if field is None or (names and name not in names):
            assert (field is None) == (other is None)
            continue
        if name in PER_ROW:
            other = other.reshape(ROWS, -1)[slice(None) if rows is None else rows]
        assert_same_bits(field.reshape(other.shape), other, name)
        compared += 1
    assert compared >= 2


both = pytest.mark.parametrize("function", [forward, backward])


@both
@every_kind
@every_dtype
@pytest.mark.parametrize("place", PLACES)
def test_results_do_not_depend_on_alignment_or_strides(function, kind, dtype, place):
    layout, plan = PLACES[place]
    result = function(kind, dtype, layout=layout, grid=3, **plan)
    assert_same(result, function(kind, dtype, grid=3))


@both
@every_kind
@every_dtype
@pytest.mark.parametrize("order", ORDERS)
def test_results_do_not_depend_on_the_order_of_blocks_and_warps(function, kind, dtype, order):
    result = function(kind, dtype, grid=3, **ORDERS[order])
    assert_same(result, function(kind, dtype, grid=3))


@both
@every_kind
@every_dtype
def test_results_do_not_depend_on_being_computed_in_place(function, kind, dtype):
    result = function(kind, dtype, grid=3, in_place=True)
    assert_same(result, function(kind, dtype, grid=3))


@both
@every_kind
@every_dtype
@pytest.mark.parametrize("grid", GRIDS)
def test_a_row_does_not_depend_on_the_grid(function, kind, dtype, grid):
    assert_same(function(kind, dtype, grid=GRIDS[grid]), function(kind, dtype), names=PER_ROW)


@both
@every_kind
@every_dtype
@pytest.mark.parametrize(
    "rows",
    [[0], [29], [5, 6, 7, 8, 9], list(range(ROWS))[::-1], [3, 3, 3, 41, 0]],
    ids=["first alone", "alone", "some", "reversed", "repeated"],
)
def test_a_row_does_not_depend_on_other_rows_nor_its_place(function, kind, dtype, rows):
    assert_same(function(kind, dtype, rows=rows), function(kind, dtype), rows, PER_ROW)


@every_kind
def test_y_does_not_depend_on_whether_statistics_are_saved(kind):
    width, team = FAMILIES[kind]
    x = Operands((*LEADING, width)).rows("float32")
    one, other = (
        emulate_forward(x, center=True, saves=saves, plan=Plan(team=team)).result
        for saves in (True, False)
    )
    assert other.mean is other.rstd is None
    assert_same_bits(other.y, one.y)
