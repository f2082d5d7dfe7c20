# SPDX-License-Identifier: MIT
"""Group norms with `out=` and `workspace=`: no memory for arrays, and nothing planned again.

As test_no_allocation.py and test_again.py, which say how, have it of the row norms.
"""

from functools import partial
from inspect import signature

import numpy as np
import pytest
from calls import Call, empty_like, to
from operands import assert_same_bits, assert_same_fields, at, draw
from test_no_allocation import KIB, no_framework_allocates, peak_of

import cunorm
from cunorm import GroupNormForward, GroupNormGrads, _again
from cunorm.group_norm import _backward, _forward

NAMES = ["group_norm", "instance_norm", "group_norm_forward", "group_norm_backward"]
SHAPE, GROUPS = (3, 8, 8), 4
LARGE = (2, 4900, 8)  # which takes several launches on a CPU
WIDE, TALL = (2, 3, 16 << 10), (16 << 10, 2, 4)  # dweight has 64 KiB, or mean

names = pytest.mark.parametrize("name", NAMES)


class GroupCall(Call):
    """A call with arrays for all that it takes, and for all that it makes."""

    def __init__(self, name, shape=SHAPE, kind="numpy"):
        self.function = getattr(cunorm, name)
        taken = signature(self.function).parameters
        shapes = dict.fromkeys(("x", "dy"), shape) | dict.fromkeys(("weight", "bias"), shape[-1:])
        shapes |= dict.fromkeys(("mean", "rstd"), (shape[0], GROUPS))
        drawn = {key: draw(key, shapes[key], "float32") for key in shapes if key in taken}
        self.arrays = {key: to(kind, array) for key, array in drawn.items()}
        groups = {"num_groups": GROUPS} if "num_groups" in taken else {}
        operands = {key: self.arrays[key] for key in ("x", "weight", "bias")}
        size = cunorm.workspace_size(name, **operands, **groups)
        self.workspace = to(kind, np.empty(size, np.uint8))
        self.arrays |= groups | {"activation": "silu"}
        result = self.function(**self.arrays)
        self.result = type(result) if isinstance(result, tuple) else None
        made = result._asdict() if self.result else {"y": result}
        self.out = {field: empty_like(array) for field, array in made.items()}

    def check(self, **more):
        """Compare a call in given memory with one that is not remembered."""
        self.arrays |= more
        actual, expected = self.run(), self.function(**self.arrays)
        (assert_same_fields if self.result else assert_same_bits)(actual, expected)
        made = actual._asdict() if self.result else {"y": actual}
        assert all(made[field] is array for field, array in self.out.items())


# --- no memory ------------------------------------------------------------------------------------


@names
@pytest.mark.parametrize("shape", [WIDE, TALL], ids=["wide", "tall"])
def test_numpy_allocates_nothing_during_a_call(shape, name):
    assert peak_of(GroupCall(name, shape).run) < 16 * KIB


@names
def test_numpy_allocates_what_is_left_out(name):
    """Else the test above would pass whatever a call did."""
    wide, tall = GroupCall(name, WIDE), GroupCall(name, TALL)
    for part in wide.parts():
        peaks = (peak_of(partial(call.run, part)) for call in (wide, tall))
        assert max(peaks) >= 64 * KIB, part


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@names
def test_no_framework_is_asked_for_memory(monkeypatch, name, kind):
    call = GroupCall(name, kind=kind)
    with no_framework_allocates(monkeypatch):
        call.run()
        for part in call.out:  # but a workspace, for which Python is asked
            with pytest.raises(MemoryError, match=f"^{kind} was asked for"):
                call.run(without=part)


