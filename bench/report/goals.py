# SPDX-License-Identifier: MIT
"""The goals for the speed on a CPU, and whether the rows of a CSV meet them.

Goals for times are for points whose x has 1 MiB or more. A goal without points is not met, and a
CSV must have every point of the default grid. A CSV whose SIMD is AVX2 has its own goals, and also
needs the points of float16.

The project's other goals are not checked here: the host cost of small calls
(`python -m bench --host`), the speed against JAX on a CPU, the time to compile and to import, and
all measurements on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.report.ratios import Ratio, geometric_mean, ratios
from bench.timing import grid
from bench.timing.rows import Row

SMALLEST = 2**20  # bytes of x; the time of calls on a smaller x is mostly host time
DTYPES = ("float32", "bfloat16")
BOTH = ("forward", "backward")

# The bounds of geometric means, for each of DTYPES, by operator or kind of norms and by direction:
# of torch's time over cunorm's at least, of cunorm's over a copy's and the ungated norm's at most.
SPEED, OVER_COPY, OVER_UNGATED = (
    ("torch", "cunorm"),
    ("cunorm", "copy"),
    ("cunorm", "cunorm-ungated"),
)
TEXTS = {SPEED: "× torch", OVER_COPY: "time / copy", OVER_UNGATED: "time / ungated"}
MEANS = (
    (SPEED, "layer_norm", ("forward",), (1.05, 1.5)),
    (SPEED, "layer_norm", ("backward",), (1.4, 2.0)),
    (SPEED, "rms_norm", ("forward",), (3.0, 6.0)),
    (SPEED, "rms_norm", ("backward",), (6.0, 12.0)),
    (SPEED, "gated norms", BOTH, (4.0, 4.0)),
    # A bound of 2.5 for float32 would exceed the speed of a copy, even in the last-level cache.
    (SPEED, "group_norm+silu", BOTH, (2.0, 2.5)),
    (OVER_COPY, "ungated norms", ("forward",), (1.25, 2.0)),
    (OVER_COPY, "ungated norms", ("backward",), (1.25, 2.0)),
    (OVER_UNGATED, "gated norms", ("forward",), (2.0, 2.0)),
    (OVER_UNGATED, "gated norms", ("backward",), (2.0, 2.0)),
)
MEANS_AVX2 = (
    (SPEED, "layer_norm", ("forward",), (1.05, 1.3)),
    (SPEED, "layer_norm", ("backward",), (1.3, 1.8)),
    (SPEED, "rms_norm", ("forward",), (2.8, 6.0)),
    (SPEED, "rms_norm", ("backward",), (6.0, 10.0)),
    (SPEED, "gated norms", BOTH, (3.5, 3.5)),
    (SPEED, "group_norm+silu", ("forward",), (1.5, 1.5)),
    (SPEED, "group_norm+silu", ("backward",), (1.6, 2.2)),
)
SLOWEST, SLOWEST_AVX2 = 0.97, 1.0  # least speed of a point, × torch's
HALF = 1.3  # the largest ratio of float16's time to bfloat16's


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
    is_avx2 = "SIMD cunorm AVX2" in rows[0].versions
    found = {pair: large(ratios(rows, *pair)) for pair in TEXTS}
    checked = []
    for pair, norms, directions, bounds in MEANS_AVX2 if is_avx2 else MEANS:
        for dtype, bound in zip(DTYPES, bounds, strict=True):
            chosen = [
                ratio
                for ratio in found[pair]
                if norms in (ratio.operator, _kind(ratio))
                and ratio.direction in directions
                and ratio.dtype == dtype
            ]
            figure = geometric_mean(chosen) if chosen else None
            text = f"{norms} {' and '.join(directions)}, {dtype}: {TEXTS[pair]}, mean"
            checked.append(Goal(text, bound, figure, at_least=pair == SPEED))
    slowest = min(found[SPEED], key=lambda ratio: ratio.value, default=None)
    wanted = SLOWEST_AVX2 if is_avx2 else SLOWEST
    checked.append(_of_point("every point: × torch", wanted, slowest, at_least=True))
    if is_avx2:
        worst = max(halves(rows), key=lambda ratio: ratio.value, default=None)
        text = "every point: float16's time / bfloat16's"
        checked.append(_of_point(text, HALF, worst, at_least=False))
    missing = _missing(rows, (*DTYPES, *(("float16",) if is_avx2 else ())))
    text, named = "points of the default grid that were not timed", ", ".join(missing[:10])
    return [*checked, Goal(text, 0, len(missing), at_least=False, point=named)]


def halves(rows: Iterable[Row]) -> list[Ratio]:
    """Return cunorm's time on float16 over that on bfloat16, at the points of 1 MiB and more."""
    ours = [row for row in rows if row.provider == "cunorm"]
    by_dtype = [replace(row, provider=row.dtype, dtype="float16") for row in ours]
    return large(ratios(by_dtype, "float16", "bfloat16"))


def table(checked: Iterable[Goal]) -> str:
    """Return the goals as a Markdown table, after a line about their points."""
    lines = ["The goals for times are for the points whose x has 1 MiB or more:", ""]
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


def _kind(ratio: Ratio) -> str:
    """Return "gated norms" or "ungated norms"; group norms are neither."""
    gated = ratio.operator.endswith("_gate")
    return "" if ratio.memory else "gated norms" if gated else "ungated norms"


def _of_point(text: str, wanted: float, worst: Ratio | None, *, at_least: bool) -> Goal:
    if worst is None:
        return Goal(text, wanted, None, at_least)
    return Goal(text, wanted, worst.value, at_least, worst.point)


def _missing(rows: Sequence[Row], dtypes: Sequence[str]) -> list[str]:
    """Return the points of the default grid that lack a provider that goals compare."""
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
    return points
