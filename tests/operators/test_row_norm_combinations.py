# SPDX-License-Identifier: MIT
"""Operands of any dtypes, present or absent, go together: pairs of choices here, all by command.

Each case is a build of its own. `pytest -m exhaustive` compiles those of `exhaustive_forward` and
`exhaustive_backward`, and says at its end how many builds there were. They are the products without
a gate; those with one are in `test_row_norm_formulas`.
"""

from itertools import chain, groupby

import pytest

from tests.support.covers import each, everything, label, pairwise
from tests.support.operands import at
from tests.support.row_norm_cases import (
    BACKWARD,
    DTYPE_NAMES,
    FORWARD,
    check_backward_case,
    check_forward_case,
    telling,
)

# What the products hold: no gate, and nothing between r and n but weight and bias.
PLAIN = {
    "c": [None],
    "weight_offset": [0.0],
    "round_before_weight": [False],
    "gate": [None],
    "gate_activation": ["silu"],
    "gate_position": ["post"],
}
NEEDS = [("x", "weight", "bias"), ("x",), ("weight", "bias"), ("x", "bias"), ("x", "weight")]
PLAIN_FORWARD = FORWARD | PLAIN
PLAIN_BACKWARD = BACKWARD | PLAIN | {"needs": NEEDS, "dgate": [None], "accumulate": [None]}


# --- pairs ----------------------------------------------------------------------------------------


@each(pairwise(FORWARD, telling))
def test_forward_takes_any_pair_of_choices(case):
    check_forward_case(case)


@each(pairwise(BACKWARD, telling))
def test_backward_takes_any_pair_of_choices(case):
    check_backward_case(case)


# --- the product ----------------------------------------------------------------------------------


def exhaustive_forward():
    """All of x, the stream, which parameters there are, and center; then all of y, of weight with
    another bias, and of a stream that is x in another dtype, each with the rest held.
    """
    alike = [
        case | {"bias": case["bias"] and (case["weight"] or case["x"]), "y": case["x"]}
        for case in everything(PLAIN_FORWARD | {"bias": [None, "given"], "y": [None]})
    ]
    outputs = everything(PLAIN_FORWARD | {"weight": ["float32"], "bias": [None]})
    one = PLAIN_FORWARD | {"residual": [None], "y": [None]}
    parameters = [case | {"y": case["x"]} for case in everything(one)]
    streams = PLAIN_FORWARD | {"residual": [None], "residual_dtype": DTYPE_NAMES, "y": ["float32"]}
    casts = everything(streams | {"weight": ["float32"], "bias": [None]})
    return distinct(chain(alike, outputs, parameters, casts))


def exhaustive_backward():
    """All of dy, x and dx with and without d_residual; all of d_residual, weight and which
    gradients there are for one dtype of the rows.
    """
    held = {"weight": ["float32"], "bias": ["float32"], "needs": [("x", "weight", "bias")]}
    dtypes = [
        case | {"d_residual": case["d_residual"] and case["x"]}
        for case in everything(PLAIN_BACKWARD | held | {"d_residual": [None, "given"]})
    ]
    one = {"dy": [None], "dx": [None], "bias": ["float32"]}
    which = [
        case | {"dy": case["x"], "dx": case["x"]}
        for case in everything(PLAIN_BACKWARD | one)
        if (case["weight"] is not None or case["needs"] in (("x",), ("x", "bias")))
        and (case["d_residual"] is None or "x" in case["needs"])
    ]
    return distinct(chain(dtypes, which))


def exhaustive_param_grad():
    """All dtypes of both parameters, in both compute types; and the same, added to what there is.

    A parameter's dtype is that of the array that its gradient is added to, so both have one.
    """
    held = {"dy": ["float32"], "d_residual": [None], "dx": [None], "center": [True]}
    held |= {"x": ["float32", "float64"], "needs": [("weight", "bias")]}
    added = {"accumulate": ["float32", "float64"], "weight": [None, "float16"]}
    products = (held, held | added | {"bias": [None, "float16"]})
    return distinct(
        case | {"dx": case["x"]}
        for factors in products
        for case in everything(PLAIN_BACKWARD | factors)
        if case["weight"] is not None or case["bias"] is not None
    )


def distinct(cases):
    return list({tuple(case.items()): case for case in cases}.values())


def in_tests(cases, *names):
    """Split cases into one list for each combination of those choices, for the workers to share."""

    def key(case):
        return [str(case[name]) for name in names]

    groups = (list(group) for _, group in groupby(sorted(cases, key=key), key))
    return [pytest.param(group, id="-".join(key(group[0]))) for group in groups]


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", in_tests(exhaustive_forward(), "x", "residual", "center"))
def test_every_forward_is_within_its_bounds(cases):
    for case in cases:
        with at(label(case)):
            check_forward_case(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", in_tests(exhaustive_backward(), "x", "weight", "center"))
def test_every_backward_is_within_its_bounds(cases):
    for case in cases:
        with at(label(case)):
            check_backward_case(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", in_tests(exhaustive_param_grad(), "x", "weight"))
def test_every_param_grad_is_within_its_bounds(cases):
    for case in cases:
        with at(label(case)):
            check_backward_case(case)
