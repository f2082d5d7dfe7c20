# SPDX-License-Identifier: MIT
"""What a row's results do not depend on, to the last bit."""

from __future__ import annotations

from functools import cache

import pytest

from cunorm.results import NormForward, NormGrads
from tests.support.operands import assert_same_bits

from .arrays import EPS, FAMILIES, LAYOUTS, Operands, empty, input_layouts, saved, spread
from .emulator import unavailable
from .kernels import emulate_backward, emulate_forward
from .plans import Plan

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

ROWS, LEADING = 42, (2, 3, 7)
PER_ROW = {"y", "residual", "mean", "rstd", "dx", "dgate", "dresidual"}

# What is computed: the dtype of every operand, and arguments of cunorm.normalize.
NORMS = {
    "float32": ("float32", {}),
    "bfloat16": ("bfloat16", {}),
    "gate, groups": ("float32", {"gate_position": "pre", "groups": 2}),
    "rounding, gate": ("bfloat16", {"gate_position": "post", "round_before_weight": True}),
}
# The layout of the arrays and what the plan is told, by what differs from the usual.
PLACES = {
    **{layout: (layout, {}) for layout in LAYOUTS if layout != "contiguous"},
    "one element off": ("contiguous", {"offset": 1}),
    "two elements off": ("contiguous", {"offset": 2}),
    "after a guard page": ("contiguous", {"at": "start"}),
}
ORDERS = {
    "reverse": {"order": "reverse"},
    **{f"random {seed}": {"order": "random", "seed": seed} for seed in range(2)},
}
GRIDS = {"one block": 1, "five blocks": 5}

every_kind = pytest.mark.parametrize("kind", FAMILIES)
every_norm = pytest.mark.parametrize("norm", NORMS)


def forward(kind, norm, *, layout="contiguous", rows=None, in_place=False, **plan):
    """Run a forward with every operand, of all rows or of these."""
    make, plan, dtype, options = drawn(kind, norm, plan)
    x, residual = (arranged(make.rows(dtype), dtype, layout, rows) for _ in range(2))
    over = {"y": x, "new_residual": residual}
    if "gate_position" in options:
        options["gate"] = arranged(make.rows(dtype, near=True), dtype, layout, rows)
        over["y"] = options["gate"]
    out = results(over, dtype, layout, in_place)
    operands = (x, make.param(dtype), make.param(dtype))
    return emulate_forward(
        *operands, residual=residual, eps=EPS, out=out, plan=plan, **options
    ).result


def backward(kind, norm, *, layout="contiguous", rows=None, in_place=False, **plan):
    """Run a backward with every operand, of all rows or of these."""
    make, plan, dtype, options = drawn(kind, norm, plan)
    dy, x, d_residual = (
        arranged(make.rows(dtype, near=near), dtype, layout, rows) for near in (True, False, True)
    )
    over = {"dx": dy, "dresidual": d_residual}
    if "gate_position" in options:
        options["gate"] = arranged(make.rows(dtype, near=True), dtype, layout, rows)
        over["dgate"] = options["gate"]
    out = results(over, dtype, layout, in_place)
    operands = (dy, x, make.param(dtype), make.param(dtype))
    options |= {"d_residual": d_residual, **saved(x, **options)}
    return emulate_backward(*operands, out=out, plan=plan, **options).result


def drawn(kind, norm, plan):
    """Return what draws the operands, the plan, their dtype, and arguments of cunorm.normalize."""
    width, team = FAMILIES[kind]
    dtype, options = NORMS[norm]
    make = Operands((*LEADING, width * options.get("groups", 1)), far=True)
    return make, Plan(team=team, **plan), dtype, {"center": True, **options}


@cache
def usual(function, kind, norm, grid=None):
    """Return the result that others must be equal to."""
    return function(kind, norm, grid=grid)


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
placed = [
    (norm, place)
    for norm, (_, options) in NORMS.items()
    for place, (layout, _) in PLACES.items()
    if layout in input_layouts(options.get("groups", 1))
]


