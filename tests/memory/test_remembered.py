# SPDX-License-Identifier: MIT
"""What is remembered of calls: enough to plan none twice, no array, nothing that is another's.

That what is remembered gives each call what is its own is shown in test_repeated_calls.py.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import cunorm
from cunorm import NormForward
from tests.support.calls import (
    GROUP_NORMS,
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
from tests.support.internals import _scratch, numpy_view
from tests.support.operands import assert_same_bits, at, draw


@pytest.fixture
def known(monkeypatch):
    return nothing_known(monkeypatch)


# --- what is not planned again --------------------------------------------------------------------


@kinds
@names
def test_a_call_made_again_on_other_arrays_is_not_planned(name, kind, known):
    """With memory for its results it is, which may overlap; on the same, see test_out.py."""
    call = call_of(name, kind=kind)
    call.make()
    for argument in arrays_of(call.arrays):
        call.arrays[argument] = elsewhere(call.arrays[argument])
        expected = anew(call.make)
        with planning_forbidden(), at(argument):
            assert_same(call.make(), expected)
    assert len(known) == 1


@pytest.mark.parametrize("name", ["group_norm_forward", "group_norm_backward"])
def test_a_call_of_several_launches_is_not_planned_again(name, known):
    call = call_of(name, (2, 4900, 8))
    for run in (call.run, call.make):
        run()
        change(call.arrays)
        expected = anew(call.make)
        with planning_forbidden():
            assert_same(run(), expected)


@kinds
def test_a_result_in_the_memory_layout_of_x_is_made_again(kind, known):
    for axis, memory in ((1, "last"), (1, "first"), (-1, "last"), (-1, "first")):
        call = call_of("group_norm_forward", (2, 8, 5, 8), kind, channel_axis=axis)
        call.arrays["x"] = to(kind, laid_out(draw("x", (2, 8, 5, 8), "float32"), axis, memory))
        expected = call.make()
        with planning_forbidden(), at(axis, memory):
            assert_same(call.make(), expected)


def test_a_result_of_the_form_of_one_that_is_given_is_another_array():
    x, y = draw("x", (5, 8), "float16"), np.empty((5, 8), np.float32)
    told = {"residual_dtype": "float32", "out": NormForward(y=y)}
    made = [cunorm.rms_norm_forward(x, **told).residual for _ in range(3)]
    assert len({id(array) for array in (*made, y)}) == 4
    for residual in made:
        assert_same_bits(residual, x.astype(np.float32))


# --- what is not kept -----------------------------------------------------------------------------


def test_calls_that_are_too_many_are_forgotten(known):
    x, y = draw("x", (5, 8), "float32"), np.empty((5, 8), np.float32)
    for number in range(1, 1500):
        cunorm.l2_norm(x, eps=number, out=y)
        assert 1 <= len(known) <= 1024
    with planning_forbidden():
        cunorm.l2_norm(x, eps=1499, out=y)


@names
def test_nothing_that_is_remembered_keeps_an_array(name):
    call = call_of(name, None if name in GROUP_NORMS else (33, 44))
    arrays = [*arrays_of(call.arrays).values(), *call.out.values()]
    arrays += [*fields(call.run()).values(), *fields(call.make()).values()]
    seen = [weakref.ref(array) for array in arrays]
    del call, arrays
    gc.collect()
    assert not any(ref() is not None for ref in seen)


@pytest.mark.parametrize("is_known", [False, True], ids=["planned", "again"])
def test_a_call_within_a_call_does_not_touch_its_memory(monkeypatch, is_known):
    """A signal's handler may call while a call of its own thread has lent memory."""
    nothing_known(monkeypatch)
    x, other = draw("x", (1, 24, 24, 64), "float32"), draw("dy", (1, 48, 24, 64), "float32")
    expected, of_other = (anew(cunorm.group_norm, array, 4) for array in (x, other))
    call, lend, handled = partial(anew, cunorm.group_norm), _scratch.lend, []
    if is_known:
        call = cunorm.group_norm
        call(x, 4)
        call(other, 4)

    def with_a_signal(size):
        memory = lend(size)
        if not handled:
            handled.append(True)
            numpy_view(memory)[...] = 7
            assert_same_bits(call(other, 4), of_other)
            assert (numpy_view(memory) == 7).all()
        return memory

    monkeypatch.setattr(_scratch, "lend", with_a_signal)
    with planning_forbidden() if is_known else nullcontext():
        assert_same_bits(call(x, 4), expected)
    assert handled
