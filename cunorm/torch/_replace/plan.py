# SPDX-License-Identifier: MIT
"""Plans: how a replaced norm runs, and what the report says of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cunorm.torch._replace.recipe import Pair, Recipe


class Match(NamedTuple):
    """The recipe of calls with these dtypes, with or without a gate, which has x's dtype."""

    pair: Pair
    gated: bool
    recipe: Recipe
    exact: bool  # else y is up to one unit in the last place off


@dataclass(frozen=True)
class Plan:
    """How to run a module: its operands, and its recipes. Other calls run its own forward."""

    eps: str  # the attribute that is eps
    parameters: tuple[str, ...]  # the names of weight and bias, if there are any
    arguments: tuple[str, ...]  # forward's names for x and, if it takes one, gate
    matches: tuple[Match, ...]
    axes: frozenset[int]  # how many x may have
    under_autocast: bool  # whether it holds there too: torch's own norms change the dtype
    others: tuple[str, ...] = ()  # which of the tried calls run the module's own forward, as text

    def describe(self, eps: float, dtype: torch.dtype) -> str:
        """Return what runs in a dtype, where it is another recipe or is inexact, and where none."""
        lines: list[str] = []
        for gated in (False, True):
            matches = [match for match in self.matches if match.gated == gated]
            usual = [match.recipe for match in matches if match.pair == (dtype, dtype)]
            for recipe in dict.fromkeys([*usual, *(match.recipe for match in matches)]):
                pairs = {match.pair: match.exact for match in matches if match.recipe == recipe}
                off = listed(pair for pair, exact in pairs.items() if not exact)
                lines.append(
                    recipe.describe(eps)
                    + ("" if recipe in usual else f" for {listed(pairs)}")
                    + (f" within a unit in the last place in {off}" if off else "")
                )
        others = [f"its own forward {', '.join(self.others)}"] if self.others else []
        return "; ".join(lines + others)


def listed(pairs: Iterable[Pair]) -> str:
    return ", ".join("/".join(dict.fromkeys(map(short, pair))) for pair in pairs)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
