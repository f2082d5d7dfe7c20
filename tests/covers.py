# SPDX-License-Identifier: MIT
"""Which combinations of choices to test: all of them, or a cover of all pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def everything(factors: Mapping[str, Sequence[Any]]) -> Iterator[Case]:
    """Yield every combination of one choice from each factor."""
    for choices in product(*factors.values()):
        yield dict(zip(factors, choices, strict=True))


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return combinations among which every two choices of different factors meet.

    Greedy: each case starts from a pair that is still missing, and takes of every other factor the
    choice that brings the most missing pairs, the one that was taken least where they are equal.
    The same factors give the same cases. There are hardly more than the product of the two longest
    factors, which no cover can do with less than.
    """
    if len(factors) < 2:
        return list(everything(factors))
    names, values = list(factors), list(factors.values())
    missing = {  # a dict for its order: pairs of (factor, choice), by their numbers
        ((i, a), (j, b)): None
        for i, j in combinations(range(len(values)), 2)
        for a, b in product(range(len(values[i])), range(len(values[j])))
    }
    taken: Counter[tuple[int, int]] = Counter()
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for factor in sorted(set(range(len(values))) - set(case), key=lambda i: -len(values[i])):
            case[factor] = max(
                range(len(values[factor])),
                key=lambda choice, i=factor: (
                    sum(_pair((i, choice), other) in missing for other in case.items()),
                    -taken[i, choice],
                ),
            )
        for pair in combinations(sorted(case.items()), 2):
            missing.pop(pair, None)
        taken.update(case.items())
        cases.append({names[i]: values[i][case[i]] for i in range(len(values))})
    return cases


def _pair(first: tuple[int, int], second: tuple[int, int]) -> tuple[Any, Any]:
    return (first, second) if first < second else (second, first)


def label(case: Case) -> str:
    """Return a case as the name of a test."""
    return "-".join(str(choice) for choice in case.values())
