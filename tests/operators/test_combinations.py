# SPDX-License-Identifier: MIT
"""Dtypes, activations, options, sizes and layouts go together in any pair.

Each case is a build of its own, run with arrays of several sizes. `pytest -m exhaustive` runs other
covers of all pairs, of more choices.
"""

import random

import pytest

from tests.support.cases import ACTIVATIONS, FACTORS, NARROW, Samples, arranged, call_of, cover
from tests.support.covers import label, pairwise
from tests.support.gpu_arrays import OnNumpy
from tests.support.operands import at

# Packs are of 64 elements: most rows end in the midst of one, and groups begin there.
WIDTHS = (1, 33, 128, 1003)
# Samples, positions, channels, groups: all passes are one launch, the last ones' of several tiles.
SIZES = [
    (1, (2,), 3, 1),
    (20, (31,), 40, 8),
    (2, (1, 3, 2, 5), 320, 32),
    (1, (31, 97), 10, 2),
    (1, (4900,), 3, 3),
]
WHERE = {"channels_last": (True, False), "channel_axis": (-1, 1)}
# What is not compiled, and so differs from size to size; and activations take turns.
FIXED = {"in_place": (None,), "accumulate": (None, "float64")}
OF_ROWS = FIXED | {"c": (None,), "groups": (1,), "gate": NARROW, "gate_activation": ("silu",)}
OF_GROUPS = FIXED | {"activation": (None, "silu"), "channels_last": (True, False)}


def cases(kernel, seed=None):
    """Return a cover of what is compiled, whose cases have each of the activations in turn."""
    fixed = OF_GROUPS if "group" in kernel else OF_ROWS
    if "backward" in kernel:  # of rows, dy may be float16
        fixed = fixed | {"x": ("bfloat16", "float32", "float64")}
    fixed = {name: choices for name, choices in fixed.items() if name in FACTORS[kernel] | WHERE}
    for number, case in enumerate(cover(kernel, fixed, seed)):
        for name in {"gate_activation", "activation"} & case.keys():
            case[name] = case[name] and ACTIVATIONS[number % len(ACTIVATIONS)]
        yield case


def check(kernel, case):
    """Hold a case of several sizes to the oracle; it writes to its results alone."""
    for number, size in enumerate(SIZES if "group" in kernel else WIDTHS):
        draw = random.Random(f"{kernel} {case} {number}")
        if "group" in kernel:
            of = {"samples": Samples(*size, case["channels_last"], draw.choice([-1, 1]))}
        else:
            of = {"shape": (1, 3, 7, size), "groups": draw.choice([1, 3])}
            of["c"] = draw.choice([None, 3.0])
        of = arranged(kernel, draw, case | of)
        with at(of):
            call_of(kernel, of, OnNumpy()).check()


@pytest.mark.parametrize(
    ("kernel", "case"),
    [pytest.param(k, c, id=f"{k}-{label(c)}") for k in FACTORS for c in cases(k)],
)
def test_any_pair_of_choices_is_within_its_bounds(kernel, case):
    check(kernel, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kernel", FACTORS)
def test_other_choices_in_pairs_that_are_drawn_are_within_their_bounds(kernel, seed):
    for case in cases(kernel, seed):
        with at(label(case)):
            check(kernel, case)


# --- sizes of group norms -------------------------------------------------------------------------

POSITIONS = {1: (), 2: (2,), 7: (7,), 97 * 31: (97, 31), 70 * 70: (7, 10, 70)}
# Some groups, for so many channels. Up to 128 of them, of multiples of 16, are one pack on a CPU.
GROUPS = {1: 1, 3: 1, 10: 5, 48: 8, 128: 32, 320: 32}
OF_SIZES = {
    "samples": [1, 2, 20],
    "positions": list(POSITIONS),
    "axes": [0, 1, 2, 3, 4],  # of positions
    "channels": list(GROUPS),
    "groups": ["one", "some", "all"],
    "far": [False, True],
    **WHERE,
}
MOST = 200_000  # elements that the oracle takes in good time


def possible(case):
    """Return what of a case, or of a part of one, is not idle: no axes have only one position."""
    if case.get("axes") == 0 and case.get("positions", 1) > 1:
        return {name: choice for name, choice in case.items() if name != "axes"}
    return case


@pytest.mark.parametrize("case", pairwise(OF_SIZES, possible), ids=label)
def test_any_pair_of_sizes_is_within_its_bounds(case):
    channels, positions, factors = case["channels"], case["positions"], POSITIONS[case["positions"]]
    if case["axes"] < len(factors):
        factors = (positions,)
    factors = (1,) * (case["axes"] - len(factors)) + factors
    samples = max(1, min(case["samples"], MOST // (positions * channels)))
    count = {"one": 1, "some": GROUPS[channels], "all": channels}[case["groups"]]
    of = Samples(samples, factors, channels, count, *(case[name] for name in WHERE))
    for kernel in ("group_norm_forward", "group_norm_backward"):
        call_of(kernel, {"samples": of, "far": case["far"]}, OnNumpy()).check()
