# SPDX-License-Identifier: MIT
"""What is remembered of calls: enough to plan none twice, no array, and not without end.

That what is remembered gives each call what is its own is shown in test_repeated_calls.py.
"""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cunorm
from cunorm import NormForward
from tests.support.calls import (
    FUNCTIONS,
    anew,
    arrays_of,
    assert_same,
    call_of,
    change,
    elsewhere,
    fields,
    kinds,
    names,
    nothing_known,
    planning_forbidden,
    to,
)
from tests.support.group_norm_cases import laid_out
from tests.support.operands import assert_same_bits, at, draw
from tests.support.repeated import caches

SEVERAL = {"passes": (2, 4900, 8), "chunks": (9, 30_000, 8)}  # of launches on a CPU


@pytest.fixture
def known(monkeypatch):
    return nothing_known(monkeypatch)


# --- what is not planned again --------------------------------------------------------------------


@kinds
@names
def test_a_call_made_again_is_not_planned(name, kind, known):
    """With memory for all that it makes; for all but a part; and where it makes all by itself."""
    call = call_of(name, kind=kind)
    for part in (None, *call.parts()):
        call.run(without=part)
        expected = anew(call.make)
        with planning_forbidden(), at(part):
            assert_same(call.run(without=part), expected)
    call.make()
    for argument in arrays_of(call.arrays):
        call.arrays[argument] = elsewhere(call.arrays[argument])
        expected = anew(call.make)
        with planning_forbidden(), at(argument):
            assert_same(call.make(), expected)
    parts = len(call.parts())  # a call that is given nothing is one that is not given its one part
    assert len(known) == 1 + parts + (parts > 1)


@pytest.mark.parametrize("shape", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("name", ["group_norm_forward", "group_norm_backward"])
def test_a_call_of_several_launches_is_not_planned_again(name, shape, known):
    call = call_of(name, shape)
    for run in (call.run, call.make):
        run()
        change(call.arrays)
        expected = anew(call.make)
        with planning_forbidden():
            assert_same(run(), expected)


@kinds
@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("memory", ["last", "first"])
def test_a_result_in_the_memory_layout_of_x_is_made_again(memory, channel_axis, kind, known):
    call = call_of("group_norm_forward", (2, 8, 5, 8), kind, channel_axis=channel_axis)
    x = draw("x", (2, 8, 5, 8), "float32")
    call.arrays["x"] = to(kind, laid_out(x, channel_axis, memory))
    expected = call.make()
    with planning_forbidden():
        assert_same(call.make(), expected)


def test_a_result_of_the_form_of_one_that_is_given_is_another_array():
    x, y = draw("x", (5, 8), "float16"), np.empty((5, 8), np.float32)
    told = {"residual_dtype": "float32", "out": NormForward(y=y)}
    made = [cunorm.rms_norm_forward(x, **told).residual for _ in range(3)]
    assert len({id(array) for array in (*made, y)}) == 4
    for residual in made:
        assert_same_bits(residual, x.astype(np.float32))


# --- what is remembered has an end ----------------------------------------------------------------


def test_thousands_of_shapes_do_not_make_what_is_remembered_grow_without_end():
    def call(rows, width):
        x, weight = ones[:rows, :width], ones[0, :width]
        saved = cunorm.rms_norm_forward(x, weight, out=NormForward(y=np.empty(x.shape, "f4")))
        size = cunorm.workspace_size("rms_norm_backward", x, weight)
        told = {"rstd": saved.rstd, "workspace": np.empty(size, np.uint8)}
        cunorm.rms_norm_backward(x, x, weight, **told)
        cunorm.group_norm(x, 1)

    ones = np.ones((40, 80), np.float32)
    call(1, 1)
    remembering = caches()
    assert len(remembering) > 20
    endless = [one for one in remembering if one.cache_info().maxsize is None]
    bounded = [one for one in remembering if one.cache_info().maxsize is not None]
    assert all(one.cache_info().maxsize <= 4096 for one in bounded)
    before = [one.cache_info().currsize for one in endless]
    misses = [one.cache_info().misses for one in bounded]
    for rows in range(1, 36):
        for width in range(1, 33):
            call(rows, width)
    assert [one.cache_info().currsize for one in endless] == before
    asked = [o.cache_info().misses - n for o, n in zip(bounded, misses, strict=True)]
    assert max(asked) > 1024  # so that some is forgotten


def test_calls_that_are_too_many_are_forgotten(known):
    x, y = draw("x", (5, 8), "float32"), np.empty((5, 8), np.float32)
    for number in range(1, 1500):
        cunorm.l2_norm(x, eps=number, out=y)
        assert 1 <= len(known) <= 1024
    with planning_forbidden():
        cunorm.l2_norm(x, eps=1499, out=y)


@names
def test_nothing_that_is_remembered_keeps_an_array(name):
    call = call_of(name, (33, 44) if "group" not in name and "instance" not in name else None)
    arrays = [*arrays_of(call.arrays).values(), *call.out.values()]
    arrays += [*fields(call.run()).values(), *fields(call.make()).values()]
    seen = [weakref.ref(array) for array in arrays]
    del call, arrays
    gc.collect()
    assert not any(ref() is not None for ref in seen)


# --- threads --------------------------------------------------------------------------------------


def check_threads(calls, turns):
    """Make calls of the same forms in two threads at once, each on its own arrays."""
    expected = [[anew(call.make) for call in one] for one in calls]
    start = threading.Barrier(2)

    def work(mine, right):
        start.wait()
        for turn in range(turns):
            call, result = mine[turn % len(mine)], right[turn % len(mine)]
            with at(turn):
                assert_same(call.run() if turn % 3 == 0 else call.make(), result)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, calls, expected))


def drawn(thread, name, shape=None, kind="numpy"):
    call = call_of(name, shape, kind)
    for key, array in arrays_of(call.arrays).items():
        array[...] = to(kind, draw(f"{thread} {key}", tuple(array.shape), "float32"))
    return call


@pytest.mark.parametrize("kind", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_threads_that_share_plans_get_their_own_numbers(kind):
    """Calls on arrays of the same forms, which meet in all that is remembered."""
    some = ["rms_norm_forward", "layer_norm_backward", "group_norm_backward", "l2_norm"]
    functions, turns = (FUNCTIONS, 1000) if kind == "numpy" else (some, 60)
    calls = [[drawn(thread, name, kind=kind) for name in functions] for thread in range(2)]
    check_threads(calls, turns)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("group_norm", (2, 64, 64, 64)),
        ("group_norm_backward", (2, 64, 64, 64)),
        ("layer_norm_backward", (600, 257)),
    ],
)
def test_threads_are_lent_memory_of_their_own(name, shape):
    """For what the kernels of a call hand on from one to the next."""
    check_threads([[drawn(thread, name, shape)] for thread in range(2)], 30)
