# SPDX-License-Identifier: MIT
"""What a group norm's call touches: what wanted gradients are made of, sums, and no input."""

import numpy as np
import pytest

import cunorm
from cunorm import GroupNormGrads
from tests.support.calls import raises
from tests.support.group_norm_cases import laid_out
from tests.support.operands import DTYPES, assert_same_bits, at, draw, optional

GROUPS, CHANNELS = 5, 10
# Positions of which all passes are one launch on a CPU, and several.
sizes = pytest.mark.parametrize(
    ("samples", "positions"), [(3, 24), (2, 4900)], ids=["one pass", "several passes"]
)
# What each gradient is made of, and what else where there is an activation.
MADE_OF = {
    "x": ({"dy", "x", "mean", "rstd", "weight"}, {"bias"}),
    "weight": ({"dy", "x", "mean", "rstd"}, {"weight", "bias"}),
    "bias": ({"dy"}, {"x", "mean", "rstd", "weight", "bias"}),
}


def arrays(samples=3, positions=24, memory="last"):
    """Draw what a backward reads, but for the last channels and positions of wider arrays."""
    shape = (samples, positions + 2, CHANNELS + 3)
    wide = {name: laid_out(draw(name, shape, "float32"), -1, memory) for name in ("x", "dy")}
    given = {name: array[:, 2:, :-3] for name, array in wide.items()}
    given |= {name: optional(name, CHANNELS, "float32") for name in ("weight", "bias")}
    f = cunorm.group_norm_forward(given["x"], GROUPS, activation="silu")
    return given | {"mean": f.mean, "rstd": f.rstd}


def backward(given, **told):
    return cunorm.group_norm_backward(**given, num_groups=GROUPS, **{"activation": "silu"} | told)


# --- needs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("need", MADE_OF)
def test_a_gradient_alone_is_that_among_all_and_is_made_of_nothing_else(need, activation):
    """An array that it is not made of is full of NaN: if it is read, it shows."""
    given = arrays()
    always, with_activation = MADE_OF[need]
    read = always | with_activation if activation else always
    told = {"activation": activation}
    whole = backward(given, **told)
    poisoned = {n: a if n in read else np.full_like(a, np.nan) for n, a in given.items()}
    for name in read:  # and the other way round
        one = given | {name: np.full_like(given[name], np.nan)}
        with at(name):
            assert np.isnan(getattr(backward(one, **told, needs=(need,)), f"d{need}")).all()
    grads = backward(poisoned, **told, needs=(need,))
    assert_same_bits(getattr(grads, f"d{need}"), getattr(whole, f"d{need}"))
    assert [field is not None for field in grads] == [name == need for name in MADE_OF]


@pytest.mark.parametrize("needs", [(), ["bias", "x"], {"bias"}, ("x", "weight")], ids=str)
@sizes
def test_only_the_gradients_in_needs_are_returned(samples, positions, needs):
    given = arrays(samples, positions)
    whole, grads = backward(given), backward(given, needs=needs)
    for name in MADE_OF:
        gradient = getattr(grads, f"d{name}")
        assert (gradient is not None) == (name in needs)
        if name in needs:
            assert_same_bits(gradient, getattr(whole, f"d{name}"), name)


def test_an_operand_that_is_absent_has_no_gradient():
    given = arrays()
    del given["weight"]
    assert backward(given).dweight is None
    del given["bias"]
    grads = backward(given, needs=("weight", "bias"))
    assert grads == (None, None, None)


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["last", "first"])
@sizes
def test_no_input_is_modified_nor_what_lies_around_it(samples, positions, memory):
    given = arrays(samples, positions, memory)
    before = {name: everything_around(array) for name, array in given.items()}
    parameters = {name: given[name] for name in ("x", "weight", "bias")}
    results = [cunorm.group_norm(**parameters, num_groups=GROUPS, activation="silu")]
    results += [cunorm.instance_norm(**parameters, activation="silu")]
    results += cunorm.group_norm_forward(**parameters, num_groups=GROUPS, activation="silu")
    results += backward(given)
    for name, array in given.items():
        assert everything_around(array) == before[name], f"{name} was written to"
        assert not any(np.shares_memory(result, array) for result in results)


def everything_around(array):
    """Return the bytes of the memory that an array is a part of."""
    while array.base is not None:
        array = array.base
    return array.tobytes()


# --- sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("into", ["float32", "float64"])
@sizes
def test_two_calls_add_up(samples, positions, into):
    """As two micro-batches do: each sum is rounded once. dx is written as ever."""
    given, names = arrays(samples, positions), ("dweight", "dbias")
    exact = {name: np.empty(CHANNELS) for name in names}
    expected = backward(given, out=GroupNormGrads(**exact))
    sums = {name: draw(name, CHANNELS, into, deviation=30) for name in names}
    right = {name: array.copy() for name, array in sums.items()}
    for _ in range(2):
        grads = backward(given, out=GroupNormGrads(**sums), accumulate=True)
        assert_same_bits(grads.dx, expected.dx)
        for name in names:
            right[name] = (right[name].astype(np.float64) + exact[name]).astype(DTYPES[into])
            assert getattr(grads, name) is sums[name]
            assert_same_bits(sums[name], right[name], name)


def test_only_what_is_needed_is_added_to():
    given = arrays()
    before = draw("dweight", CHANNELS, "float32")
    exact, out = GroupNormGrads(dweight=np.empty(CHANNELS)), GroupNormGrads(dweight=before.copy())
    backward(given, needs=("weight",), out=exact)
    grads = backward(given, needs=("weight",), out=out, accumulate=True)
    assert_same_bits(grads.dweight, (before + exact.dweight).astype(np.float32))
    assert backward(given, needs=("x",), accumulate=True).dbias is None


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
def test_without_an_array_of_float32_or_float64_there_is_nothing_to_add_to(dtype):
    array = None if dtype is None else np.zeros(CHANNELS, DTYPES[dtype])
    got = "None" if dtype is None else f"of dtype {dtype}"
    text = f"out.dbias is {got}, expected an array of float32 or float64 to add to, as accumulate"
    out = GroupNormGrads(dweight=np.zeros(CHANNELS), dbias=array)
    with raises(ValueError, f"group_norm_backward: {text} is True"):
        backward(arrays(), out=out, accumulate=True)
    assert not out.dweight.any()
