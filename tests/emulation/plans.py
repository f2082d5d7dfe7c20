# SPDX-License-Identifier: MIT
"""Sizes that every kind of plan is made for, small enough for an interpreter.

With one multiprocessor a backward's blocks walk three rows and more. A forward's blocks walk rows,
and a group norm's launches have some of the samples, where a launch may have a few blocks only,
which a GPU's never has: `machine(grid=...)`.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest

from tests.emulation.machine import machine
from tests.support.cases import FACTORS
from tests.support.internals import Launch
from tests.support.placed import Samples, Shape

FEATURES = "clusters async_copies"
_ELEMENTS = 24_000  # of an array, at least three rows


class RowPlan(NamedTuple):
    """A width of float32, what the plan may use of a GPU, and how threads share rows."""

    width: int
    features: str
    forward: str
    backward: str
    backward_width: int = 0  # where it is another

    def shape(self, kernel: str) -> Shape:
        """Return three leading axes and the width."""
        width = (self.backward_width if "backward" in kernel else 0) or self.width
        if width > 6000:
            return (1, 1, 3, width)
        return (2, 3, max(1, _ELEMENTS // (6 * width)), width)


ROW_PLANS = {
    "8 threads a row": RowPlan(33, "", "8 of 128", "8 of 128"),
    "16 threads a row": RowPlan(100, "", "16 of 128", "16 of 128"),
    "16 threads a row, copied ahead": RowPlan(128, FEATURES, "16 of 128", "16 of 128, copied"),
    "a warp a row": RowPlan(230, "", "32 of 128", "32 of 128"),
    "a block a row": RowPlan(3100, "", "64 of 64", "128 of 128"),
    "a block a row, copied ahead": RowPlan(1028, FEATURES, "32 of 128", "128 of 128, copied"),
    "a wide block a row": RowPlan(5003, "", "64 of 64", "256 of 256"),
    "streamed": RowPlan(33004, "", "512 of 512, streamed", "512 of 512, streamed", 16400),
    "a cluster of 2": RowPlan(9001, FEATURES, "512 of 256", "512 of 256"),
    "a cluster of 4": RowPlan(20000, FEATURES, "1024 of 256", "1024 of 256"),
    "a cluster of 8": RowPlan(40004, FEATURES, "2048 of 256", "2048 of 256"),
    "a cluster of 16": RowPlan(70002, FEATURES, "4096 of 256", "4096 of 256"),
}


def of_rows(launch: Launch) -> str:
    """Return how many threads share a row, and how many a block has."""
    macros = dict(launch.build.macros)
    streamed = ", streamed" if macros["PACKS"] == "0" else ""
    copied = ", copied" if macros.get("ASYNC_COPIES") == "true" else ""
    return f"{macros['THREADS_PER_ROW']} of {macros['THREADS']}{streamed}{copied}"


class GroupPlan(NamedTuple):
    """Samples, by how many launches a forward is, and how many blocks one sample has at most."""

    samples: Samples
    launches: int
    blocks: int


_FIRST = {"channels_last": False, "channel_axis": 1}
GROUP_PLANS = {
    "last, one launch": GroupPlan(Samples(3, (9, 7), 40, 5), 1, 5),
    "last, one launch, groups together": GroupPlan(Samples(3, (150,), 36, 6), 1, 3),
    "last, one launch, a thread of a position": GroupPlan(Samples(3, (), 64, 4), 1, 4),
    "last, three launches": GroupPlan(Samples(2, (2100,), 8, 2), 3, 5),
    "last, three launches, tiles of channels": GroupPlan(Samples(2, (19,), 1036, 1), 3, 10),
    "first, one launch, in a warp": GroupPlan(Samples(3, (5,), 9, 3, **_FIRST), 1, 3),
    "first, one launch, in warps": GroupPlan(Samples(3, (9, 31), 6, 2, **_FIRST), 1, 2),
    "first, three launches, in a warp": GroupPlan(Samples(2, (15,), 520, 1, **_FIRST), 3, 33),
    "first, three launches, in warps": GroupPlan(Samples(2, (5003,), 4, 2, **_FIRST), 3, 8),
}


class Planned(NamedTuple):
    """A kernel of a kind of plan."""

    kernel: str
    plan: str

    @property
    def case(self) -> dict[str, Any]:
        """What says so in a case."""
        if "group" in self.kernel:
            return {"samples": GROUP_PLANS[self.plan].samples}
        return {"shape": ROW_PLANS[self.plan].shape(self.kernel)}

    def machine(self, *, few: int = 0, **told: Any) -> AbstractContextManager[list[Launch]]:
        """Let calls run on a GPU that has what the plan uses, and one multiprocessor.

        `few`: its launches have at most so many times two blocks, or two clusters, or the blocks of
        one float32 sample; 0: as many as they like.
        """
        if plan := GROUP_PLANS.get(self.plan):
            features, blocks = "", plan.blocks
        else:
            rows = ROW_PLANS[self.plan]
            threads_of_row, threads = map(int, rows.forward.partition(",")[0].split(" of "))
            features, blocks = rows.features, 2 * max(1, threads_of_row // threads)
        return machine(features, few * blocks or None, **{"multiprocessors": 1, **told})


KERNELS = tuple(FACTORS)
PLANNED = [
    Planned(f"{norm}_norm_{direction}", plan)
    for norm, plans in (("row", ROW_PLANS), ("group", GROUP_PLANS))
    for plan in plans
    for direction in ("forward", "backward")
]
# Those of which more is run than others.
TYPICAL = (
    *("16 threads a row", "a block a row, copied ahead", "streamed", "a cluster of 2"),
    *("last, one launch", "last, three launches", "first, three launches, in a warp"),
)


def every_plan(*, typical: Collection[str] = TYPICAL) -> list[Any]:
    """Return parameters: kernels and plans, which are exhaustive but for typical ones."""
    return [
        pytest.param(
            planned,
            marks=() if planned.plan in typical else pytest.mark.exhaustive,
            id="-".join(planned),
        )
        for planned in PLANNED
    ]