# --- calls that are made again --------------------------------------------------------------------


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Begin with no call that is remembered."""
    calls = {}
    monkeypatch.setattr(_again, "_known", calls)
    return calls


@pytest.fixture
def forbid_planning(monkeypatch):
    def forbid():
        for module in (_forward, _backward):
            monkeypatch.setattr(module, "describe_all", None)

    return forbid


@names
@pytest.mark.parametrize("shape", [SHAPE, LARGE], ids=["one pass", "several passes"])
def test_a_call_made_again_is_not_planned_and_computes_with_what_its_arrays_hold(
    name, shape, forbid_planning
):
    call = GroupCall(name, shape)
    call.run()
    for key, array in call.arrays.items():
        if isinstance(array, np.ndarray):
            array[...] = draw(f"another {key}", array.shape, "float32")
    expected = call.function(**call.arrays)
    forbid_planning()
    actual = call.run()
    (assert_same_fields if call.result else assert_same_bits)(actual, expected)


@names
def test_any_array_elsewhere_is_another_call(name):
    call = GroupCall(name)
    call.run()
    for argument, array in call.arrays.items():
        if isinstance(array, np.ndarray):
            with at(argument):
                call.check(**{argument: draw(f"another {argument}", array.shape, "float32")})
    for field, array in call.out.items():
        call.out[field] = np.full_like(array, np.nan)
        with at(field):
            call.check()


@names
def test_whatever_else_is_said_is_another_call(name, known):
    call = GroupCall(name)
    said = [{}, {"channel_axis": 1}, {"activation": None}]
    if name != "group_norm_backward":
        said += [{"eps": 0.5}, {"eps": 2}]
    before = call.arrays
    for told in [*said, *said]:
        call.arrays = dict(before)
        with at(told):
            call.check(**told)
    assert len(known) == len(said)


def test_another_number_of_groups_is_another_call(known):
    call = GroupCall("group_norm")
    call.workspace = np.empty(10_000, np.uint8)
    for groups in (1, 2, 8, 2, 1, 8):
        call.check(num_groups=groups)
    assert len(known) == 3


def test_a_call_that_adds_is_another_than_one_that_writes(known):
    call = GroupCall("group_norm_backward")
    lent = {"out": GroupNormGrads(**call.out), "workspace": call.workspace}
    expected = call.function(**call.arrays)
    for accumulate, times in ((False, 1), (True, 2), (True, 3), (False, 1), (True, 2)):
        grads = call.function(**call.arrays, **lent, accumulate=accumulate)
        np.testing.assert_allclose(grads.dweight, times * expected.dweight, rtol=1e-6)
        assert_same_bits(grads.dx, expected.dx)
    assert len(known) == 2


# --- wrong input is refused though the memory was used before -------------------------------------


def refused(call, error, text, **more):
    with pytest.raises(error) as caught:
        call.function(**call.arrays | more, out=call.result(**call.out), workspace=call.workspace)
    assert str(caught.value).startswith(f"group_norm_forward: {text}")


def test_what_is_wrong_with_the_memory_of_a_call_is_found_when_it_is_made_again(known):
    call = GroupCall("group_norm_forward")
    call.run()
    assert len(known) == 1
    x = call.arrays["x"]
    refused(call, TypeError, "x has dtype int32", x=x.view(np.int32))
    refused(call, TypeError, "x is a masked array", x=np.ma.masked_array(x, copy=False))
    refused(call, ValueError, "out.y has shape (3, 8, 8), expected (2, 8, 8)", x=x[:2])
    refused(call, ValueError, "weight has shape (8,), expected (64,)", x=x.reshape(3, 64))
    for told in ({"num_groups": True}, {"eps": True}, {"channel_axis": -1.0}):
        refused(call, TypeError, f"{next(iter(told))} is ", **told)
    call.out["y"].flags.writeable = False
    refused(call, ValueError, "out.y cannot be written to in place")
    call.workspace = call.workspace[:8]
    refused(call, ValueError, "workspace has 8 bytes")


def test_a_result_that_moved_over_an_input_is_refused(known):
    call = GroupCall("group_norm_forward")
    memory = np.zeros((4, 8, 8), np.float32)
    call.check(x=memory[1:])
    call.out["y"] = memory[:3]
    refused(call, ValueError, "out.y overlaps x")


# --- what is not remembered -----------------------------------------------------------------------


@names
def test_a_call_that_allocates_is_not_remembered(name, known):
    call = GroupCall(name)
    for part in call.parts():
        call.run(without=part)
    assert not known


def test_a_call_that_copies_is_not_remembered(known):
    call = GroupCall("group_norm_forward")
    spread = np.zeros((3, 8, 16), np.float32)
    for number in range(3):
        spread[...] = draw(f"x {number}", spread.shape, "float32")
        call.check(x=spread[..., ::2])
    assert not known


def test_a_call_on_other_frameworks_arrays_is_not_remembered(known):
    GroupCall("group_norm_backward", kind="torch").run()
    call = GroupCall("group_norm_forward")
    call.arrays["x"] = to("torch", call.arrays["x"])
    out = GroupNormForward(**call.out)
    call.function(**call.arrays, out=out, workspace=call.workspace)
    assert not known
