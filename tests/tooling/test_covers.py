# SPDX-License-Identifier: MIT
"""A pairwise cover has every pair, and few cases."""

from itertools import combinations

import pytest

from tests.support import case_covers as cases
from tests.support.covers import everything, pairwise

FACTORS = [
    {"width": range(11), "stream": range(9), "weight": "abcde", "bias": "abcde", "center": [0, 1]},
    {name: range(3) for name in "abcdefg"},
]


def pairs(found):
    return {pair for case in found for pair in combinations(case.items(), 2)}


@pytest.mark.parametrize(("factors", "most"), list(zip(FACTORS, (115, 18), strict=True)))
def test_a_cover_has_every_pair_of_choices_and_is_small(factors, most):
    found = pairwise(factors)
    assert pairs(found) == pairs(everything(factors))
    assert len(found) <= most


@pytest.mark.parametrize("kernel", cases.FACTORS)
def test_every_choice_for_a_kernel_is_in_a_case_in_which_it_has_an_effect(kernel):
    live = set().union(*(cases.relevant(case).items() for case in cases.cover(kernel, {})))
    assert live >= {(name, c) for name, choices in cases.FACTORS[kernel].items() for c in choices}
