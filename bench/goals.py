# SPDX-License-Identifier: MIT
"""The goals for the speed on a CPU, and whether the rows of a CSV meet them.

All goals are for points whose x has 1 MiB or more. A goal without points is not met, and a CSV must
have every point of the default grid.

The project's other goals are not checked here: the host cost of small calls
(`python -m bench --host`), the speed against JAX on a CPU (`python -m bench table --peer jax`), the
time to compile and to import, and all measurements on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench import grid
from bench.ratios import Ratio, geometric_mean, points_without, ratios
from bench.rows import Row

SMALLEST = 2**20  # bytes of x; smaller calls mostly take the host's time
SLOWEST_POINT = 0.97  # × torch
DTYPES = ("float32", "bfloat16")
BOTH = ("forward", "backward")
NAMED = 10  # missing points that are named; the others are counted

# The least geometric means of torch's time over cunorm's: an operator or a kind of norms, the
# directions, and the bound for each of DTYPES.
SPEED = (
    ("layer_norm", ("forward",), (1.05, 1.5)),
    ("layer_norm", ("backward",), (1.4, 2.0)),
    ("rms_norm", ("forward",), (3.0, 6.0)),
    ("rms_norm", ("backward",), (6.0, 12.0)),
    ("gated norms", BOTH, (4.0, 4.0)),
    ("group_norm+silu", BOTH, (2.5, 2.5)),
)
# The largest means of cunorm's time over a copy's, and over the time without the gate.
OVER_COPY = tuple(("ungated norms", (direction,), (1.25, 2.0)) for direction in BOTH)
OVER_UNGATED = tuple(("gated norms", (direction,), (2.0, 2.0)) for direction in BOTH)


@dataclass(frozen=True)
class Goal:
    """One figure, its bound, and its point if it is of a single one."""

    text: str
    wanted: float
    figure: float | None  # None without points
    at_least: bool
    point: str = ""

    @property
    def met(self) -> bool:
        """Whether there is a figure within the bound."""
        if self.figure is None:
            return False
        return self.figure >= self.wanted if self.at_least else self.figure <= self.wanted


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Return every goal with its figure; ValueError for timings of a GPU."""
    if rows[0].driver:
        raise ValueError(f"the goals are for a CPU, and these timings of {rows[0].device}")
    speeds = _large(ratios(rows, "torch", "cunorm"))
    over_copy = _large(ratios(rows, "cunorm", "copy"))
    over_ungated = _large(ratios(rows, "cunorm", "cunorm-ungated"))
    return [
        *_means(speeds, SPEED, "× torch", at_least=True),
        _slowest(speeds),
        *_means(over_copy, OVER_COPY, "time / copy", at_least=False),
        *_means(over_ungated, OVER_UNGATED, "time / ungated", at_least=False),
        _left_out(rows),
        _missing(rows),
    ]


def table(checked: Iterable[Goal]) -> str:
    """Return the goals as a Markdown table, after a line about their points."""
    lines = ["At the points whose x has 1 MiB or more:", ""]
    lines += ["| goal | wanted | figure | met |", "|---|---|---|---|"]
    for goal in checked:
        wanted = f"{'≥' if goal.at_least else '≤'} {goal.wanted:g}"
        figure = "no points" if goal.figure is None else f"{goal.figure:.3f}"
        figure += f" at {goal.point}" if goal.point else ""
        lines.append(f"| {goal.text} | {wanted} | {figure} | {'yes' if goal.met else 'no'} |")
    return "\n".join(lines)


def _large(found: Iterable[Ratio]) -> list[Ratio]:
    return [ratio for ratio in found if ratio.x_bytes >= SMALLEST]


def _means(
    found: Sequence[Ratio],
    wanted: Iterable[tuple[str, tuple[str, ...], tuple[float, float]]],
    what: str,
    *,
    at_least: bool,
) -> Iterator[Goal]:
    for norms, directions, bounds in wanted:
        for dtype, bound in zip(DTYPES, bounds, strict=True):
            chosen = [
                ratio
                for ratio in found
                if norms in (ratio.operator, ratio.kind)
                and ratio.direction in directions
                and ratio.dtype == dtype
            ]
            figure = geometric_mean(chosen) if chosen else None
            text = f"{norms} {' and '.join(directions)}, {dtype}: {what}, mean"
            yield Goal(text, bound, figure, at_least)


def _slowest(speeds: Sequence[Ratio]) -> Goal:
    text = "every point: × torch"
    if not speeds:
        return Goal(text, SLOWEST_POINT, None, at_least=True)
    worst = min(speeds, key=lambda ratio: ratio.value)
    return Goal(text, SLOWEST_POINT, worst.value, at_least=True, point=worst.point)


def _left_out(rows: Sequence[Row]) -> Goal:
    """Return the goal that each timed point has cunorm, as wrong results are not timed."""
    points = points_without(rows, "cunorm")
    text = "points where others were timed and cunorm was not"
    return Goal(text, 0, len(points), at_least=False, point=", ".join(points))


def _missing(rows: Sequence[Row]) -> Goal:
    """Return the goal that the default grid was timed, with all providers that goals compare."""
    has: dict[str, set[str]] = {}
    for row in rows:
        has.setdefault(" ".join(filter(None, row.point)), set()).add(row.provider)
    points = []
    for point in grid.default_points("cpu", grid.DEFAULT_OPERATORS):
        gated = {"cunorm-ungated"} if point.operator.gate_position else set()
        if not {"cunorm", "torch", "copy"} | gated <= has.get(str(point), set()):
            points.append(str(point))
    named = points[:NAMED]
    if more := len(points) - len(named):
        named.append(f"and {more} more")
    text = "points of the default grid that were not timed"
    return Goal(text, 0, len(points), at_least=False, point=", ".join(named))
