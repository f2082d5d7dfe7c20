# SPDX-License-Identifier: MIT
"""Group norms with `out=` and `workspace=` take no memory, and are made again as what they are.

As test_no_allocation.py and test_again.py, which say how, have it of the row norms; what is the
same for both is there.
"""

from functools import partial

import numpy as np
import pytest

from cunorm import GroupNormGrads
from tests.memory.test_no_allocation import KIB, check_what_frameworks_are_asked_for, peak_of
from tests.support.calls import (
    GROUP_NORMS,
    anew,
    assert_refused,
    assert_same,
    call_of,
    change,
    nothing_known,
    planning_forbidden,
)
from tests.support.operands import assert_same_bits, at, draw

# Of several launches on a CPU, for all samples at once or for some after others.
SEVERAL = {"passes": (2, 4900, 8), "chunks": (9, 30_000, 8)}
WIDE, TALL = (2, 3, 16 << 10), (16 << 10, 2, 4)  # dweight has 64 KiB, or mean

names = pytest.mark.parametrize("name", GROUP_NORMS)
kinds = pytest.mark.parametrize("kind", ["numpy", "torch"])


# --- no memory ------------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("shape", [WIDE, TALL], ids=["wide", "tall"])
def test_numpy_allocates_nothing_during_a_call(shape, name):
    assert peak_of(call_of(name, shape).run) < 16 * KIB


@names
def test_numpy_allocates_what_is_left_out(name):
    """Else the test above would pass whatever a call did."""
    wide, tall = call_of(name, WIDE), call_of(name, TALL)
    for part in wide.parts():
        peaks = (peak_of(partial(call.run, part)) for call in (wide, tall))
        assert max(peaks) >= 64 * KIB, part


@kinds
@names
def test_no_framework_is_asked_for_memory(name, kind):
    check_what_frameworks_are_asked_for(call_of(name, kind=kind), kind)


# --- calls that are made again --------------------------------------------------------------------


@pytest.fixture(autouse=True)
def known(monkeypatch):
    return nothing_known(monkeypatch)


@pytest.mark.parametrize("shape", SEVERAL.values(), ids=SEVERAL)
@names
def test_a_call_of_several_launches_is_made_again_with_what_its_arrays_hold(name, shape):
    call = call_of(name, shape)
    for run in (call.run, partial(call.run, without="workspace"), call.make):
        run()
        change(call.arrays, repr(run))
        expected = anew(call.make)
        with planning_forbidden(), at(run):
            assert_same(run(), expected)
            assert_same(run(), expected)


@kinds
@names
def test_whatever_else_is_said_is_another_call(name, kind, known):
    call = call_of(name, kind=kind)
    said = [{}, {"channel_axis": 1}, {"activation": None}]
    if name == "group_norm_backward":
        said += [{"needs": ("x",)}, {"needs": ("bias",)}]
    else:
        said += [{"eps": 0.5}, {"eps": 2}]
    before = call.arrays
    for told in [*said, *said]:
        call.arrays = before | told
        expected = anew(call.make)
        with at(told):
            assert_same(call.make(), expected)
            if "needs" not in told:
                assert_same(call.run(), expected)
    assert len(known) == 2 * len(said) - 2 * (name == "group_norm_backward")


def test_another_number_of_groups_is_another_call(known):
    call = call_of("group_norm")
    call.workspace = np.empty(10_000, np.uint8)
    for groups in (1, 2, 8, 2, 1, 8):
        call.arrays["num_groups"] = groups
        with at(groups):
            assert_same(call.run(), anew(call.make))
            assert_same(call.make(), anew(call.make))
    assert len(known) == 6


def test_a_call_that_adds_is_another_than_one_that_writes(known):
    call = call_of("group_norm_backward")
    lent = {"out": GroupNormGrads(**call.out), "workspace": call.workspace}
    expected = anew(call.make)
    for accumulate, times in ((False, 1), (True, 2), (True, 3), (False, 1), (True, 2)):
        grads = call.function(**call.arrays, **lent, accumulate=accumulate)
        np.testing.assert_allclose(grads.dweight, times * expected.dweight, rtol=1e-6)
        assert_same_bits(grads.dx, expected.dx)
    assert len(known) == 2


# --- wrong input is refused though the forms were met before --------------------------------------


def refused(run, call, error, text, **more):
    before, call.arrays = call.arrays, call.arrays | more
    assert_refused(run, error, f"group_norm_forward: {text}")
    call.arrays = before


def test_what_is_wrong_with_a_call_is_found_when_it_is_made_again(known):
    call = call_of("group_norm_forward")
    x = call.arrays["x"]
    for run in (call.make, call.run):
        run()
        refused(run, call, TypeError, "x has dtype int32", x=x.view(np.int32))
        refused(run, call, TypeError, "x is a masked array", x=np.ma.masked_array(x, copy=False))
        refused(run, call, ValueError, "weight has shape (8,), expected (64,)", x=x.reshape(3, 64))
        for told in ({"num_groups": True}, {"eps": True}, {"channel_axis": -1.0}):
            refused(run, call, TypeError, f"{next(iter(told))} is ", **told)
    assert len(known) == 2


def test_what_is_wrong_with_the_memory_of_a_call_is_found_when_it_is_made_again():
    call = call_of("group_norm_forward")
    x = call.arrays["x"]
    call.run()
    text = "out.y has shape (3, 8, 8), expected (2, 8, 8)"
    refused(call.run, call, ValueError, text, x=x[:2])
    call.out["y"].flags.writeable = False
    refused(call.run, call, ValueError, "out.y cannot be written to in place")
    call.workspace = call.workspace[:8]
    refused(call.run, call, ValueError, "workspace has 8 bytes")


def test_a_result_that_moved_over_an_input_is_refused():
    call = call_of("group_norm_forward")
    memory = np.zeros((4, 8, 8), np.float32)
    call.arrays["x"] = memory[1:]
    call.run()
    call.out["y"] = memory[:3]
    refused(call.run, call, ValueError, "out.y overlaps x")


# --- what is not remembered -----------------------------------------------------------------------


def test_a_call_that_copies_is_not_remembered(known):
    call = call_of("group_norm_forward")
    spread = np.zeros((3, 8, 16), np.float32)
    for number in range(3):
        spread[...] = draw(f"x {number}", spread.shape, "float32")
        call.arrays["x"] = spread[..., ::2].copy()
        expected = anew(call.make)
        call.arrays["x"] = spread[..., ::2]
        for run in (call.run, call.make):
            assert_same(run(), expected)
    assert not known
