# SPDX-License-Identifier: MIT
"""Results written exactly over inputs, gates among them: the same bits as in arrays of their own.

An array of a gated call can be both what a thread reads and where it writes, several at once; rows
are few and many, short and long, whole and in groups, so that every way of walking them is taken.
"""

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, NormForward, NormGrads
from tests.support.calls import WIDTH, given, raises
from tests.support.operands import assert_same_bits, assert_same_fields, at, bits, draw

SIZES = [
    (rows, width, groups)
    for rows in (1, 50)
    for width, groups in ((5, 1), (64, 1), (1003, 1), (5000, 1), (5, 5), (64, 4), (5000, 8))
]
DTYPES = ("float32", "bfloat16")
POSITIONS = ("pre", "post")
OWN = "expected memory of its own"
IN_PLACE = f"{OWN} (or exactly the memory, shape, strides and dtype of an input)"

FORWARD_PLACES = [
    {"y": "x"},
    {"y": "gate"},
    {"y": "residual"},
    {"residual": "x"},
    {"residual": "residual"},
    {"y": "gate", "residual": "x"},
    {"y": "gate", "residual": "residual"},
    {"y": "x", "residual": "residual"},
    {"y": "residual", "residual": "x"},
]
BACKWARD_PLACES = [
    {"dx": "dy"},
    {"dx": "x"},
    {"dx": "gate"},
    {"dx": "d_residual"},
    {"dgate": "gate"},
    {"dgate": "dy"},
    {"dgate": "x"},
    {"dgate": "d_residual"},
    {"dx": "dy", "dgate": "gate"},
    {"dx": "x", "dgate": "gate"},
    {"dx": "gate", "dgate": "dy"},
    {"dx": "d_residual", "dgate": "x"},
    {"dx": "dy", "dgate": "gate", "dweight": "weight", "dbias": "bias"},
    {"dx": "gate", "dgate": "x", "dweight": "bias", "dbias": "weight"},
]


def drawn(names, shape, dtype):
    return {name: draw(name, shape, dtype) for name in names}


def forward_arrays(rows, width, dtype):
    of_rows = drawn(("x", "residual", "gate"), (rows, width), dtype)
    return of_rows | drawn(("weight", "bias"), width, dtype)


def backward_arrays(rows, width, dtype):
    of_rows = drawn(("dy", "x", "d_residual", "gate"), (rows, width), dtype)
    return of_rows | drawn(("weight", "bias"), width, dtype)


def statistics(rows, groups):
    """Draw a mean and an rstd of those rows: bits are compared, not what is right for them."""
    shape = (*rows, groups) if groups > 1 else rows
    mean, rstd = (np.asarray(draw(name, shape, "float32")) for name in ("mean", "rstd"))
    return {"mean": mean, "rstd": rstd}


def check(function, result, arrays, all_places, **told):
    """Call with results over copies of inputs, and compare with results in memory of their own."""
    expected = function(**arrays, **told)
    for places in all_places:
        copies = arrays | {name: arrays[name].copy() for name in places.values()}
        out = result(**{field: copies[name] for field, name in places.items()})
        with at(places):
            actual = function(**copies, **told, out=out)
            assert_same_fields(actual, expected)
            assert all(getattr(actual, field) is getattr(out, field) for field in places)


# --- every pair, and several at once --------------------------------------------------------------


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_of_a_gated_forward_may_be_exactly_inputs(dtype, position):
    for rows, width, groups in SIZES:
        told = {"groups": groups, "gate_position": position}
        arrays = forward_arrays(rows, width, dtype)
        with at(rows, width, groups):
            check(cunorm.layer_norm_forward, NormForward, arrays, FORWARD_PLACES, **told)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_gated_norm_may_be_exactly_inputs(dtype, position):
    for rows, width, groups in SIZES:
        told = {"groups": groups, "gate_position": position}
        arrays = backward_arrays(rows, width, dtype) | statistics((rows,), groups)
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
        arrays = backward_arrays(rows, width, "bfloat16") | statistics((rows,), groups)
        arrays["x"] = draw("x", (rows, width), "float32")
        with at(rows, width, groups):
            check(cunorm.layer_norm_backward, NormGrads, arrays, all_places, **told)


