# SPDX-License-Identifier: MIT
"""Combinations of choices to test: all of them, or a cover of all pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest

Case = dict[str, Any]


def everything(factors: Mapping[str, Sequence[Any]]) -> Iterator[Case]:
    """Yield every combination of one choice from each factor."""
    for choices in product(*factors.values()):
        yield dict(zip(factors, choices, strict=True))


def pairwise(
    factors: Mapping[str, Sequence[Any]], relevant: Callable[[Case], Case] = dict
) -> list[Case]:
    """Return cases such that every two choices of different factors occur together in some case.

    Some choices make others idle. `relevant` drops idle choices from a case or part of a case. An
    idle choice does not count as occurring; pairs that cannot occur together are skipped.

    The algorithm is greedy: each case starts from a missing pair. From every other factor it takes
    the choice that adds most missing pairs; of several such choices, the least used. The same
    factors give the same cases. If no choice is idle, the number of cases is at least the product
    of the lengths of the two longest factors, and often little more.
    """
    if len(factors) < 2:
        return list(everything(factors))
    missing = {  # a dict keeps its order
        frozenset(((first, a), (second, b))): None
        for first, second in combinations(factors, 2)
        for a, b in product(factors[first], factors[second])
    }
    uses: Counter[tuple[str, Any]] = Counter()
    cases = []

    def gain(case: Case, pair: frozenset[Any], name: str, choice: Any) -> tuple[bool, int, int]:
        live = relevant(case | {name: choice}).items()
        found = sum(frozenset(both) in missing for both in combinations(live, 2))
        return (pair <= live, found, -uses[name, choice])

    while missing:
        pair = next(iter(missing))
        case = dict(pair)
        for name in sorted(factors, key=lambda name: -len(factors[name])):
            if name not in case:
                case[name] = max(factors[name], key=partial(gain, case, pair, name))
        live = relevant(case).items()
        if not pair <= live:  # a choice of the pair makes the other idle
            del missing[pair]
            continue
        for both in combinations(live, 2):
            missing.pop(frozenset(both), None)
        uses.update(case.items())
        cases.append({name: case[name] for name in factors})
    return cases


def label(case: Case) -> str:
    """Return the test id of a case."""
    return "-".join(str(choice) for choice in case.values())


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Return the decorator that parametrizes a test by cases."""
    return pytest.mark.parametrize("case", cases, ids=label)
