# SPDX-License-Identifier: MIT
"""What a call touches: a backward what the wanted gradients are made of, and no call its inputs."""

import inspect

import numpy as np
import pytest

import cunorm
from cunorm import NormGrads
from tests.support.bounds import check_backward
from tests.support.calls import BACKWARDS, FORWARDS
from tests.support.gradients import MADE_OF, NEEDS
from tests.support.operands import assert_same_bits, at, draw, optional

SHAPE, GROUPS, EPS = (19, 3 * 41), 3, 1e-5
ROWS = ("x", "residual", "dy", "d_residual", "gate")


def arrays(shape=SHAPE):
    """Draw all operands; those with rows are the middle of wider arrays."""
    given = {n: draw(n, (shape[0], shape[1] + 5), "float32")[:, 3:-2] for n in ROWS}
    return given | {n: optional(n, shape[-1], "float32") for n in ("weight", "bias")}


def backward_arguments(position, center):
    """Return the arrays of a centred backward, and what it is told besides."""
    given = arrays()
    del given["residual"]
    norm = {"center": center, "groups": GROUPS, "c": 3.0}
    norm |= {"weight_offset": 1.0, "round_before_weight": True}
    if position is None:
        del given["gate"]
    else:
        norm |= {"gate_activation": "gelu", "gate_position": position}
    saved = cunorm.normalize_forward(given["x"], eps=EPS, gate=given.get("gate"), **norm_of_x(norm))
    given |= {"rstd": saved.rstd, "mean": saved.mean if center else np.zeros_like(saved.rstd)}
    return given, norm


def norm_of_x(norm):
    return {n: v for n, v in norm.items() if n not in ("weight_offset", "round_before_weight")}


def fields_of(needs):
    return [f for f in NormGrads._fields if {"dresidual": "x"}.get(f, f[1:]) in needs]


# --- needs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("position", "needs"), NEEDS)
def test_gradients_asked_for_are_those_among_all_and_need_nothing_else(position, needs):
    """An array that no wanted gradient is made of is full of NaN: if it is read, it shows."""
    given, norm = backward_arguments(position, center=True)
    whole = cunorm.normalize_backward(**given, **norm)
    read = set().union(*(MADE_OF[position][name] for name in needs))
    unread = given.keys() - read
    poisoned = {n: np.full_like(a, np.nan) if n in unread else a for n, a in given.items()}
    grads = cunorm.normalize_backward(**poisoned, **norm, needs=needs)
    for field in NormGrads._fields:
        if field in fields_of(needs):
            assert_same_bits(getattr(grads, field), getattr(whole, field), field)
        else:
            assert getattr(grads, field) is None


@pytest.mark.parametrize(("position", "needs"), [case for case in NEEDS if len(case[1]) == 1])
def test_a_gradient_is_made_of_all_that_is_read(position, needs):
    """The other way round: NaN in any array of the table shows in the gradient."""
    given, norm = backward_arguments(position, center=True)
    for name in MADE_OF[position][needs[0]]:
        poisoned = given | {name: np.full_like(given[name], np.nan)}
        grads = cunorm.normalize_backward(**poisoned, **norm, needs=needs)
        with at(name):
            assert np.isnan(getattr(grads, f"d{needs[0]}")).all()


@pytest.mark.parametrize("position", MADE_OF)
def test_without_center_a_mean_is_not_read(position):
    given, norm = backward_arguments(position, center=False)
    given["mean"] = np.full_like(given["mean"], np.nan)
    grads = cunorm.normalize_backward(**given, **norm)
    operands = [given[name] for name in ("dy", "x", "weight", "bias", "d_residual")]
    check_backward(grads, *operands, eps=EPS, gate=given.get("gate"), **norm)


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("function", [*FORWARDS, *BACKWARDS])
def test_no_input_is_modified(function, position):
    call = getattr(cunorm, function)
    taken = inspect.signature(call).parameters
    given = {name: array for name, array in arrays().items() if name in taken}
    if function in BACKWARDS:
        statistics = draw("statistic", (SHAPE[0], GROUPS), "float32", mean=1.0, deviation=0.1)
        given |= {name: statistics.copy() for name in ("rstd", "mean") if name in taken}
    norm = {"groups": GROUPS, "weight_offset": 1.0, "center": True, "gate_position": position}
    told = {name: value for name, value in norm.items() if name in taken}
    before = {name: everything_around(array) for name, array in given.items()}
    results = call(**given, **told)
    for name, array in given.items():
        assert everything_around(array) == before[name], f"{name} was written to"
        for result in results if isinstance(results, tuple) else [results]:
            assert result is None or not np.shares_memory(result, array)


def everything_around(array):
    """Return the bytes of the memory that an array is a part of."""
    return (array if array.base is None else array.base).tobytes()


# --- the stream past a gate -----------------------------------------------------------------------


@pytest.mark.parametrize("position", ["pre", "post"])
def test_the_new_stream_and_its_gradient_pass_a_gate_untouched(position):
    given = arrays()
    gate = {"gate": given["gate"], "gate_position": position, "groups": GROUPS}
    added = cunorm.add_layer_norm(given["x"], given["residual"], given["weight"], **gate)
    assert_same_bits(added.residual, given["x"] + given["residual"])
    saved = cunorm.layer_norm_forward(added.residual, given["weight"], **gate)
    grads = cunorm.layer_norm_backward(
        np.zeros(SHAPE, np.float32),
        added.residual,
        given["weight"],
        rstd=saved.rstd,
        mean=saved.mean,
        d_residual=given["d_residual"],
        **gate,
    )
    assert_same_bits(grads.dx, np.ascontiguousarray(given["d_residual"]))
    assert not grads.dgate.any()
