# SPDX-License-Identifier: MIT
"""What makes another call than one that was made: any fact of its arrays, and all that is said."""

import numpy as np
import pytest

import cunorm
from cunorm import NormForward, NormGrads
from tests.support.calls import (
    FUNCTIONS,
    WIDTH,
    anew,
    arrays_of,
    assert_same,
    call_of,
    elsewhere,
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


# --- arrays ---------------------------------------------------------------------------------------


def read_only(array):
    array = array.view()
    array.flags.writeable = False
    return array


@kinds
def test_any_fact_of_an_array_that_differs_makes_another_call(kind, known):
    memory = draw("x", 200, "float16").view(np.float32)  # whose halves are finite, too
    views = {
        "none": memory[:40].reshape(SHAPE),
        "shape": memory[:48].reshape(6, WIDTH),
        "strides": memory[:80].reshape(10, WIDTH)[::2],
        "dtype": memory[:20].view(np.float16).reshape(SHAPE),
        "alignment": memory[1:41].reshape(SHAPE),
    }
    views = {fact: to(kind, view) for fact, view in views.items()}
    if kind == "numpy":
        views["writability"] = read_only(views["none"])
    for _ in range(2):
        for fact, x in views.items():
            with at(fact):
                assert_same(cunorm.rms_norm_forward(x), anew(cunorm.rms_norm_forward, x))
    assert len(known) == len(views)


@kinds
def test_arrays_of_other_shapes_at_the_same_places_make_another_call(kind, known):
    """Each shape in turn, both of them planned once."""
    memory, results = (to(kind, draw(name, 2 * 5 * WIDTH, "float32")) for name in ("x", "y"))
    pairs = [tuple(m.reshape(shape) for m in (memory, results)) for shape in ((10, 8), (5, 16))]
    expected = [anew(cunorm.rms_norm, x) for x, _ in pairs]
    for x, out in pairs:
        cunorm.rms_norm(x, out=out)
    with planning_forbidden():
        for _ in range(2):
            for (x, out), right in zip(pairs, expected, strict=True):
                assert_same_bits(cunorm.rms_norm(x, out=out), right)
    assert len(known) == 2


def test_an_array_and_a_tensor_of_the_same_memory_make_different_calls(known):
    x, out = draw("x", SHAPE, "float32"), np.empty(SHAPE, np.float32)
    expected, pairs = anew(cunorm.rms_norm, x), [(x, out), (to("torch", x), to("torch", out))]
    for x, out in 2 * pairs:
        saved = cunorm.rms_norm_forward(x, out=NormForward(y=out))
        assert saved.y is out
        assert type(saved.rstd) is type(x)
        assert_same_bits(np.asarray(out), expected)
        out[...] = np.nan
    assert len(known) == 2


@kinds
@names
def test_an_array_that_begins_at_an_odd_element_makes_another_call(name, kind, known):
    call = call_of(name, kind=kind)
    call.make()
    for argument in arrays_of(call.arrays):
        call.arrays[argument] = elsewhere(call.arrays[argument], start=1)
        expected = anew(call.make)
        for _ in range(2):
            with at(argument):
                assert_same(call.make(), expected)
    assert len(known) == 1 + len(arrays_of(call.arrays))


# --- what the caller says -------------------------------------------------------------------------


SAID = [
    {},
    {"eps": 0.5},
    {"eps": 2.0},
    {"c": 0.0},
    {"c": -0.0},
    {"c": 3},
    {"center": True},
    {"weight_offset": 1.0},
    {"weight_offset": 2.0},
    {"groups": 2},
    {"axis": 0},
    {"round_before_weight": True, "dtype": "float32"},
    {"gate_activation": "tanh"},
    {"gate_position": "pre"},
]


def test_whatever_else_is_said_is_another_call(known):
    arrays = given()
    for x in (arrays.x, arrays.x.astype(np.float16)):
        out = np.empty(SHAPE, np.float32)
        for said in [*SAID, *SAID]:
            weight = arrays.dy if said.get("axis") == 0 else arrays.weight
            told = {"weight": weight, "gate": arrays.gate, "dtype": "float32"} | said
            expected = anew(cunorm.normalize, x, **told)
            with at(x.dtype, said):
                assert_same_bits(cunorm.normalize(x, **told, out=out), expected)
                assert_same_bits(cunorm.normalize(x, **told), expected)
    assert len(known) == 2 * 2 * len(SAID)


def test_what_a_backward_is_told_is_another_call(known):
    call = call_of("normalize_backward")
    call.arrays["gate"] = given().gate
    call.out["dgate"] = np.empty(SHAPE, np.float32)
    said = [told for told in SAID if not told.keys() & {"eps", "groups", "axis", "dtype"}]
    said.remove({"center": True})  # as Call says
    before = call.arrays
    for told in [*said, *said]:
        call.arrays = before | told
        expected = anew(call.make)
        with at(told):
            assert_same(call.run(), expected)
            assert_same(call.make(), expected)
    assert len(known) == 2 * len(said)


def test_other_gradients_are_another_call(known):
    call = call_of("layer_norm_backward")
    before = call.arrays
    for needs in 2 * [("x",), ("weight",), ("bias",), ("gate",), ("weight", "bias")]:
        call.arrays = before | {"needs": needs}
        with at(needs):
            assert_same(call.make(), anew(call.make))
    assert len(known) == 5


def test_a_call_that_adds_is_another_than_one_that_writes(known):
    call = call_of("layer_norm_backward")
    lent = {"out": NormGrads(**call.out), "workspace": call.workspace}
    expected = anew(call.make)
    for accumulate, times in ((False, 1), (True, 2), (True, 3), (False, 1), (True, 2)):
        grads = call.function(**call.arrays, **lent, accumulate=accumulate)
        np.testing.assert_allclose(grads.dweight, times * expected.dweight, rtol=1e-6)
        assert_same_bits(grads.dx, expected.dx)
    assert len(known) == 2


def test_gradients_that_need_no_workspace_are_computed_again_with_one(known):
    call = call_of("rms_norm_backward")
    expected = anew(call.make).dx
    for workspace in (None, call.workspace, None, call.workspace):
        out = NormGrads(dx=call.out["dresidual"])
        call.function(**call.arrays, needs=("x",), out=out, workspace=workspace)
        assert_same_bits(out.dx, expected)
        out.dx[...] = np.nan
    assert len(known) == 2
