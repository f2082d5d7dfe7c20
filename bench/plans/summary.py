# SPDX-License-Identifier: MIT
"""The static table as text: by plan, and compared with the goals."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

from bench.plans.model import GPUS
from bench.plans.occupancy import l2_keeps
from bench.plans.plan import PARAM_GRAD, TWO_LAUNCHES
from bench.plans.rows import Row
from cunorm._core.dtypes import DTYPES

ONE_PASS, TWO_PASSES = "one pass", "two passes"
KINDS = ("plain", "residual", "gated", "NHWC", "NCHW")


def passes(row: Row) -> str | None:
    """Return the passes of a group norm, "" for a row norm, None for a launch without a goal."""
    if row.kernel == PARAM_GRAD or row.step == "find":
        return None
    if not row.memory:
        return ""
    read = DTYPES[row.dtype].itemsize * (1 if row.direction == "forward" else 2)
    fits = l2_keeps(row.arch.removeprefix("sm_"), read * _size(row))
    return ONE_PASS if row.regime != TWO_LAUNCHES or fits else TWO_PASSES


def _size(row: Row) -> int:
    """Return the elements of a row or sample."""
    return prod(map(int, row.shape.split("x")))


class Goal(NamedTuple):
    """The least share of copy speed for default plans, on GPUs that the model has."""

    direction: str
    least: int  # width, or elements of a sample
    most: int
    wanted: float
    gpus: tuple[str, ...]
    passes: str = ""  # of a group norm

    def covers(self, row: Row) -> bool:
        """Whether the goal applies to a row."""
        return (
            row.gpu in self.gpus
            and row.direction == self.direction
            and passes(row) == self.passes
            and not row.features
            and not row.count
            and self.least <= _size(row) <= self.most
            and bool(row.prediction)
        )

    def __str__(self) -> str:
        sizes = self.passes or f"{self.least}-{self.most}"
        return f"{self.direction} {sizes} >= {self.wanted}"


_ALL, _CLUSTERS = tuple(GPUS), ("H100", "H200", "B200")
GOALS = (
    Goal("forward", 64, 512, 0.85, _ALL),
    Goal("forward", 1024, 16384, 0.92, _ALL),
    Goal("forward", 32768, 262144, 0.88, _CLUSTERS),
    Goal("backward", 256, 8192, 0.85, _ALL),
    Goal("backward", 12288, 262144, 0.75, _ALL),
    *(Goal(name, 0, 1 << 31, 0.75, ("H200",), ONE_PASS) for name in ("forward", "backward")),
    *(Goal(name, 0, 1 << 31, 0.9, ("H200",), TWO_PASSES) for name in ("forward", "backward")),
)


def share(row: Row) -> float:
    """Return the prediction of the row's call, including param_grad."""
    return float(row.call_prediction or row.prediction)


def missed_goals(row: Row) -> list[str]:
    """Return the goals that a row misses."""
    return [
        f"{share(row):.3f} of copy speed is predicted, the goal is {goal.wanted}"
        for goal in GOALS
        if goal.covers(row) and share(row) < goal.wanted
    ]


def limit(row: Row) -> str:
    """Return the name of a prediction's limit."""
    if row.call_prediction and float(row.call_prediction) < 0.95 * float(row.prediction):
        other = "launches" if row.step or row.count else PARAM_GRAD
        return other if row.limit == "copy" else f"{row.limit} and {other}"
    return row.limit


def goals_table(rows: list[Row]) -> Iterator[str]:
    """Yield how many default plans meet each goal, and the worst plan, by GPU and kind of norm."""
    head = f"{'predictions by a model, not measured':50}{'meet it':>10}{'late loads':>12}"
    yield f"{head}  the worst: prediction, plan, limit"
    for gpu, goal, kind in product(GPUS, GOALS, KINDS):
        covered = (row for row in rows if row.gpu == gpu and goal.covers(row))
        found = [row for row in covered if _kind(row) == kind]
        if found:
            met = sum(share(row) >= goal.wanted for row in found)
            late = sum(bool(row.late()) for row in found)
            worst = min(found, key=share)
            yield (
                f"{gpu:8}{goal!s:32}{kind:10}{met:6}/{len(found):<3}"
                f"{late:8}/{len(found):<3}  {share(worst):.3f} {worst.operator} {worst.dtype} "
                f"{worst.shape}, {worst.regime}: {limit(worst)}"
            )


def _kind(row: Row) -> str:
    if row.memory:
        return row.memory
    if row.operator.startswith("add_"):
        return "residual"
    return "gated" if row.operator.endswith("_gate") else "plain"


def row_lines(rows: list[Row]) -> Iterator[str]:
    """Yield a line for every row."""
    yield (
        f"{'':64}{'regime':33}{'regs':>5}{'blocks':>7}{'late':>5}{'instr':>7}"
        f"{'predicted':>10}{'call':>6}{'µs':>8} limit"
    )
    for row in rows:
        name = " ".join(filter(None, (row.gpu or row.arch, *row.key[1:-2], row.step)))
        yield (
            f"{name:64}{row.regime:33}{row.registers:5}{row.blocks_per_sm:7}{row.late_loads:>5}"
            f"{row.instructions:>7}{row.prediction:>10}{row.call_prediction:>6}"
            f"{row.microseconds:>8} {row.limit}"
        )
