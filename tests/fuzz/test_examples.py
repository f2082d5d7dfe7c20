# SPDX-License-Identifier: MIT
"""Random calls are within their bounds, and related to other calls as promised.

`axes.py` lists what is drawn. `pytest -m exhaustive tests/fuzz` draws 100,000 examples of more
builds, and checks that they cover every value of every axis; CUNORM_FUZZ_EXAMPLES changes the
number, CUNORM_FUZZ_SEED the seed. Every array lies between pages that fault on any access. Builds
are for several instruction sets, and poison the memory that passes share. A failing example is
printed as a script; if it ends the process, its script is in the folder for temporary files.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.axes import Counts
from tests.fuzz.drawn import KERNELS, builds_of, cases
from tests.fuzz.examples import run
from tests.fuzz.relations import RELATIONS

common = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
exhaustive = pytest.mark.exhaustive
SEED = int(os.environ.get("CUNORM_FUZZ_SEED", "0"))
TOTAL = int(os.environ.get("CUNORM_FUZZ_EXAMPLES", "100000"))
PARTS = max(1, min(8, TOTAL // 10_000))  # of the exhaustive test, for as many processes
EXAMPLES = TOTAL // (PARTS * len(KERNELS))


def check(kernel, drawn, number, examples, relations):
    """Check examples; return the relations that applied to any example, and counts of draws."""
    found, counts = set(), Counts(kernel)

    @seed(number)
    @settings(common, max_examples=examples)
    @given(case=drawn, relation=relations, choice=st.integers(0, 999), at_end=st.booleans())
    def check_examples(case, relation, choice, at_end):
        counts.add(case)
        found.update(run(kernel, case, relation, choice, at_end=at_end))

    check_examples()
    return found, counts


@pytest.mark.parametrize("first", [1, *(pytest.param(n, marks=exhaustive) for n in (0, 2, 3))])
@pytest.mark.parametrize("kernel", KERNELS)
def test_examples_of_each_build_are_within_their_bounds_and_related_to_others(kernel, first):
    """Without -m exhaustive, only every fourth build is compiled."""
    related = set()
    for number, build in list(enumerate(builds_of(kernel, 0)))[first::4]:
        found, _ = check(kernel, cases(kernel, [build]), number, 1, st.none())
        related |= found
    assert len(related) > 2, "too few relations apply to the examples of this version of hypothesis"


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kernel", KERNELS)
def test_100_000_examples_are_within_their_bounds_and_related_to_others(kernel, part):
    relations = st.sampled_from([*RELATIONS[kernel]])
    drawn = cases(kernel, builds_of(kernel, 5), with_long=True)
    found, counts = check(kernel, drawn, SEED * PARTS + part + 1, EXAMPLES, relations)
    print(counts.table())
    if EXAMPLES >= 3000:  # enough for rare values
        assert found == {*RELATIONS[kernel]}
        assert not counts.missing()
