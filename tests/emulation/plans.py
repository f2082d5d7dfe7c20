# SPDX-License-Identifier: MIT
"""Sizes for every kind of plan, small enough for an interpreter.

With one multiprocessor, each block of a row norm's backward walks three or more rows.
`machine(grid=...)` limits a launch to a few blocks, which no real GPU does. With that limit, blocks
of a forward walk several rows too, and a launch of a group norm has only some of the samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tests.emulation.machine import machine
from tests.support.case_covers import FACTORS
from tests.support.internals import Launch
from tests.support.placed import Samples, Shape

FEATURES = "clusters async_copies programmatic_launches"
_TWO_LAUNCHES = "async_copies programmatic_launches"
_ELEMENTS = 24_000  # of an array, unless a few rows have more
# Bytes that a block must not use, so that its sums do not fit in shared memory if 1 or 2 blocks
# share the 228 KiB of an H200's multiprocessor.
_SPARED = {1: 225 << 10, 2: 112 << 10}


class RowPlan(NamedTuple):
    """A width, how threads share rows of this width, the GPU's features, and the operands."""

    width: int
    launch: str  # see row_plan_name
    features: str = ""
    case: Mapping[str, Any] = MappingProxyType({})  # what differs from the default, float32
    settings: Mapping[str, Any] = MappingProxyType({})  # of `machine`

    @property
    def shape(self) -> Shape:
        """Return three leading axes and the width."""
        if self.width > 6000:
            return (1, 1, 3, self.width)
        return (2, 3, max(1, _ELEMENTS // (6 * self.width)), self.width)

    @property
    def cluster(self) -> int:
        """Return the number of blocks that share a row."""
        threads_of_row, threads = map(int, self.launch.partition(",")[0].split(" of "))
        return max(1, threads_of_row // threads)


_PLAIN = {"center": False, "bias": None, "stream": None, "d_residual": None}
_BARE = {"weight": None, "bias": None, "stream": None}
_WIDE = dict.fromkeys(("x", "dy", "weight", "bias", "gate", "d_residual"), "float64")
_WIDE |= {"gate_activation": "identity"}
_DX, _SUMS = _PLAIN | {"needs": ("x",)}, _PLAIN | {"bias": "float32", "needs": ("weight", "bias")}
_OLD = {"capability": 75}  # a GPU with little shared memory
FORWARD_PLANS = {
    "4 threads a row": RowPlan(33, "4 of 128"),
    "8 threads a row": RowPlan(65, "8 of 128"),
    "8 threads a row, of packs": RowPlan(100, "8 of 128"),
    "16 threads a row": RowPlan(230, "16 of 128"),
    "a warp a row": RowPlan(1028, "32 of 128"),
    "a block of 64 a row": RowPlan(1284, "64 of 64"),
    "a block of 96 a row": RowPlan(2052, "96 of 96"),
    "a block of 160 a row": RowPlan(5003, "160 of 160"),
    "a block of 320 a row": RowPlan(16388, "320 of 320", "", _BARE),
    "streamed": RowPlan(16388, "512 of 512, streamed"),
    "a cluster of 2": RowPlan(18436, "512 of 256", FEATURES, _BARE),
    "a cluster of 4": RowPlan(16388, "896 of 224", FEATURES),
    "a cluster of 8": RowPlan(8196, "1280 of 160", FEATURES, _WIDE),
    "a cluster of 16": RowPlan(12292, "3584 of 224", FEATURES, _WIDE),
    "streamed in a cluster": RowPlan(57350, "2048 of 128, streamed", FEATURES, _WIDE),
}
BACKWARD_PLANS = {
    "8 threads a row": RowPlan(33, "8 of 256"),
    "8 threads a row, 2 rows ahead": RowPlan(33, "8 of 256, 2 ahead", FEATURES),
    "4 threads a row, 4 rows ahead": RowPlan(5, "4 of 256, 4 ahead", FEATURES, _PLAIN),
    "16 threads a row": RowPlan(100, "16 of 256"),
    "16 threads a row, 1 row ahead": RowPlan(128, "16 of 256, 1 ahead", FEATURES),
    "a warp a row": RowPlan(230, "32 of 256"),
    "a warp a row, 1 row ahead": RowPlan(230, "32 of 256, 1 ahead", FEATURES),
    "a warp a row, little shared memory": RowPlan(512, "32 of 256", "", _SUMS, _OLD),
    "a block of 64 a row": RowPlan(600, "64 of 64, 1 ahead", FEATURES),
    "a block of 96 a row": RowPlan(1028, "96 of 96"),
    "a block of 96 a row, 1 row ahead": RowPlan(1028, "96 of 96, 1 ahead", FEATURES),
    "a block of 160 a row, 1 row ahead": RowPlan(2052, "160 of 160, 1 ahead", FEATURES),
    "a block of 288 a row": RowPlan(4100, "288 of 288", "", _PLAIN),
    "a block of 512 a row, sums in global memory": RowPlan(
        7684, "512 of 512, global", "", _SUMS, _OLD
    ),
    "streamed": RowPlan(8200, "512 of 512, streamed"),
    "streamed, sums in global memory": RowPlan(8200, "512 of 512, streamed, global", "", {}, _OLD),
    "a cluster of 2, 1 row ahead": RowPlan(8196, "448 of 224, 1 ahead", FEATURES, _DX),
    "a cluster of 4": RowPlan(5003, "1024 of 256", "clusters"),
    "a cluster of 4, 2 rows ahead": RowPlan(5003, "1024 of 256, 2 ahead", FEATURES),
    "a cluster of 4, sums in global memory": RowPlan(
        5003, "1024 of 256, global", FEATURES, settings={"spared": _SPARED[2]}
    ),
    "a cluster of 8, 1 row ahead": RowPlan(12292, "1792 of 224, 1 ahead", FEATURES),
    "a cluster of 16, 1 row ahead": RowPlan(24580, "3584 of 224, 1 ahead", FEATURES),
    "streamed in a cluster": RowPlan(20002, "2048 of 128, streamed", FEATURES, _WIDE),
    "streamed in a cluster, sums in global memory": RowPlan(
        20002, "2048 of 128, streamed, global", FEATURES, _WIDE, {"spared": _SPARED[1]}
    ),
}
ROW_PLANS = {"row_norm_forward": FORWARD_PLANS, "row_norm_backward": BACKWARD_PLANS}


def row_plan_name(launch: Launch) -> str:
    """Return the threads of a row and of a block, and further properties, as in RowPlan.launch."""
    macros = dict(launch.build.macros)
    of_row, threads, pack, packs = (
        int(macros[name]) for name in ("THREADS_PER_ROW", "THREADS", "PACK", "PACKS")
    )
    name = f"{of_row} of {threads}"
    if int(macros["WIDTH"]) > of_row * pack * packs:
        name += ", streamed"
    if macros.get("STAGES", "0") != "0":
        name += f", {macros['STAGES']} ahead"
    return name + (", global" if macros.get("SUMS_IN_SHARED") == "false" else "")


class GroupPlan(NamedTuple):
    """Samples, and the GPU's features for their plan."""

    samples: Samples
    features: str = ""
    spared: int = 0  # bytes of shared memory that tiles must not use
    alone: bool = True  # whether a block may have a multiprocessor to itself


def _first(*sizes: Any) -> Samples:
    return Samples(*sizes, channels_last=False, channel_axis=1)


# Bytes that tiles must not use, so that each of two blocks on an H200's multiprocessor has some
# room left, or little.
_SOME, _LITTLE = 84 << 10, 98 << 10
GROUP_PLANS = {  # each name begins with the result of group_plan_name
    "last, a block": GroupPlan(Samples(3, (9, 7), 64, 2)),
    "last, a block of several groups": GroupPlan(Samples(3, (50,), 36, 6)),
    "last, a block of several groups, one position": GroupPlan(Samples(3, (), 64, 4)),
    "last, a block of several groups, odd": GroupPlan(Samples(3, (23,), 33, 11)),
    "last, a cluster, parts of channels": GroupPlan(Samples(2, (7,), 1036, 1), FEATURES),
    "last, a cluster of several groups": GroupPlan(Samples(2, (401,), 40, 5), FEATURES, _SOME),
    "last, a cluster of several groups, idle blocks": GroupPlan(
        Samples(2, (290,), 40, 5), "clusters", _LITTLE
    ),
    "last, a block, alone": GroupPlan(Samples(2, (400,), 32, 1), "async_copies", _LITTLE),
    "last, two launches of several groups": GroupPlan(
        Samples(2, (1013,), 24, 2), _TWO_LAUNCHES, _LITTLE, alone=False
    ),
    "last, two launches, parts of channels": GroupPlan(Samples(2, (19,), 1036, 1), spared=_LITTLE),
    "first, a block of several groups": GroupPlan(_first(3, (5,), 9, 3)),
    "first, a block of several groups, of two positions": GroupPlan(_first(2, (2,), 516, 129)),
    "first, a block": GroupPlan(_first(3, (16, 48), 12, 2)),
    "first, a block, alone": GroupPlan(_first(2, (5004,), 4, 2), "async_copies", _LITTLE),
    "first, a cluster": GroupPlan(_first(2, (36, 40), 8, 2), FEATURES, _LITTLE),
    "first, a cluster of several groups, idle blocks": GroupPlan(
        _first(2, (388,), 40, 5), FEATURES, _LITTLE
    ),
    "first, two launches": GroupPlan(_first(2, (5003,), 4, 2), _TWO_LAUNCHES, _LITTLE, alone=False),
    "first, two launches, parts of channels, many": GroupPlan(_first(2, (2,), 8193, 1)),
    "first, two launches, parts of channels": GroupPlan(_first(2, (15,), 520, 1), spared=_LITTLE),
}


def group_plan_name(launches: Sequence[Launch]) -> str:
    """Return the layout, the blocks or launches that make all passes, and further properties."""
    macros = dict(launches[0].build.macros)
    last = macros["CHANNELS_LAST"] == "true"
    columns = int(macros["CHANNEL_THREADS"]) * (int(macros["PACK"]) if last else 1)
    unit = int(macros["CHANNELS"]) // int(macros["GROUPS"]) * int(macros["UNIT_GROUPS"])
    name = "last, " if last else "first, "
    if len(launches) > 1:
        name += "two launches"
    else:
        name += "a block" if macros["CLUSTER"] == "1" else "a cluster"
    name += " of several groups" if macros["UNIT_GROUPS"] != "1" else ""
    name += ", alone" if int(macros["THREADS"]) > 128 else ""
    return name + (", parts of channels" if unit > columns else "")


class Planned(NamedTuple):
    """A kernel and a kind of plan."""

    kernel: str
    plan: str

    @property
    def rows(self) -> RowPlan | None:
        """The plan if it is a row norm's, else None."""
        return ROW_PLANS.get(self.kernel, {}).get(self.plan)

    @property
    def case(self) -> dict[str, Any]:
        """The part of a case that leads to this plan."""
        if self.rows:
            return {"shape": self.rows.shape, **self.rows.case}
        return {"samples": GROUP_PLANS[self.plan].samples}

    def machine(
        self, *, few: int = 0, grid: int | None = None, **settings: Any
    ) -> AbstractContextManager[list[Launch]]:
        """Run calls on a GPU with the plan's features and one multiprocessor.

        `few` limits a launch of a group norm to that many blocks, but to no less than one sample.
        With `few=1`, each block or cluster of a row norm walks three rows or more. If `few` is 0,
        `grid` is the limit.
        """
        blocks = 1
        if self.rows:
            features, settings = self.rows.features, {**self.rows.settings, **settings}
            blocks = (1 if self.rows.width > 6000 else 2) * self.rows.cluster
        else:
            features = GROUP_PLANS[self.plan].features
            _, _, spared, alone = GROUP_PLANS[self.plan]
            settings = {"spared": spared, "alone": alone, **settings}
        return machine(features, few * blocks or grid, **{"multiprocessors": 1, **settings})


KERNELS = tuple(FACTORS)
PLANS = {kernel: ROW_PLANS.get(kernel, GROUP_PLANS) for kernel in KERNELS}
PLANNED = [Planned(kernel, plan) for kernel, plans in PLANS.items() for plan in plans]
# Plans that run in CI if a test does not name its own; the others are exhaustive.
TYPICAL = (
    *("8 threads a row", "16 threads a row, 1 row ahead", "a block of 64 a row", "streamed"),
    *("a cluster of 4", "a cluster of 4, 2 rows ahead", "streamed in a cluster"),
    *("last, a block", "last, a cluster of several groups", "last, two launches of several groups"),
    *("first, a cluster", "first, two launches"),
)


def every_plan(*, typical: Collection[str] = TYPICAL) -> list[Any]:
    """Return test parameters of all kernels and plans; only typical plans run in CI."""
    return [
        pytest.param(
            planned,
            marks=() if planned.plan in typical else pytest.mark.exhaustive,
            id="-".join(planned),
        )
        for planned in PLANNED
    ]