@pytest.mark.parametrize("name", ["x", "gate"])
@pytest.mark.parametrize("position", POSITIONS)
def test_y_alone_may_be_exactly_an_input(position, name):
    for rows, width, groups in SIZES:
        told = {"groups": groups, "gate_position": position}
        x, gate = (draw(operand, (rows, width), "bfloat16") for operand in ("x", "gate"))
        expected = cunorm.rms_norm(x, gate=gate, **told)
        place = {"x": x, "gate": gate}[name]
        with at(rows, width, groups):
            assert cunorm.rms_norm(x, gate=gate, **told, out=place) is place
            assert_same_bits(place, expected)


# --- one array for several operands ---------------------------------------------------------------


@pytest.mark.parametrize("position", POSITIONS)
def test_a_y_may_be_written_over_an_array_that_is_x_and_its_gate(position):
    for rows, width, groups in SIZES:
        told = {"groups": groups, "gate_position": position}
        x = draw("x", (rows, width), "bfloat16")
        expected = cunorm.rms_norm(x, gate=x, **told)
        with at(rows, width, groups):
            assert_same_bits(cunorm.rms_norm(x, gate=x, **told, out=x), expected)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("field", ["dx", "dgate"])
def test_a_gradient_may_be_written_over_an_array_that_is_every_input(field, position):
    for rows, width, groups in SIZES:
        told = {"groups": groups, "gate_position": position} | statistics((rows,), groups)
        told["weight"] = told["bias"] = draw("weight", width, "float32")
        one = draw("x", (rows, width), "float32")
        names = ("dy", "x", "gate", "d_residual")
        expected = cunorm.layer_norm_backward(**dict.fromkeys(names, one), **told)
        out = NormGrads(**{field: one})
        with at(rows, width, groups):
            grads = cunorm.layer_norm_backward(**dict.fromkeys(names, one), **told, out=out)
            assert_same_fields(grads, expected)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("groups", [1, 4, 64])
def test_in_one_row_any_gradient_may_be_exactly_any_input(position, groups):
    """There every operand has the shape of x, statistics too if each element is a group."""
    arrays = backward_arrays(1, 64, "float32")
    arrays = {name: array.reshape(64) for name, array in arrays.items()} | statistics((), groups)
    all_places = [
        {field: name}
        for field in NormGrads._fields
        for name, array in arrays.items()
        if array.shape == (64,)
    ]
    told = {"groups": groups, "gate_position": position}
    check(cunorm.layer_norm_backward, NormGrads, arrays, all_places, **told)


@pytest.mark.parametrize("position", POSITIONS)
def test_gradients_may_be_exactly_the_statistics_of_groups_of_one_element(position):
    arrays = backward_arrays(50, 4, "float32") | statistics((50,), 4)
    all_places = ({"dx": "rstd"}, {"dx": "mean", "dgate": "rstd"}, {"dgate": "mean"})
    told = {"groups": 4, "gate_position": position}
    check(cunorm.layer_norm_backward, NormGrads, arrays, all_places, **told)


# --- rows that do not lie one after the other -----------------------------------------------------


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
    memory = drawn(("dy", "gate"), (6, 2, 4, 80), "float32")
    before = {name: array.copy() for name, array in memory.items()}
    dy, gate = map(view, memory.values())
    x, parameters = draw("x", dy.shape, "float32"), drawn(("weight", "bias"), 64, "float32")
    told = parameters | statistics(dy.shape[:-1], groups) | {"groups": groups}
    expected = cunorm.layer_norm_backward(dy, x, gate=gate, **told)
    out = NormGrads(dx=dy, dgate=gate)
    grads = cunorm.layer_norm_backward(dy, x, gate=gate, **told, out=out)
    assert_same_fields(grads, expected)
    for name, array in memory.items():
        view(array)[...] = view(before[name])
        assert_same_bits(array, before[name], f"the memory around {name}")


