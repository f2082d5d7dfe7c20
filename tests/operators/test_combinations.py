# SPDX-License-Identifier: MIT
"""Dtypes, activations, options and sizes go together in any pair; in any combination by command.

Each case is a build of its own. `pytest -m exhaustive` compiles the products below: thousands of
builds. Dtypes of all operands and formulas in one product would be millions, so in each product
some choices vary and the others are held.
"""

from itertools import chain, combinations

import pytest

from tests.support import group_norm_cases as groups
from tests.support import row_norm_cases as rows
from tests.support.covers import each, everything, label, pairwise
from tests.support.operands import at

DTYPES, OPTIONAL = rows.DTYPE_NAMES, rows.OPTIONAL
FAR = 1e4  # a mean, of deviation 1

# --- pairs ----------------------------------------------------------------------------------------


@each(pairwise(rows.FORWARD, rows.telling))
def test_a_row_norms_forward_takes_any_pair_of_choices(case):
    rows.check_forward_case(case)


@each(pairwise(rows.BACKWARD, rows.telling))
def test_a_row_norms_backward_takes_any_pair_of_choices(case):
    rows.check_backward_case(case)


def check_sizes(check, case):
    for sizes in groups.SMALL:
        check(case, sizes)
    far = 60.0 if case["x"] in ("float16", "bfloat16") else FAR
    check(case, groups.SMALL[2], mean=far)


@each(pairwise(groups.FORWARD))
def test_a_group_norms_forward_takes_any_pair_of_choices(case):
    check_sizes(groups.check_forward_case, case)


@each(pairwise(groups.BACKWARD, groups.telling))
def test_a_group_norms_backward_takes_any_pair_of_choices(case):
    check_sizes(groups.check_backward_case, case)


# --- sizes of group norms -------------------------------------------------------------------------

POSITIONS = {1: (), 2: (2,), 7: (7,), 31: (31,), 97 * 31: (97, 31), 70 * 70: (7, 10, 70)}
# Some groups, for so many channels. Up to 128 of them, of multiples of 16, are one pack on a CPU.
GROUPS = {1: 1, 3: 1, 10: 5, 48: 8, 128: 32, 256: 32, 320: 32}
SIZES = {
    "samples": [1, 2, 20],
    "positions": list(POSITIONS),
    "axes": [0, 1, 2, 3, 4],  # of positions
    "channels": list(GROUPS),
    "groups": ["one", "some", "all"],
    "mean": [0.0, FAR],
    **groups.WHERE,
}
MOST = 500_000  # elements that the oracle takes in good time
HELD = dict.fromkeys(("x", "y", "dy", "weight", "bias"), "float32")
HELD |= {"dx": None, "activation": "silu", "needs": groups.ALL, "accumulate": None}


def possible(case):
    """Return what of a case, or of a part of one, is not idle: no axes have only one position."""
    if case.get("axes") == 0 and case.get("positions", 1) > 1:
        return {name: choice for name, choice in case.items() if name != "axes"}
    return case


