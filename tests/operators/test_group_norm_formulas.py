# SPDX-License-Identifier: MIT
"""Group norms of any dtypes, activations, layouts and sizes are within their bounds, by pairs.

`pytest -m exhaustive` compiles the products below: a few hundred builds.
"""

from itertools import chain, combinations, groupby

import pytest

from tests.support.covers import each, everything, label, pairwise
from tests.support.group_norm_cases import (
    ACTIVATIONS,
    ALL,
    DTYPE_NAMES,
    OPTIONAL,
    SMALL,
    Sizes,
    check_backward_case,
    check_forward_case,
)
from tests.support.operands import at

FAR = 1e4  # a mean, of deviation 1

WHERE = {"memory": ["last", "first"], "channel_axis": [-1, 1]}
PARAMETERS = {  # which are read alike: each dtype in one of them
    "weight": [None, "bfloat16", "float32"],
    "bias": [None, "float16", "float64"],
}
FORWARD = {
    "x": DTYPE_NAMES,
    "y": DTYPE_NAMES,
    **PARAMETERS,
    "activation": ACTIVATIONS,
    **WHERE,
}
BACKWARD = {
    "dy": DTYPE_NAMES,
    "x": DTYPE_NAMES,
    "dx": [None, "float16", "float64"],  # None: x's
    **PARAMETERS,
    "activation": ACTIVATIONS,
    "needs": [ALL, ("x",), ("weight", "bias")],
    "accumulate": [None, "float32"],  # onto arrays of this dtype
    **WHERE,
}


def telling(case):
    """Return what of a backward, or of a part of one, is not idle."""
    idle, needs = set(), case.get("needs", ALL)
    absent = {name for name in ("weight", "bias") if case.get(name, "") is None}
    if "x" not in needs:
        idle |= {"dx"}
    if not {"weight", "bias"} & set(needs) - absent:
        idle |= {"accumulate"}
    if set(needs) & absent:
        idle |= {"needs"}
    return {name: choice for name, choice in case.items() if name not in idle}


def check_sizes(check, case):
    for sizes in SMALL:
        check(case, sizes)
    far = 60.0 if case["x"] in ("float16", "bfloat16") else FAR
    check(case, SMALL[2], mean=far)


# --- dtypes and activations -----------------------------------------------------------------------


@each(pairwise(FORWARD))
def test_forward_takes_any_pair_of_choices(case):
    check_sizes(check_forward_case, case)


@each(pairwise(BACKWARD, telling))
def test_backward_takes_any_pair_of_choices(case):
    check_sizes(check_backward_case, case)


# --- sizes ----------------------------------------------------------------------------------------

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
    **WHERE,
}
MOST = 500_000  # elements that the oracle takes in good time
HELD = dict.fromkeys(("x", "y", "dy", "weight", "bias"), "float32")
HELD |= {"dx": None, "activation": "silu", "needs": ALL, "accumulate": None}


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
    groups = {"one": 1, "some": GROUPS[channels], "all": channels}[case["groups"]]
    return Sizes(samples, factors, channels, groups)


@pytest.mark.parametrize("case", pairwise(SIZES, possible), ids=label)
def test_any_pair_of_sizes_is_within_its_bounds(case):
    of_sizes = HELD | {name: case[name] for name in WHERE}
    for check in (check_forward_case, check_backward_case):
        check(of_sizes, sizes_of(case), case["mean"])


@pytest.mark.parametrize("channels", [48, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_lines_that_are_one_pack_are_within_their_bounds(dtype, channels):
    of_dtype = HELD | {"x": dtype, "dy": dtype, "y": dtype, "memory": "last", "channel_axis": -1}
    for check in (check_forward_case, check_backward_case):
        check(of_dtype, Sizes(2, (37,), channels, 8))


# --- by command -----------------------------------------------------------------------------------


def products(held, *freed):
    """Return the cases of several products, in each of which the other choices are held."""
    alone = {name: [choice] for name, choice in held.items()}
    cases = chain.from_iterable(everything(alone | factors) for factors in freed)
    return list({label(case): case for case in cases}.values())


def forward_products():
    """The dtypes that meet in y; each activation; which parameters there are, of which dtype."""
    memory, dtypes = {"memory": WHERE["memory"]}, {"x": DTYPE_NAMES}
    return products(
        HELD | {"memory": "last", "channel_axis": -1},
        memory | dtypes | {"y": DTYPE_NAMES},
        memory | dtypes | {"activation": ACTIVATIONS},
        dtypes | {"weight": OPTIONAL, "bias": OPTIONAL},
        memory | {"weight": OPTIONAL, "bias": OPTIONAL, "channel_axis": [1]},
    )


def backward_products():
    """The same of the backward, and every set of gradients of operands that are there."""
    memory, dtypes = {"memory": WHERE["memory"]}, {"x": DTYPE_NAMES}
    given = {"weight": [None, "bfloat16"], "bias": [None, "bfloat16"]}
    needs = [names for size in (1, 2, 3) for names in combinations(ALL, size)]
    return products(
        HELD | {"memory": "last", "channel_axis": -1},
        dtypes | {"dy": DTYPE_NAMES, "dx": DTYPE_NAMES},
        memory | dtypes | {"activation": ACTIVATIONS},
        memory | {"weight": OPTIONAL, "bias": OPTIONAL},
        memory | given | {"needs": needs, "activation": [None, "gelu"]},
    )


def in_tests(cases):
    """Return the cases of each activation and dtype of x as a test."""

    def of(case):
        return f"{case['x']}-{case['activation']}-{case['memory']}"

    return [
        pytest.param(list(alike), id=key) for key, alike in groupby(sorted(cases, key=of), key=of)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", in_tests(forward_products()))
def test_every_forward_is_within_its_bounds(cases):
    for case in cases:
        with at(label(case)):
            check_sizes(check_forward_case, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", in_tests(backward_products()))
def test_every_backward_is_within_its_bounds(cases):
    for case in cases:
        with at(label(case)):
            check_sizes(check_backward_case, case)
