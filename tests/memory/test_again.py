# SPDX-License-Identifier: MIT
"""Calls that are made again: nothing is planned, and all comes out as if it was.

Results are compared, bit for bit, with those of a call that is planned anew. What makes another
call is in test_again_others.py; what is refused or not remembered in test_again_checks.py.
"""

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, NormForward, NormGrads
from tests.support.calls import (
    FUNCTIONS,
    WIDTH,
    anew,
    arrays_of,
    assert_same,
    call_of,
    change,
    elsewhere,
    empty_like,
    fields,
    given,
    nothing_known,
    planning_forbidden,
    to,
)
from tests.support.operands import assert_same_bits, at, draw

SHAPE = (5, WIDTH)

names = pytest.mark.parametrize("name", FUNCTIONS)
kinds = pytest.mark.parametrize("kind", ["numpy", "torch"])


@pytest.fixture(autouse=True)
def known(monkeypatch):
    return nothing_known(monkeypatch)


# --- results in given memory ----------------------------------------------------------------------


@kinds
@names
def test_a_call_made_again_is_not_planned_and_computes_with_what_its_arrays_hold(name, kind):
    call = call_of(name, kind=kind)
    call.run()
    change(call.arrays)
    expected = anew(call.make)
    with planning_forbidden():
        actual = call.run()
    assert_same(actual, expected)
    assert all(fields(actual)[field] is array for field, array in call.out.items())


@kinds
@names
def test_each_result_that_is_not_given_is_made_again(name, kind):
    call = call_of(name, kind=kind)
    for part in call.parts():
        call.run(without=part)
        change(call.arrays, f"without {part}")
        expected = anew(call.make)
        with planning_forbidden(), at(part):
            first, second = call.run(without=part), call.run(without=part)
            assert_same(first, expected)
            assert_same(second, expected)
        for field in fields(first).keys() & call.out.keys():
            assert (fields(first)[field] is fields(second)[field]) == (field != part)


@kinds
@names
def test_any_array_elsewhere_is_another_call_in_given_memory(name, kind, known):
    """Each argument in turn gets another array, with other numbers in it."""
    call = call_of(name, kind=kind)
    call.run()
    for argument in arrays_of(call.arrays):
        call.arrays[argument] = elsewhere(call.arrays[argument])
        with at(argument):
            assert_same(call.run(), anew(call.make))
    for field, array in call.out.items():
        call.out[field] = elsewhere(array)
        with at(field):
            assert_same(call.run(), anew(call.make))
            assert fields(call.run())[field] is call.out[field]
    assert len(known) == 1 + len(arrays_of(call.arrays)) + len(call.out)


@kinds
@names
def test_calls_that_make_results_and_calls_that_are_given_memory_do_not_mix(name, kind, known):
    call = call_of(name, kind=kind)
    expected = anew(call.make)
    for _ in range(3):
        made, given_to = call.make(), call.run()
        assert_same(made, expected)
        assert_same(given_to, expected)
        for field, array in call.out.items():
            assert fields(given_to)[field] is array
            assert fields(made)[field] is not array
            array[...] = np.nan
    assert len(known) == 2


@kinds
def test_a_call_in_place_is_made_again(kind, known):
    x, numbers = (to(kind, draw("x", SHAPE, "float32")) for _ in range(2))
    expected = anew(cunorm.rms_norm, numbers)
    for _ in range(3):
        x[...] = numbers
        assert cunorm.rms_norm(x, out=x) is x
        assert_same(x, expected)
    assert len(known) == 1


# --- results that a call makes --------------------------------------------------------------------


@kinds
@names
def test_results_are_made_anew_each_time_without_planning(name, kind):
    call = call_of(name, kind=kind)
    made = [call.make()]
    for turn in range(3):
        change(call.arrays, f"turn {turn}")
        expected = anew(call.make)
        with planning_forbidden():
            made.append(call.make())
        assert_same(made[-1], expected)
    arrays = [*arrays_of(call.arrays).values()]
    for result in made:
        arrays += {id(array): array for array in fields(result).values()}.values()
    for number, array in enumerate(arrays):
        assert not any(np.shares_memory(array, other) for other in arrays[:number])


@kinds
@names
def test_arrays_elsewhere_make_the_same_call(name, kind, known):
    call = call_of(name, kind=kind)
    call.make()
    kept = []  # so that nothing is made where they lie
    for argument in arrays_of(call.arrays):
        kept.append(call.arrays[argument])
        call.arrays[argument] = elsewhere(call.arrays[argument])
        expected = anew(call.make)
        with planning_forbidden(), at(argument):
            assert_same(call.make(), expected)
    assert len(known) == 1


