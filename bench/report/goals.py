# SPDX-License-Identifier: MIT
"""The goals for the speed on a CPU, and whether the rows of a CSV meet them.

Goals for speed are for points whose x has 1 MiB or more. A goal without points is not met, and a
CSV must have every point of the default grid. A CSV whose SIMD is AVX2 has its own goals, and also
needs the points of float16.

The project's other goals are not checked here: the host cost of small calls
(`python -m bench --host`), the speed against JAX on a CPU (`python -m bench table --peer jax`), the
time to compile and to import, and all measurements on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bench.report.ratios import Ratio, geometric_mean, points_without, ratios
from bench.timing import grid
from bench.timing.rows import Row

SMALLEST = 2**20  # bytes of x; the time of calls on a smaller x is mostly host time
SLOWEST_POINT, SLOWEST_POINT_AVX2 = 0.97, 1.0  # least speed of a point, × torch's
HALF = 1.3  # the largest ratio of float16's time to bfloat16's
DTYPES = ("float32", "bfloat16")
BOTH = ("forward", "backward")
NAMED = 10  # missing points that are named; the others are counted

# The least geometric means of torch's time over cunorm's. A line has an operator or kind of norms,
# the directions, and a bound for each of DTYPES.
SPEED = (
    ("layer_norm", ("forward",), (1.05, 1.5)),
    ("layer_norm", ("backward",), (1.4, 2.0)),
    ("rms_norm", ("forward",), (3.0, 6.0)),
    ("rms_norm", ("backward",), (6.0, 12.0)),
    ("gated norms", BOTH, (4.0, 4.0)),
    # A bound of 2.5 for float32 would exceed the speed of a copy, even in the last-level cache.
    ("group_norm+silu", BOTH, (2.0, 2.5)),
)
SPEED_AVX2 = (
    ("layer_norm", ("forward",), (1.05, 1.3)),
    ("layer_norm", ("backward",), (1.3, 1.8)),
    ("rms_norm", ("forward",), (2.8, 6.0)),
    ("rms_norm", ("backward",), (6.0, 10.0)),
    ("gated norms", BOTH, (3.5, 3.5)),
    ("group_norm+silu", ("forward",), (1.5, 1.5)),
    ("group_norm+silu", ("backward",), (1.6, 2.2)),
)
# The largest means of cunorm's time over a copy's, and over the time without the gate.
OVER_COPY = tuple(("ungated norms", (direction,), (1.25, 2.0)) for direction in BOTH)
OVER_UNGATED = tuple(("gated norms", (direction,), (2.0, 2.0)) for direction in BOTH)


@dataclass(frozen=True)
class Goal:
    """A figure and its bound; unless the figure is a mean, also the points that it is about."""

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
    speeds = large(ratios(rows, "torch", "cunorm"))
    if "SIMD cunorm AVX2" in rows[0].versions:
        return [
            *_means(speeds, SPEED_AVX2, "× torch", at_least=True),
            _worst("every point: × torch", SLOWEST_POINT_AVX2, speeds, at_least=True),
            _worst("every point: float16's time / bfloat16's", HALF, halves(rows), at_least=False),
            _left_out(rows),
            _missing(rows, (*DTYPES, "float16")),
        ]
    over_copy = large(ratios(rows, "cunorm", "copy"))
    over_ungated = large(ratios(rows, "cunorm", "cunorm-ungated"))
    return [
        *_means(speeds, SPEED, "× torch", at_least=True),
        _worst("every point: × torch", SLOWEST_POINT, speeds, at_least=True),
        *_means(over_copy, OVER_COPY, "time / copy", at_least=False),
        *_means(over_ungated, OVER_UNGATED, "time / ungated", at_least=False),
        _left_out(rows),
        _missing(rows, DTYPES),
    ]


def halves(rows: Iterable[Row]) -> list[Ratio]:
    """Return cunorm's time on float16 over that on bfloat16, at the points of 1 MiB and more."""
    ours = [row for row in rows if row.provider == "cunorm"]
    by_dtype = [replace(row, provider=row.dtype, dtype="float16") for row in ours]
    return large(ratios(by_dtype, "float16", "bfloat16"))


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


def large(found: Iterable[Ratio]) -> list[Ratio]:
    """Return the ratios of points whose x has 1 MiB or more."""
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


def _worst(text: str, wanted: float, found: Sequence[Ratio], *, at_least: bool) -> Goal:
    if not found:
        return Goal(text, wanted, None, at_least)
    worst = (min if at_least else max)(found, key=lambda ratio: ratio.value)
    return Goal(text, wanted, worst.value, at_least, point=worst.point)


def _left_out(rows: Sequence[Row]) -> Goal:
    """Return the goal that cunorm was timed at each point, which needs right results."""
    points = points_without(rows, "cunorm")
    text = "points where others were timed and cunorm was not"
    return Goal(text, 0, len(points), at_least=False, point=", ".join(points))


def _missing(rows: Sequence[Row], dtypes: Sequence[str]) -> Goal:
    """Return the goal that the default grid was timed, with all providers that goals compare."""
    has: dict[str, set[str]] = {}
    for row in rows:
        has.setdefault(" ".join(filter(None, row.point)), set()).add(row.provider)
    points = []
    for point in grid.default_points("cpu", grid.DEFAULT_OPERATORS, dtypes=dtypes):
        needed = {"cunorm"}
        if point.dtype in DTYPES:  # torch is wrong on some points of float16
            needed |= {"torch", "copy"}
            needed |= {"cunorm-ungated"} if point.operator.gate_position else set()
        if not needed <= has.get(str(point), set()):
            points.append(str(point))
    named = points[:NAMED]
    if more := len(points) - len(named):
        named.append(f"and {more} more")
    text = "points of the default grid that were not timed"
    return Goal(text, 0, len(points), at_least=False, point=", ".join(named))
