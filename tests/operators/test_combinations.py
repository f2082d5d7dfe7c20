# SPDX-License-Identifier: MIT
"""All pairs of dtypes, activations, options, sizes and layouts work together.

Each case is one build, run with arrays of several sizes. CI runs every fourth case, and every
fourth build of the fuzzer, which covers the same pairs. `pytest -m exhaustive` runs the other
cases, and 20 further covers, of more dtypes and activations.
"""

import random
from math import prod

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

SPATIAL = [(), (1,), (2,), (7,), (1, 2), (1, 1, 2), (1, 1, 1, 7)]
SPATIAL += [(97, 31), (3007,), (97, 1, 31, 1), (7, 10, 70), (4900,)]  # samples of several parts
# Channels: groups. With channels last, a CPU's pack has all of 48 or 128 channels, otherwise 64.
GROUPS = {1: 1, 3: 1, 10: 5, 48: 8, 128: 32, 320: 32}
OF_SIZES = {
    "samples": [1, 2, 20],
    "spatial": SPATIAL,
    "channels": list(GROUPS),
    "groups": ["one", "some", "all"],
    "far": [False, True],
    **LAYOUTS,
}
MAX_ELEMENTS = 200_000  # of an array, so that the oracle is quick


@pytest.mark.parametrize("case", pairwise(OF_SIZES), ids=label)
def test_any_pair_of_sizes_is_within_its_bounds(case):
    channels, spatial = case["channels"], case["spatial"]
    samples = max(1, min(case["samples"], MAX_ELEMENTS // (prod(spatial) * channels)))
    count = {"one": 1, "some": GROUPS[channels], "all": channels}[case["groups"]]
    drawn = Samples(samples, spatial, channels, count, *(case[name] for name in LAYOUTS))
    for kernel in ("group_norm_forward", "group_norm_backward"):
        call_of(kernel, {"samples": drawn, "far": case["far"]}, OnNumpy()).check()
