# SPDX-License-Identifier: MIT
"""Results written exactly over inputs: the same bits as in arrays of their own.

An array of a gated call can be both what a thread reads and where it writes, several at once; rows
are few and many, short and long, whole and in groups, so that every way of walking them is taken.
Group norms in place are in test_out.py, in each of their memory layouts.
"""

from __future__ import annotations

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, NormForward, NormGrads
from tests.support.calls import devices, host, to
from tests.support.operands import assert_same_bits, at, draw
from tests.support.processes import in_process

SIZES = [(1, 1003, 1), (1, 64, 4), (9, 5, 1), (9, 1003, 1), (9, 5000, 1), (9, 5, 5), (50, 1000, 8)]
SMALL = [(3, 64, 4), (2, 1003, 1)]  # for GPUs that are interpreted
POSITIONS = ("pre", "post")
FORWARD_PLACES = [
    *({"y": name} for name in ("x", "gate", "residual")),
    *({"residual": name} for name in ("x", "residual")),
    {"y": "gate", "residual": "x"},
    {"y": "gate", "residual": "residual"},
    {"y": "x", "residual": "residual"},
    {"y": "residual", "residual": "x"},
]
BACKWARD_PLACES = [
    *({field: name} for field in ("dx", "dgate") for name in ("dy", "x", "gate", "d_residual")),
    {"dweight": "weight", "dbias": "bias"},
    {"dresidual": "x"},
    {"dx": "dy", "dgate": "gate"},
    {"dx": "x", "dgate": "gate"},
    {"dx": "gate", "dgate": "dy"},
    {"dx": "d_residual", "dgate": "x"},
    {"dx": "dy", "dgate": "gate", "dweight": "weight", "dbias": "bias"},
    {"dx": "gate", "dgate": "x", "dweight": "bias", "dbias": "weight"},
]


def arrays_of(rows, width, dtype, *names):
    of_rows = {name: draw(name, (rows, width), dtype) for name in names}
    return of_rows | {name: draw(name, width, dtype) for name in ("weight", "bias")}


def statistics(rows, groups):
    """Draw a mean and an rstd of those rows: bits are compared, not what is right for them."""
    shape = (*rows, groups) if groups > 1 else rows
    mean, rstd = (np.asarray(draw(name, shape, "float32")) for name in ("mean", "rstd"))
    return {"mean": mean, "rstd": rstd}


def check(function, result, arrays, all_places, kind="numpy", **told):
    """Call with results over copies of inputs, and compare with results in memory of their own."""

    def put():
        return {name: to(kind, array.copy()) for name, array in arrays.items()}

    right = {k: host(a) for k, a in function(**put(), **told)._asdict().items() if a is not None}
    for places in all_places:
        copies = put()
        out = result(**{field: copies[name] for field, name in places.items()})
        with at(places):
            actual = function(**copies, **told, out=out)
            assert all(getattr(actual, field) is getattr(out, field) for field in places)
            for field, array in right.items():
                assert_same_bits(host(getattr(actual, field)), array, field)


def sizes(kind):
    return SIZES if kind == "numpy" else SMALL


# --- every pair, and several at once --------------------------------------------------------------


@devices
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_of_a_forward_may_be_exactly_inputs(dtype, position, kind):
    for rows, width, groups in sizes(kind):
        told = {"groups": groups, "gate_position": position, "kind": kind}
        arrays = arrays_of(rows, width, dtype, "x", "residual", "gate")
        with at(rows, width, groups):
            check(cunorm.layer_norm_forward, NormForward, arrays, FORWARD_PLACES, **told)


@devices
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_may_be_exactly_inputs(dtype, position, kind):
    for rows, width, groups in sizes(kind):
        told = {"groups": groups, "gate_position": position, "kind": kind}
        arrays = arrays_of(rows, width, dtype, "dy", "x", "d_residual", "gate")
        arrays |= statistics((rows,), groups)
        with at(rows, width, groups):
            check(cunorm.layer_norm_backward, NormGrads, arrays, BACKWARD_PLACES, **told)


@pytest.mark.parametrize("position", POSITIONS)
def test_both_gradients_of_a_wider_stream_may_be_exactly_inputs(position):
    """dx is in bfloat16, over dy, the gate or d_residual, and dresidual in float32, over x."""
    all_places = (
        {"dx": "dy", "dresidual": "x"},
        {"dx": "gate", "dresidual": "x", "dgate": "dy"},
        {"dx": "d_residual", "dgate": "gate"},
    )
    for rows, width, groups in SIZES:
        told = {"groups": groups, "gate_position": position, "x_dtype": "bfloat16"}
        arrays = arrays_of(rows, width, "bfloat16", "dy", "d_residual", "gate")
        arrays |= statistics((rows,), groups) | {"x": draw("x", (rows, width), "float32")}
        with at(rows, width, groups):
            check(cunorm.layer_norm_backward, NormGrads, arrays, all_places, **told)


# --- one array for several operands ---------------------------------------------------------------


@pytest.mark.parametrize("position", POSITIONS)
def test_a_result_may_be_written_over_an_array_that_is_every_input(position):
    for rows, width, groups in SIZES:
        told = {"groups": groups, "gate_position": position}
        x = draw("x", (rows, width), "float32")
        expected = cunorm.rms_norm(x, gate=x, **told)
        one = x.copy()
        assert_same_bits(cunorm.rms_norm(one, gate=one, **told, out=one), expected)
        told |= statistics((rows,), groups) | arrays_of(rows, width, "float32")
        names = ("dy", "x", "gate", "d_residual")
        expected = cunorm.layer_norm_backward(**dict.fromkeys(names, x), **told)
        for field in ("dx", "dgate"):
            one = x.copy()
            out = NormGrads(**{field: one})
            grads = cunorm.layer_norm_backward(**dict.fromkeys(names, one), **told, out=out)
            for found, right in zip(grads, expected, strict=True):
                with at(rows, width, groups, field):
                    assert_same_bits(found, right)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("groups", [1, 4, 64])
