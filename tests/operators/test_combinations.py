# SPDX-License-Identifier: MIT
"""All pairs of dtypes, activations, options, sizes and layouts work together.

Each case is one build, run with arrays of several sizes. CI runs every fourth case. The fuzzer
covers the same pairs, too, and CI runs every fourth of its builds. `pytest -m exhaustive` runs the
other cases, and 20 further covers, of more dtypes and activations.
"""

import random

import pytest

from tests.support.case_covers import FACTORS, LAYOUTS, arranged, builds
from tests.support.cases import Samples, call_of
from tests.support.covers import label, pairwise
from tests.support.gpu_arrays import OnNumpy
from tests.support.operands import at

# A CPU's pack has 64 elements; of these widths, only 128 is a multiple.
WIDTHS = (1, 33, 128, 1003)
# Samples, positions, channels, groups. A sample of the last size has several parts.
SIZES = [
    (1, (2,), 3, 1),
    (20, (31,), 40, 8),
    (2, (1, 3, 2, 5), 320, 32),
    (1, (31, 97), 10, 2),
    (1, (4900,), 3, 3),
]


def check(kernel, case):
    """Check a case in several sizes: results are within bounds, and nothing else is written."""
    for number, size in enumerate(SIZES if "group" in kernel else WIDTHS):
        draw = random.Random(f"{kernel} {case} {number}")
        if "group" in kernel:
            size_case = {"samples": Samples(*size, case["channels_last"], draw.choice([-1, 1]))}
        else:
            size_case = {"shape": (1, 3, 7, size), "groups": draw.choice([1, 3])}
            size_case["c"] = draw.choice([None, 3.0])
        size_case = arranged(kernel, draw, case | size_case)
        with at(size_case):
            call_of(kernel, size_case, OnNumpy()).check()


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        pytest.param(k, c, id=f"{k}-{label(c)}", marks=pytest.mark.exhaustive if i % 4 else ())
        for k in FACTORS
        for i, c in enumerate(builds(k))
    ],
)
def test_any_pair_of_choices_is_within_its_bounds(kernel, case):
    check(kernel, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kernel", FACTORS)
def test_drawn_pairs_of_choices_are_within_their_bounds(kernel, seed):
    for case in builds(kernel, seed):
        with at(label(case)):
            check(kernel, case)


# --- sizes of group norms -------------------------------------------------------------------------

POSITIONS = {1: (), 2: (2,), 7: (7,), 97 * 31: (97, 31), 70 * 70: (7, 10, 70)}
# Channels: groups. With channels last, a CPU's pack has all of 48 or 128 channels, otherwise 64.
GROUPS = {1: 1, 3: 1, 10: 5, 48: 8, 128: 32, 320: 32}
OF_SIZES = {
    "samples": [1, 2, 20],
    "positions": list(POSITIONS),
    "axes": [0, 1, 2, 3, 4],  # how many axes the positions have
    "channels": list(GROUPS),
    "groups": ["one", "some", "all"],
    "far": [False, True],
    **LAYOUTS,
}
MAX_ELEMENTS = 200_000  # of an array, so that the oracle is quick


def possible(case):
    """Drop the choice of no axes if a case has several positions, which need an axis."""
    if case.get("axes") == 0 and case.get("positions", 1) > 1:
        return {name: choice for name, choice in case.items() if name != "axes"}
    return case


@pytest.mark.parametrize("case", pairwise(OF_SIZES, possible), ids=label)
def test_any_pair_of_sizes_is_within_its_bounds(case):
    channels, positions, factors = case["channels"], case["positions"], POSITIONS[case["positions"]]
    if case["axes"] < len(factors):
        factors = (positions,)
    factors = (1,) * (case["axes"] - len(factors)) + factors
    samples = max(1, min(case["samples"], MAX_ELEMENTS // (positions * channels)))
    count = {"one": 1, "some": GROUPS[channels], "all": channels}[case["groups"]]
    drawn = Samples(samples, factors, channels, count, *(case[name] for name in LAYOUTS))
    for kernel in ("group_norm_forward", "group_norm_backward"):
        call_of(kernel, {"samples": drawn, "far": case["far"]}, OnNumpy()).check()
