# SPDX-License-Identifier: MIT
"""Calls that are drawn are within their bounds, and related to other calls as promised.

Operands, dtypes, options, shapes, strides, alignment, results, workspace and frameworks are drawn;
`pytest -m exhaustive tests/fuzz` draws 100,000 examples, of more builds. Every array lies between
pages that fault where they are touched. A failing example is printed as a script; one that ends the
process is in the folder for temporary files.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.drawn import KERNELS, cases
from tests.fuzz.examples import run
from tests.fuzz.relations import RELATIONS

common = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SEED = int(os.environ.get("CUNORM_FUZZ_SEED", "0"))
PARTS = 8  # of the exhaustive test, for as many processes
EXAMPLES = 100_000 // (PARTS * len(KERNELS))


def check(kernel, seeds, number, examples, relations):
    """Check examples; return the relations that were found to apply to some."""
    found = set()

    @seed(number)
    @settings(common, max_examples=examples)
    @given(
        case=cases(kernel, seeds),
        relation=relations,
        choice=st.integers(0, 999),
        at_end=st.booleans(),
    )
    def check_examples(case, relation, choice, at_end):
        found.update(run(kernel, case, relation, choice, at_end=at_end))

    check_examples()
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_examples_are_within_their_bounds_and_related_to_others(kernel):
    found = check(kernel, 0, 0, 40, st.none())
    assert len(found) > 2, "versions of hypothesis draw other examples; most have many relations"


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kernel", KERNELS)
def test_100_000_examples_are_within_their_bounds_and_related_to_others(kernel, part):
    relations = st.sampled_from([*RELATIONS[kernel]])
    found = check(kernel, 5, SEED * PARTS + part + 1, EXAMPLES, relations)
    assert found == {*RELATIONS[kernel]}