def test_in_one_row_any_gradient_may_be_exactly_any_input(position, groups):
    """There every operand has the shape of x, statistics too if each element is a group."""
    arrays = arrays_of(1, 64, "float32", "dy", "x", "d_residual", "gate")
    arrays = {name: array.reshape(64) for name, array in arrays.items()} | statistics((), groups)
    all_places = [
        {field: name}
        for field in NormGrads._fields
        for name, array in arrays.items()
        if array.shape == (64,)
    ]
    told = {"groups": groups, "gate_position": position}
    check(cunorm.layer_norm_backward, NormGrads, arrays, all_places, **told)


@pytest.mark.parametrize(
    "view",
    [
        lambda memory: memory[:, 1, :, :64],
        lambda memory: memory[::-1, 0, :, 3:67],
        lambda memory: memory[:, 1, ::2, 16:80].transpose(1, 0, 2),
    ],
    ids=["part of a fused array", "reversed", "transposed"],
)
@pytest.mark.parametrize("groups", [1, 4])
def test_views_may_be_written_over_and_nothing_around_them(view, groups):
    """dy and the gate lie in the same strides; between their rows there is other memory."""
    memory = {name: draw(name, (6, 2, 4, 80), "float32") for name in ("dy", "gate")}
    before = {name: array.copy() for name, array in memory.items()}
    dy, gate = map(view, memory.values())
    told = arrays_of(1, 64, "float32") | statistics(dy.shape[:-1], groups) | {"groups": groups}
    told["x"] = draw("x", dy.shape, "float32")
    expected = cunorm.layer_norm_backward(dy, gate=gate, **told)
    grads = cunorm.layer_norm_backward(dy, gate=gate, **told, out=NormGrads(dx=dy, dgate=gate))
    for found, right in zip(grads, expected, strict=True):
        assert_same_bits(found, right)
    for name, array in memory.items():
        view(array)[...] = view(before[name])
        assert_same_bits(array, before[name], f"the memory around {name}")


# --- where the residual stream begins -------------------------------------------------------------

WIDTHS, STREAMS = (1, 7, 64, 1003, 20000, 40001), ("float16", "float32", "float64")


def check_y_over_x(widths):
    """Of rows that are aligned to an element, and to no more."""
    for width, dtype in ((width, dtype) for width in widths for dtype in STREAMS):
        x, weight = draw("x", (5, width + 1), "float32")[:, 1:], draw("weight", width, "float32")
        out = NormForward(residual=np.empty(x.shape, dtype))
        apart = cunorm.layer_norm_forward(x, weight, out=out)
        out = NormForward(y=x, residual=np.empty(x.shape, dtype))
        result = cunorm.layer_norm_forward(x, weight, out=out)
        assert result.y is out.y
        assert result.residual is out.residual
        for field, array in apart._asdict().items():
            assert_same_bits(getattr(result, field), array, field)


def test_y_may_be_exactly_x_where_the_stream_is_written_to_an_array_of_its_own():
    check_y_over_x(WIDTHS)


def test_the_reference_writes_y_over_x_as_the_kernels_do():
    script = """
import warnings
from cunorm import AddNorm
from tests.memory.test_in_place import check_y_over_x
with warnings.catch_warnings(record=True) as said:
    check_y_over_x((1, 7, 64, 1003))
assert any("found no C++ compiler" in str(one.message) for one in said)
row = np.random.default_rng(0).standard_normal(64).astype(np.float32)
apart = cunorm.add_rms_norm(row, None, place := row.copy())
result = cunorm.add_rms_norm(row, None, place, out=AddNorm(y=place))
assert result.residual is row
np.testing.assert_array_equal(place, apart.y)
"""
    in_process(script, CXX="", PATH="/dev/null")


@pytest.mark.parametrize("name", ["add_normalize", "add_rms_norm", "add_layer_norm"])
def test_y_may_be_exactly_x_where_the_stream_is_of_another_dtype(name):
    for width in WIDTHS:
        x = draw("x", (5, width), "bfloat16")
        told = {"residual": None, "residual_dtype": "float32"}
        expected = getattr(cunorm, name)(x, **told)
        result = getattr(cunorm, name)(x, **told, out=AddNorm(y=x))
        with at(width):
            assert result.y is x
            assert_same_bits(result.y, expected.y, "y")
            assert_same_bits(result.residual, expected.residual, "residual")


def test_where_x_is_returned_as_the_stream_y_may_be_any_other_input():
    x, gate, weight = (draw(name, 1003, "float32") for name in ("x", "gate", "weight"))
    before, told = x.copy(), {"gate": gate, "weight": weight}
    expected = cunorm.add_rms_norm(x, None, **told, groups=17).y
    for name in told:
        place = told[name].copy()
        out = AddNorm(y=place)
        result = cunorm.add_rms_norm(x, None, **told | {name: place}, groups=17, out=out)
        assert result.y is place
        assert result.residual is x
        assert_same_bits(place, expected, name)
        assert_same_bits(x, before, "x")
