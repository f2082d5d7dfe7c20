# SPDX-License-Identifier: MIT
"""A pairwise cover whose choices go together only by chance."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from tests.support.covers import Case, pairwise

Choice = tuple[str, Any]

_SWEEPS = 3


def mixed(
    factors: Mapping[str, Sequence[Any]], telling: Callable[[Case], Case] = dict
) -> list[Case]:
    """Return combinations among which every two choices of different factors meet.

    `pairwise` takes the choices of short factors in turn, so that one goes with the same ones of
    the others in every case. Here they are drawn anew wherever all pairs remain that met before, as
    far as they meet in what is `telling` of a case: what its other choices do not make idle.
    """
    draw = random.Random(len(factors))
    cases = pairwise(factors)
    met = Counter(pair for case in cases for pair in combinations(_choices(telling(case)), 2))
    for _ in range(_SWEEPS):
        for number, case in enumerate(cases):
            for name in draw.sample(list(factors), len(factors)):
                other = case | {name: draw.choice(factors[name])}
                before, after = _choices(telling(case)), _choices(telling(other))
                lost, found = _pairs_of_one(before, after), _pairs_of_one(after, before)
                if sum(met[pair] == 0 for pair in found) >= sum(met[pair] == 1 for pair in lost):
                    met.subtract(lost)
                    met.update(found)
                    case = cases[number] = other
    return cases


def _choices(case: Case) -> list[Choice]:
    return sorted(case.items(), key=lambda choice: choice[0])


def _pairs_of_one(choices: list[Choice], other: list[Choice]) -> list[tuple[Choice, Choice]]:
    """Return the pairs of choices that the other case does not have."""
    alone = {choice for choice in choices if choice not in other}
    if not alone:
        return []
    return [(a, b) for a, b in combinations(choices, 2) if a in alone or b in alone]
