# SPDX-License-Identifier: MIT
"""A pairwise cover of NVRTC's builds for norms of split rows."""

from __future__ import annotations

from functools import cache
from itertools import product

from tests.support.covers import Case, pairwise
from tests.support.gpus import limits_of
from tests.support.internals import (
    COMBINE_MOMENTS,
    FLOAT32,
    FLOAT64,
    Device,
    GivenSumsTypes,
    GivenTypes,
    Launch,
    MomentsTypes,
    SumsTypes,
    optional_contiguous,
    parse,
)
from tests.support.nvrtc_covers import BACKWARD, FORWARD, backward_launch, forward_launch


def split_launches(case: Case, architecture: str) -> list[Launch]:
    """Return the launches of the four builds of split rows, for a case of FORWARD and BACKWARD."""
    is_pre = case["position"] == "pre"
    of_moments = case | {"y": None, "weight": None, "bias": None, "rounded": False}
    of_moments |= {} if is_pre else {"gate": None}
    of_sums = case | {"dresidual_out": None, "outputs": "neither", "sums": (), "dgate": False}
    of_sums |= {"rounded": False}
    return [
        forward_launch(of_moments, architecture, MomentsTypes),
        forward_launch(case | {"residual": None}, architecture, GivenTypes),
        backward_launch(of_sums, architecture, types_of=SumsTypes),
        backward_launch(case, architecture, types_of=GivenSumsTypes),
    ]


def combine_launches() -> list[Launch]:
    """Return the launches of combine_moments, one for each build."""
    spec, found = parse(COMBINE_MOMENTS, ("f", 0.0, None)), []
    for dtype, center in product((FLOAT32, FLOAT64), (False, True)):
        m2, count = (optional_contiguous(s, dtype, Device("meta", 0)) for s in ((2, 5), (2,)))
        inputs = (m2, *[m2 if center else None] * 2, count)
        plan = COMBINE_MOMENTS.plan(spec, (*inputs, *COMBINE_MOMENTS.no_outputs))
        found += plan.lower(limits_of("90"), (16,) * COMBINE_MOMENTS.array_count).launches
    return found


@cache
def split_cover(architecture: str) -> list[Launch]:
    """Return the launches of norms of split rows, one for each build."""
    cases = pairwise(FORWARD | BACKWARD)
    found = [one for case in cases for one in split_launches(case, architecture)]
    return list({launch.build: launch for launch in combine_launches() + found}.values())