@both
@every_kind
@pytest.mark.parametrize(("norm", "place"), placed)
def test_results_do_not_depend_on_alignment_or_strides(function, kind, norm, place):
    layout, plan = PLACES[place]
    result = function(kind, norm, layout=layout, grid=3, **plan)
    assert_same(result, usual(function, kind, norm, grid=3))


@both
@every_kind
@every_norm
@pytest.mark.parametrize("order", ORDERS)
def test_results_do_not_depend_on_the_order_of_blocks_and_warps(function, kind, norm, order):
    result = function(kind, norm, grid=3, **ORDERS[order])
    assert_same(result, usual(function, kind, norm, grid=3))


@both
@every_kind
@every_norm
def test_results_do_not_depend_on_being_computed_in_place(function, kind, norm):
    result = function(kind, norm, grid=3, in_place=True)
    assert_same(result, usual(function, kind, norm, grid=3))


@every_kind
@pytest.mark.parametrize("position", [None, "pre", "post"])
@pytest.mark.parametrize("offset", [0, 1])
def test_y_may_be_written_over_an_x_that_becomes_the_stream(kind, position, offset):
    width, team = FAMILIES[kind]
    make = Operands((*LEADING, width), far=True)
    x, weight = make.rows("float32"), make.param("float32")
    gate = make.rows("float32", near=True) if position else None
    norm = {"gate_position": position} if position else {}
    norm |= {"residual_dtype": "float16", "center": True, "gate": gate}
    plan = Plan(team=team, offset=offset, grid=3)
    apart, over = (
        emulate_forward(x, weight, out=out, plan=plan, **norm).result for out in ({}, {"y": x})
    )
    assert_same(over, apart)


@both
@every_kind
@every_norm
@pytest.mark.parametrize("grid", GRIDS)
def test_a_row_does_not_depend_on_the_grid(function, kind, norm, grid):
    result = function(kind, norm, grid=GRIDS[grid])
    assert_same(result, usual(function, kind, norm), names=PER_ROW)


@both
@every_kind
@every_norm
@pytest.mark.parametrize(
    "rows",
    [[0], [29], [5, 6, 7, 8, 9], list(range(ROWS))[::-1], [3, 3, 3, 41, 0]],
    ids=["first alone", "alone", "some", "reversed", "repeated"],
)
def test_a_row_does_not_depend_on_other_rows_nor_its_place(function, kind, norm, rows):
    result = function(kind, norm, rows=rows)
    assert_same(result, usual(function, kind, norm), rows, PER_ROW)


@every_kind
@pytest.mark.parametrize("position", ["pre", "post"])
def test_a_group_is_a_row_for_itself(kind, position):
    width, team = FAMILIES[kind]
    make = Operands((*LEADING, 2 * width))
    dy, x, gate = (make.rows("float32") for _ in range(3))
    weight, bias = make.param("float32"), make.param("float32")
    norm = {"center": True, "gate_position": position, "plan": Plan(team=team)}
    whole = emulate_forward(x, weight, bias, gate=gate, groups=2, **norm).result
    statistics = {"mean": whole.mean, "rstd": whole.rstd}
    grads = emulate_backward(dy, x, weight, bias, gate=gate, groups=2, **statistics, **norm).result
    for group, columns in enumerate((slice(None, width), slice(width, None))):
        of_group = [array[..., columns] for array in (x, weight, bias)]
        one = emulate_forward(*of_group, gate=gate[..., columns], **norm).result
        assert_same_bits(one.y, whole.y[..., columns], "y")
        statistics = {name: getattr(whole, name)[..., group].copy() for name in ("mean", "rstd")}
        assert_same_bits(one.rstd, statistics["rstd"], "rstd")
        assert_same_bits(one.mean, statistics["mean"], "mean")
        norm_of_group = {"gate": gate[..., columns], **statistics, **norm}
        one = emulate_backward(dy[..., columns], *of_group, **norm_of_group).result
        for name in ("dx", "dgate", "dweight", "dbias"):
            assert_same_bits(getattr(one, name), getattr(grads, name)[..., columns], name)


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
