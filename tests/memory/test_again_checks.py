# SPDX-License-Identifier: MIT
"""Calls that are made again take nothing for granted: wrong input is refused, whatever was met.

And what a call does that copies, or is none of one framework's plain arrays, is not remembered.
"""

from decimal import Decimal
from functools import partial

import numpy as np
import pytest

import cunorm
from cunorm import NormForward, _again, _backend
from tests.support.calls import (
    FUNCTIONS,
    WIDTH,
    anew,
    arrays_of,
    assert_refused,
    call_of,
    fields,
    given,
    nothing_known,
    planning_forbidden,
    to,
)
from tests.support.kinds import Foreign
from tests.support.operands import assert_same_bits, at, draw

SHAPE = (5, WIDTH)

names = pytest.mark.parametrize("name", FUNCTIONS)
kinds = pytest.mark.parametrize("kind", ["numpy", "torch"])


@pytest.fixture(autouse=True)
def known(monkeypatch):
    return nothing_known(monkeypatch)


# --- wrong input is refused though the forms were met before --------------------------------------


def remembered(known, has_out=True):
    """Return arrays of a call that is remembered, and what else it was told."""
    arrays = given()
    out = NormForward(y=np.empty(SHAPE, np.float32), rstd=np.empty(5, np.float32))
    told = {"out": out} if has_out else {}
    cunorm.rms_norm_forward(arrays.x, arrays.weight, **told)
    assert len(known) == 1
    return arrays.x, arrays.weight, told


def refused(error, text, *arrays, **told):
    call = partial(cunorm.rms_norm_forward, *arrays, **told)
    assert_refused(call, error, f"rms_norm_forward: {text}")


@pytest.mark.parametrize("has_out", [True, False], ids=["given memory", "makes results"])
def test_the_same_memory_as_another_array_is_checked_again(known, has_out):
    x, weight, told = remembered(known, has_out)
    refused(TypeError, "x has dtype int32", x.view(np.int32), weight, **told)
    refused(TypeError, "x is a masked array", np.ma.masked_array(x, copy=False), weight, **told)
    refused(ValueError, "weight has shape (8,), expected (5,)", x.T, weight, **told)
    refused(ValueError, "weight has shape (8,), expected (5,)", x.reshape(WIDTH, 5), weight, **told)
    refused(TypeError, "weight is of type list", x, weight.tolist(), **told)
    if has_out:
        refused(ValueError, "out.y has shape (5, 8), expected (4, 8)", x[:4], weight, **told)


@pytest.mark.parametrize("has_out", [True, False], ids=["given memory", "makes results"])
def test_values_that_are_equal_and_of_another_type_are_refused(known, has_out):
    x, weight, told = remembered(known, has_out)
    cunorm.rms_norm_forward(x, weight, **told, eps=1.0)
    for said in ({"groups": True}, {"round_before_weight": 0}, {"eps": True}):
        (name,) = said
        refused(TypeError, f"{name} is ", x, weight, **told, **said)


def test_a_constant_of_a_type_that_is_refused_is_so_after_an_equal_one(known):
    x = given().x
    cunorm.normalize(x, c=2)
    with pytest.raises(TypeError, match="c is "):
        cunorm.normalize(x, c=Decimal("2"))


def test_a_weight_offset_that_was_met_with_a_weight_is_refused_without_one(known):
    arrays, told = given(), {"weight_offset": 1.0}
    cunorm.rms_norm_forward(arrays.x, arrays.weight, **told)
    refused(ValueError, "weight_offset is 1.0, expected 0 without a weight", arrays.x, **told)
    backward, statistics = cunorm.rms_norm_backward, {"rstd": arrays.rstd}
    backward(arrays.dy, arrays.x, arrays.weight, **statistics, **told)
    call = partial(backward, arrays.dy, arrays.x, **statistics, **told)
    assert_refused(call, ValueError, "rms_norm_backward: weight_offset is 1.0")


def test_a_result_that_became_read_only_is_refused(known):
    x, weight, told = remembered(known)
    told["out"].y.flags.writeable = False
    refused(ValueError, "out.y cannot be written to in place", x, weight, **told)


def test_other_strides_are_another_call():
    memory = np.asarray(draw("x", (2 * 5, WIDTH), "float32"))
    out = np.empty(SHAPE, np.float32)
    for x in (memory[:5], memory[::2], memory[:5], memory[::2]):
        assert_same_bits(cunorm.rms_norm(x, out=out), anew(cunorm.rms_norm, x))


def moved_onto(memory, array):
    """Return an array of the same form that begins where some bytes do."""
    return memory[: array.nbytes].view(array.dtype).reshape(array.shape)