# --- what is refused ------------------------------------------------------------------------------


def test_the_new_stream_may_not_be_written_over_a_gate_that_is_read_again():
    arrays = given()
    for name in ("add_normalize", "add_rms_norm", "add_layer_norm"):
        with raises(ValueError, f"{name}: out.residual overlaps gate, {OWN}"):
            getattr(cunorm, name)(
                arrays.x, arrays.residual, gate=arrays.gate, out=AddNorm(residual=arrays.gate)
            )
    with raises(ValueError, f"rms_norm_forward: out.residual overlaps gate, {OWN}"):
        cunorm.rms_norm_forward(
            arrays.x,
            residual=arrays.residual,
            gate=arrays.residual,  # exactly what the stream may be, were it not the gate too
            out=NormForward(residual=arrays.residual),
        )


def test_statistics_may_not_be_written_over_a_gate():
    x, gate = draw("x", (WIDTH, 1), "float32"), draw("gate", (WIDTH, 1), "float32")
    with raises(ValueError, f"rms_norm_forward: out.rstd overlaps gate, {OWN}"):
        cunorm.rms_norm_forward(x, gate=gate, out=NormForward(rstd=gate[:, 0]))


def backward_with(out, **operands):
    arrays = vars(given())
    names = ("dy", "x", "gate", "weight", "bias", "rstd", "mean")
    told = {name: arrays[name] for name in names} | operands
    return cunorm.layer_norm_backward(**told, out=out)


@pytest.mark.parametrize("other", ["dy", "x", "gate", "d_residual"])
def test_dgate_that_overlaps_part_of_an_input_is_refused(other):
    memory = draw("memory", 5 * WIDTH + 1, "float32")
    first, second = memory[:-1].reshape(5, WIDTH), memory[1:].reshape(5, WIDTH)
    before = bits(memory).copy()
    for dgate, operand in ((first, second), (second, first), (first, first[::-1])):
        with raises(ValueError, f"layer_norm_backward: out.dgate overlaps {other}, {IN_PLACE}"):
            backward_with(NormGrads(dgate=dgate), **{other: operand})
    np.testing.assert_array_equal(bits(memory), before)


def test_dgate_may_not_overlap_another_gradient():
    one, parameter = np.empty((5, WIDTH), np.float32), np.empty(WIDTH, np.float32)
    for out, shared in (
        (NormGrads(dx=one, dgate=one), "out.dgate overlaps out.dx"),
        (NormGrads(dx=one, dgate=one[::-1]), "out.dgate overlaps out.dx"),
        (NormGrads(dgate=one, dresidual=one), "out.dresidual overlaps out.dgate"),
        (NormGrads(dweight=one[2], dgate=one), "out.dgate overlaps out.dweight"),
        (NormGrads(dbias=one[4], dgate=one, dweight=parameter), "out.dgate overlaps out.dbias"),
    ):
        with raises(ValueError, f"layer_norm_backward: {shared}, {OWN}"):
            backward_with(out)


def test_dgate_may_not_be_an_expanded_gate():
    """dgate is full: an element for each of x."""
    row = draw("gate", WIDTH, "float32")
    gate = np.lib.stride_tricks.as_strided(row, (5, WIDTH), (0, 4))
    text = "with which elements may share memory, expected memory of its own for each element"
    with raises(ValueError, f"layer_norm_backward: out.dgate has strides (0, 1), {text}"):
        backward_with(NormGrads(dgate=gate), gate=gate)
    assert backward_with(None, gate=gate).dgate.shape == (5, WIDTH)
