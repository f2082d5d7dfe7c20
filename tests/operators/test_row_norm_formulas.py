# SPDX-License-Identifier: MIT
"""Every formula of the row norms with every operand present or absent, and gates of any dtype.

`pytest -m exhaustive` compiles these builds, as it does those of `test_row_norm_combinations`.
Dtypes of all operands and formulas in one product would be millions of builds, so there are

- all legal combinations of residual, gate position or none, activation, center, weight, bias,
  offset and rounding (groups are in each case), in one dtype for all operands, each of the four,
  and in the dtypes of common training: a bfloat16 branch and gate of a float32 stream with float32
  parameters;
- every three dtypes of operands that meet in one expression, with the formula held;
- every set of gradients asked for, with every set of operands, in bfloat16.
"""

from itertools import chain, combinations

import pytest

from tests.operators.test_row_norm_combinations import distinct, in_tests
from tests.support.covers import everything, label
from tests.support.operands import at
from tests.support.row_norm_cases import (
    ACTIVATIONS,
    BACKWARD,
    DTYPE_NAMES,
    FORWARD,
    OPTIONAL,
    check_backward_case,
    check_forward_case,
)

SETS = [*DTYPE_NAMES, "mixed"]
ALL = ("x", "weight", "bias", "gate")

# Each factor says whether an operand is there; `dtypes_of` says of which dtype.
FORMULAS = {
    "residual": [False, True],
    "weight": [False, True],
    "bias": [False, True],
    "center": [False, True],
    "c": [3.0],
    "weight_offset": [0.0, 1.0],
    "round_before_weight": [False, True],
    "gate": [False, True],
    "gate_activation": ACTIVATIONS,
    "gate_position": ["pre", "post"],
}


def formulas():
    """All legal formulas."""
    for case in everything(FORMULAS):
        if case["weight_offset"] and not case["weight"]:
            continue  # an error
        idle = {} if case["gate"] else {"gate_activation": "silu", "gate_position": "post"}
        yield case | idle


def forward_formulas(dtypes):
    narrow, wide = ("bfloat16", "float32") if dtypes == "mixed" else (dtypes, dtypes)
    rows, others = {"x": narrow, "y": narrow, "residual_dtype": None}, {"gate": narrow}
    others |= dict.fromkeys(("residual", "weight", "bias"), wide)
    return distinct(_typed(case, others) | rows for case in formulas())


def backward_formulas(dtypes):
    narrow, wide = ("bfloat16", "float32") if dtypes == "mixed" else (dtypes, dtypes)
    rows = {"dy": narrow, "dx": narrow, "dgate": None, "needs": ALL, "accumulate": None}
    others = {"gate": narrow} | dict.fromkeys(("residual", "weight", "bias"), wide)
    cases = []
    for case in formulas():
        typed = _typed(case, others)
        stream = typed.pop("residual")
        cases.append(typed | rows | {"x": stream or narrow, "d_residual": stream})
    return distinct(cases)


def _typed(case, dtypes):
    return case | {name: dtype if case[name] else None for name, dtype in dtypes.items()}


# --- dtypes ---------------------------------------------------------------------------------------

HELD = {
    "center": [True],
    "c": [3.0],
    "weight_offset": [1.0],
    "round_before_weight": [False],
    "gate": ["float32"],
    "gate_activation": ["silu"],
}
HELD_FORWARD = FORWARD | HELD | {"residual": [None], "weight": ["float32"], "bias": ["float32"]}
HELD_BACKWARD = (
    BACKWARD
    | HELD
    | {name: ["float32"] for name in ("dy", "x", "weight", "bias", "dx")}
    | {"d_residual": [None], "dgate": [None], "needs": [ALL], "accumulate": [None]}
)
NO_GATE = {"gate": [None], "gate_position": ["post"]}


def forward_dtypes():
    """Three that meet in y of a post-gate or p of a pre-gate; what is rounded, and by what type."""
    pre, gates = {"gate_position": ["pre"]}, {"x": DTYPE_NAMES, "gate": DTYPE_NAMES}
    rounded = {
        "round_before_weight": [True],
        "weight": OPTIONAL,
        "x": DTYPE_NAMES,
        "y": ["float64"],
    }
    products = (
        gates,
        gates | {"weight": DTYPE_NAMES, "y": ["float32"]},
        gates | {"residual": DTYPE_NAMES, "y": ["float32"]} | pre,
        rounded | NO_GATE | {"residual": [None, "float32", "float64"]},
    )
    return distinct(chain.from_iterable(everything(HELD_FORWARD | p) for p in products))


def backward_dtypes():
    """Three that meet in dgate, in dn and n, or in dx of a pre-gate; what is rounded, to which."""
    pre, gate = {"gate_position": ["pre"]}, {"gate": DTYPE_NAMES}
    rounded = {"round_before_weight": [True], "weight": DTYPE_NAMES, "x": DTYPE_NAMES}
    products = (
        gate | {"dgate": DTYPE_NAMES, "dy": DTYPE_NAMES},
        gate | {"x": DTYPE_NAMES, "weight": DTYPE_NAMES},
        gate | {"x": DTYPE_NAMES, "dx": DTYPE_NAMES} | pre,
        gate | {"d_residual": DTYPE_NAMES} | pre,
        gate | {"bias": DTYPE_NAMES, "gate_position": ["post"]},
        rounded | NO_GATE | {"dx": DTYPE_NAMES},
    )
    return distinct(chain.from_iterable(everything(HELD_BACKWARD | p) for p in products))


def backward_needs():
    """Every set of gradients of operands that are there."""
    given = {name: [None, "bfloat16"] for name in ("weight", "bias", "gate", "d_residual")}
    rows = {name: ["bfloat16"] for name in ("dy", "x", "dx")}
    needs = [n for size in range(1, 5) for n in combinations(ALL, size)]
    more = {"needs": needs, "center": [False, True], "round_before_weight": [True]}
    return distinct(
        case if case["gate"] else case | {"gate_position": "post"}
        for case in everything(HELD_BACKWARD | given | rows | more)
        if all(case[name] for name in case["needs"])
        and (case["weight"] or not case["weight_offset"])
        and (case["d_residual"] is None or "x" in case["needs"])
    )


# --- by command -----------------------------------------------------------------------------------


def _of_sets(make):
    return [
        pytest.param(p.values[0], id=f"{dtypes}-{p.id}")
        for dtypes in SETS
        for p in in_tests(make(dtypes), "gate_activation", "gate_position", "center")
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", _of_sets(forward_formulas))
def test_every_formula_of_a_forward_is_within_its_bounds(cases):
    for case in cases:
        with at(label(case)):
            check_forward_case(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", _of_sets(backward_formulas))
def test_every_formula_of_a_backward_is_within_its_bounds(cases):
    for case in cases:
        with at(label(case)):
            check_backward_case(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", in_tests(forward_dtypes(), "x", "gate_position"))
def test_every_dtype_of_a_gate_and_a_rounding_is_within_its_bounds(cases):
    for case in cases:
        with at(label(case)):
            check_forward_case(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", in_tests(backward_dtypes(), "x", "gate_position", "dy"))
def test_every_dtype_of_a_gates_gradients_is_within_its_bounds(cases):
    for case in cases:
        with at(label(case)):
            check_backward_case(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", in_tests(backward_needs(), "needs", "gate_position"))
def test_every_set_of_gradients_is_within_its_bounds(cases):
    for case in cases:
        with at(label(case)):
            check_backward_case(case)