@kinds
def test_an_input_and_a_result_that_overlap_are_refused_though_each_was_met_where_it_is(kind):
    memory, free = (to(kind, np.zeros((rows, WIDTH), np.float32)) for rows in (6, 5))
    for one, other in ((memory[1:], memory[:5]), (memory[:5], memory[1:])):
        cunorm.rms_norm(one)
        cunorm.rms_norm(one, out=free)
        cunorm.rms_norm(free, out=other)
        text = "rms_norm: out overlaps x, expected memory of its own"
        assert_refused(partial(cunorm.rms_norm, one, out=other), ValueError, text)


@kinds
@pytest.mark.parametrize("name", ["layer_norm_backward", "group_norm_backward", "group_norm"])
def test_a_workspace_that_overlaps_any_array_is_refused_though_each_was_met_where_it_is(name, kind):
    call = call_of(name, kind=kind)
    memory, free = to(kind, np.zeros(1 << 14, np.uint8)), call.workspace
    for arrays in (call.arrays, call.out):
        for argument, array in arrays_of(arrays).items():
            call.workspace, arrays[argument] = free, moved_onto(memory, array)
            call.run()
            call.workspace, arrays[argument] = memory, array
            call.run()
            arrays[argument] = moved_onto(memory, array)
            with at(argument):
                assert_refused(call.run, ValueError, f"{name}: workspace overlaps ")
            arrays[argument] = array


def test_a_workspace_that_became_smaller_is_refused():
    call = call_of("rms_norm_backward")
    call.run()
    call.workspace = call.workspace[:8]
    assert_refused(call.run, ValueError, "rms_norm_backward: workspace has 8 bytes")


# --- what is not remembered -----------------------------------------------------------------------


def test_a_call_that_copies_is_not_remembered(known):
    """As it does with rows of spread elements, and with elements that are not aligned."""
    out = np.empty(SHAPE, np.float32)
    spread = np.asarray(draw("x", (5, 2 * WIDTH), "float32"))
    shifted = np.zeros(4 * 5 * WIDTH + 1, np.uint8)[1:].view(np.float32).reshape(SHAPE)
    for x in (spread[:, ::2], shifted):
        for number in range(3):
            x[...] = draw(f"x {number}", SHAPE, "float32")
            expected = anew(cunorm.rms_norm, np.ascontiguousarray(x))
            assert_same_bits(cunorm.rms_norm(x, out=out), expected)
            assert_same_bits(cunorm.rms_norm(x), expected)
    assert not known


@kinds
@names
def test_a_call_on_arrays_of_two_frameworks_is_not_remembered_and_right(name, kind, known):
    """Each array in turn is of the other one; where there are no others, so is what is made."""
    call, expected = call_of(name, kind=kind), anew(call_of(name).make)
    other = call_of(name, kind="torch" if kind == "numpy" else "numpy")
    for arrays, others in ((call.arrays, other.arrays), (call.out, other.out)):
        for argument, array in arrays_of(arrays).items():
            arrays[argument] = others[argument]
            makes = arrays is call.arrays and len(arrays_of(arrays)) > 1
            for run in 2 * [call.run, *([call.make] if makes else [])]:
                result = fields(run())
                with at(argument):
                    for field, right in fields(expected).items():
                        np.testing.assert_array_equal(result[field], right)
            arrays[argument] = array
    assert not known


class Tagged(np.ndarray):
    """An array that is not of NumPy's own type."""


def of_jax(array):
    return pytest.importorskip("jax", reason="JAX is not installed").numpy.asarray(array)


@pytest.mark.parametrize("convert", [lambda x: x.view(Tagged), of_jax, Foreign])
def test_a_call_on_arrays_of_other_types_is_not_remembered(convert, known):
    x, weight = given().x, given().weight
    expected = anew(cunorm.rms_norm, x, weight)
    for arrays in 2 * [(convert(x), weight), (x, convert(weight))]:
        np.testing.assert_array_equal(cunorm.rms_norm(*arrays), expected)
    assert not known


@kinds
def test_a_call_with_nothing_to_run_is_not_remembered(kind, known):
    x = to(kind, np.empty((0, WIDTH), np.float32))
    for _ in range(2):
        assert cunorm.rms_norm(x).shape == (0, WIDTH)
        assert cunorm.group_norm(x, 2).shape == (0, WIDTH)
    assert not known


def test_calls_are_forgotten_with_their_kernels_and_when_they_are_too_many(known, monkeypatch):
    monkeypatch.setattr(_again, "_LIMIT", 3)
    x, weight, told = remembered(known)
    for number in range(1, 8):
        cunorm.rms_norm_forward(x, weight, **told, eps=number)
        assert 1 <= len(known) <= 3
        with planning_forbidden():
            cunorm.rms_norm_forward(x, weight, **told, eps=number)
    _backend.forget()
    assert not known