def sizes_of(case):
    """Return a case's sizes, in fewer samples where they are large."""
    channels, positions, factors = case["channels"], case["positions"], POSITIONS[case["positions"]]
    if case["axes"] < len(factors):
        factors = (positions,)
    factors = (1,) * (case["axes"] - len(factors)) + factors
    samples = max(1, min(case["samples"], MOST // (positions * channels)))
    count = {"one": 1, "some": GROUPS[channels], "all": channels}[case["groups"]]
    return groups.Sizes(samples, factors, channels, count)


@pytest.mark.parametrize("case", pairwise(SIZES, possible), ids=label)
def test_any_pair_of_sizes_is_within_its_bounds(case):
    of_sizes = HELD | {name: case[name] for name in groups.WHERE}
    for check in (groups.check_forward_case, groups.check_backward_case):
        check(of_sizes, sizes_of(case), case["mean"])


# --- by command -----------------------------------------------------------------------------------


def products(held, *freed, legal=lambda case: True):
    """Return the cases of several products, in each of which the other choices are held."""
    alone = {name: [choice] for name, choice in held.items()}
    cases = chain.from_iterable(everything(alone | factors) for factors in freed)
    return [*{label(case): case for case in cases if legal(case)}.values()]


def subsets(names):
    return [s for size in range(1, len(names) + 1) for s in combinations(names, size)]


ROW = dict.fromkeys(("x", "weight", "bias", "gate"), "float32")
ROW |= {"center": True, "c": 3.0, "weight_offset": 1.0, "round_before_weight": False}
ROW |= {"gate_activation": "silu", "gate_position": "post"}
OF_FORWARD = {"y": "float32", "residual": None, "residual_dtype": None}
OF_BACKWARD = {"dy": "float32", "dx": "float32", "d_residual": None, "dgate": None}
OF_BACKWARD |= {"needs": ("x", "weight", "bias", "gate"), "accumulate": None}
FORMULAS = {name: [None, "float32"] for name in ("weight", "bias")}
FORMULAS |= {"center": [False, True], "weight_offset": [0.0, 1.0]}
FORMULAS |= {"round_before_weight": [False, True], "x": DTYPES}
GATED = {"gate_activation": rows.ACTIVATIONS, "gate_position": ["pre", "post"]}
GATE, ROUNDED, NO_GATE = {"gate": DTYPES}, {"round_before_weight": [True]}, {"gate": [None]}


def legal(case):
    """An offset needs a weight, a gradient its operand."""
    wanted = set(case.get("needs", ())) - {"x"}
    return bool(case["weight"] or not case["weight_offset"]) and all(case[n] for n in wanted)


def row_forwards():
    """Each formula in each dtype; every three dtypes that meet in one expression; all streams."""
    return products(
        ROW | OF_FORWARD,
        FORMULAS | GATED | {"residual": [None, "float32"]},
        FORMULAS | NO_GATE | {"residual": OPTIONAL, "y": DTYPES},
        GATE | {"x": DTYPES, "weight": DTYPES, "y": DTYPES},
        GATE | {"x": DTYPES, "residual": DTYPES, "gate_position": ["pre"]},
        NO_GATE | {"weight": OPTIONAL, "bias": OPTIONAL, "x": DTYPES, "weight_offset": [0.0]},
        NO_GATE | ROUNDED | {"x": DTYPES, "weight": DTYPES, "y": DTYPES},
        NO_GATE | {"x": DTYPES, "residual_dtype": DTYPES, "center": [False, True]},
        legal=legal,
    )


def row_backwards():
    """The same, and every set of gradients of operands that are there, in any dtype added to."""
    given = {name: [None, "bfloat16"] for name in ("weight", "bias", "gate", "d_residual")}
    given |= {name: ["bfloat16"] for name in ("x", "dy", "dx")}
    return products(
        ROW | OF_BACKWARD,
        FORMULAS | GATED | {"d_residual": [None, "float32"], "needs": [("x", "gate")]},
        FORMULAS | NO_GATE | {"d_residual": OPTIONAL, "needs": [("x",)]},
        NO_GATE | {"dy": DTYPES, "x": DTYPES, "dx": DTYPES, "needs": subsets(("x", "weight"))},
        NO_GATE
        | {"weight": OPTIONAL, "bias": OPTIONAL, "x": ["float32", "float64"]}
        | {"accumulate": [None, "float32", "float64"], "weight_offset": [0.0]}
        | {"needs": subsets(("weight", "bias"))},
        GATE | {"dgate": DTYPES, "dy": DTYPES, "x": DTYPES},
        GATE | {"x": DTYPES, "dx": DTYPES, "d_residual": DTYPES, "gate_position": ["pre"]},
        NO_GATE | ROUNDED | {"x": DTYPES, "weight": DTYPES, "dx": DTYPES, "needs": [("weight",)]},
        given
        | ROUNDED
        | {"needs": subsets(("x", "weight", "bias", "gate")), "center": [False, True]}
        | {"weight_offset": [0.0], "gate_position": ["pre", "post"]},
        legal=legal,
    )


def group_forwards():
    """The dtypes that meet in y; each activation; which parameters there are, of which dtype."""
    memory, dtypes = {"memory": groups.WHERE["memory"]}, {"x": DTYPES}
    return products(
        HELD | {"memory": "last", "channel_axis": -1},
        memory | dtypes | {"y": DTYPES},
        memory | dtypes | {"activation": groups.ACTIVATIONS},
        memory | dtypes | {"weight": OPTIONAL, "bias": OPTIONAL},
    )


def group_backwards():
    """The same of the backward, and every set of gradients of operands that are there."""
    memory, dtypes = {"memory": groups.WHERE["memory"]}, {"x": DTYPES}
    given = {"weight": [None, "bfloat16"], "bias": [None, "bfloat16"]}
    return products(
        HELD | {"memory": "last", "channel_axis": -1},
        dtypes | {"dy": DTYPES, "dx": DTYPES},
        memory | dtypes | {"activation": groups.ACTIVATIONS},
        memory | {"weight": OPTIONAL, "bias": OPTIONAL},
        memory | given | {"needs": subsets(groups.ALL), "activation": [None, "gelu"]},
    )


def in_tests(make, check):
    """Return a product in parts of fifty."""
    cases = make()
    parts = [cases[first : first + 50] for first in range(0, len(cases), 50)]
    return [pytest.param(check, p, id=f"{make.__name__}-{i}") for i, p in enumerate(parts)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("check", "cases"),
    [
        *in_tests(row_forwards, rows.check_forward_case),
        *in_tests(row_backwards, rows.check_backward_case),
        *in_tests(group_forwards, lambda case: check_sizes(groups.check_forward_case, case)),
        *in_tests(group_backwards, lambda case: check_sizes(groups.check_backward_case, case)),
    ],
)
def test_every_combination_is_within_its_bounds(check, cases):
    for case in cases:
        with at(label(case)):
            check(case)