ROWS = {
    "dense": lambda: draw("x", (3, 5, WIDTH), "float32"),
    "part of each sample": lambda: draw("x", (3, 7, WIDTH), "float32")[:, 1:6],
    "every other sample": lambda: draw("x", (6, 5, WIDTH), "float32")[::2],
    "wider rows": lambda: draw("x", (3, 5, 2 * WIDTH), "float32")[..., :WIDTH],
    "turned axes": lambda: draw("x", (5, 3, WIDTH), "float32").swapaxes(0, 1),
    "halves": lambda: draw("x", (3, 5, WIDTH), "float16"),
}
# Of images, with the axis of their channels.
IMAGES = {
    "channels last": (lambda: draw("x", (2, 5, 4, WIDTH), "float32"), -1),
    "channels first": (lambda: draw("x", (2, WIDTH, 5, 4), "float32"), 1),
    "channels_last": (lambda: draw("x", (2, 5, 4, WIDTH), "float32").transpose(0, 3, 1, 2), 1),
    "a crop": (lambda: draw("x", (2, 7, 4, WIDTH), "float32")[:, :5].transpose(0, 3, 1, 2), 1),
    "every other sample": (lambda: draw("x", (4, WIDTH, 5, 4), "float32")[::2], 1),
    "halves": (lambda: draw("x", (2, 5, 4, WIDTH), "float16").transpose(0, 3, 1, 2), 1),
    "one line": (lambda: draw("x", (1, 1, 4, WIDTH), "float32").transpose(0, 3, 1, 2), 1),
}


def assert_made_alike(function, x, *rest, **more):
    """Compare what a call makes again with what it makes when it is planned."""
    function(x, *rest, **more)
    change({"x": x})
    expected = anew(function, x, *rest, **more)
    with planning_forbidden():
        assert_same(function(x, *rest, **more), expected)
    return expected


@kinds
@pytest.mark.parametrize("layout", ROWS)
def test_results_of_rows_of_any_layout_are_made_as_when_planned(layout, kind):
    x, dy = (to(kind, ROWS[layout]()) for _ in range(2))
    residual = to(kind, ROWS[layout]().astype("float32"))
    weight = to(kind, draw("weight", WIDTH, "float32"))
    for told in ({}, {"dtype": "float64"}, {"residual": residual, "dtype": "float32"}):
        f = assert_made_alike(cunorm.layer_norm_forward, x, weight, **told)
    for told in ({}, {"x_dtype": "float16"}):
        saved = {"rstd": f.rstd, "mean": f.mean}
        assert_made_alike(cunorm.layer_norm_backward, dy, x, weight, weight, **saved, **told)


@kinds
@pytest.mark.parametrize("layout", IMAGES)
def test_results_of_images_of_any_layout_are_made_as_when_planned(layout, kind):
    make, channel_axis = IMAGES[layout]
    x, dy, weight = to(kind, make()), to(kind, make()), to(kind, draw("w", WIDTH, "float32"))
    axis = {"channel_axis": channel_axis}
    for told in ({}, {"dtype": "float64"}):
        f = assert_made_alike(cunorm.group_norm_forward, x, 4, weight, **told, **axis)
    saved = {"rstd": f.rstd, "mean": f.mean}
    assert_made_alike(cunorm.group_norm_backward, dy, x, 4, weight, weight, **saved, **axis)


@kinds
def test_a_result_may_be_made_like_one_that_is_given(kind):
    x, y = to(kind, draw("x", SHAPE, "float16")), to(kind, np.empty(SHAPE, np.float32))
    out, told = NormForward(y=y), {"residual_dtype": "float32"}
    made = [cunorm.rms_norm_forward(x, **told, out=out).residual for _ in range(2)]
    assert made[0] is not made[1]
    assert all(residual is not y for residual in made)
    for residual in made:
        assert_same_bits(residual, anew(cunorm.rms_norm_forward, x, **told).residual)


def test_gradients_of_no_rows_are_made_again():
    arrays = {"rstd": np.empty(0, np.float32), "weight": given().weight}
    x = np.empty((0, WIDTH), np.float32)
    assert_made_alike(cunorm.rms_norm_backward, x, x, **arrays)


# --- the stream -----------------------------------------------------------------------------------


@kinds
def test_a_stream_that_is_x_itself_is_returned_again(kind, known):
    x = to(kind, given().x)
    y = empty_like(x)
    for _ in range(2):
        assert cunorm.add_rms_norm(x, None, out=AddNorm(y=y)).residual is x
        assert cunorm.add_rms_norm(x, None).residual is x
    assert len(known) == 2
    out = NormForward(y=y, rstd=to(kind, np.empty(5, np.float32)))
    for _ in range(2):
        assert cunorm.rms_norm_forward(x, residual_dtype="float32", out=out).residual is x
        assert cunorm.rms_norm_forward(x, out=out).residual is None
    assert len(known) == 4


def test_dx_and_dresidual_stand_for_one_another_again(known):
    arrays = given()
    array = np.empty(SHAPE, np.float32)
    for out in (NormGrads(dx=array), NormGrads(dresidual=array)):
        for _ in range(2):
            grads = cunorm.rms_norm_backward(arrays.dy, arrays.x, rstd=arrays.rstd, out=out)
            assert grads.dx is array
            assert grads.dresidual is array
    assert len(known) == 2
    for _ in range(2):
        grads = cunorm.rms_norm_backward(arrays.dy, arrays.x, rstd=arrays.rstd)
        assert grads.dx is grads.dresidual
    assert len(known) == 3
