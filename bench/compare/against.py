# SPDX-License-Identifier: MIT
"""`python -m bench against CHECKOUT`: cunorm here and in another checkout, in turns on a CPU.

Both are imported into one process and get the same tensors and threads; each is first checked
against the oracle. A ratio is this checkout's time divided by the other's. A time is the 20th
percentile of the turns, because other work on the machine only adds to times and can double the
median. A point is an operator, direction, dtype and shape. If its ratio is beyond the limit, it is
timed twice more at the end, and the median of its three ratios counts. The exit status is 1 if a
point or the mean of all points is beyond its limit, or if a call failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.compare import copies
from bench.report.ratios import Ratio, geometric_mean, ratios
from bench.timing import arguments, cpu, engine, grid, machine, rows
from bench.timing.cases import DTYPES, OPERATORS, Shape
from bench.timing.providers import Cunorm, Provider
from cunorm._backends.cpu.threads import thread_count

THIS, OTHER, TIME = "cunorm", "other", "p20_us"
# Shapes of rows, from many short rows to one long row; (8, 1024) shows the host cost of a call.
# Shapes of samples follow.
SHAPES: tuple[Shape, ...] = (
    *((65536, 64), (16384, 256), (4096, 1024), (4096, 4096), (1024, 16384)),
    *((64, 65536), (4, 262144), (1, 1 << 20), (8, 1024)),
    *((2, 320, 64, 64), (2, 128, 128, 128), (4, 128, 97, 31), (1, 512, 64, 64)),
    *((8, 256, 32, 32), (32, 64, 16, 16), (1, 320, 8, 8)),
)
QUICK_SHAPES: tuple[Shape, ...] = ((65536, 64), (4096, 1024), (4, 262144))
QUICK_NAMES = ("rms_norm", "layer_norm", "rms_norm+post_gate", "add_rms_norm")
RETRIES = 2  # of a point beyond the limit

_NAMES = list(dict.fromkeys(operator.name for operator in OPERATORS))


@dataclass(frozen=True)
class Limits:
    """The largest ratios that do not count as slower."""

    mean: float
    point: float


def main(argv: Sequence[str]) -> int:
    """Time both copies at every point, and print the ratios."""
    options = parse(argv)
    try:
        other = copies.load(options.checkout)
        ours = Cunorm(THIS, "torch")
        copies.compile_for((ours.copy, other), options.march)
        avx512 = copies.has_avx512()
    except (ImportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    device = cpu.Cpu(options.threads, options.calls, (ours.copy, other))
    environment = machine.environment(device, [])
    print(f"{environment}, against {machine.commit_of(options.checkout)}\n{device.note}")
    print(f"compiled with -march={options.march or 'native'}, {'' if avx512 else 'no '}AVX-512")
    points = list(grid.points(options.shapes, options.op, options.direction, options.dtype))
    print(f"load average {os.getloadavg()[0]:.1f} before: others' work makes ratios noisy")
    print(f"compiling what {len(points)} points need", flush=True)
    device.prepare(points)
    run = _Run(device, (ours, Cunorm(OTHER, "torch", other)), environment, options)
    found = run.ratios(points)
    if options.out:
        rows.write_csv(options.out, run.rows)
    limits = Limits(options.most_mean, options.most_point)
    print("\n" + table(found, limits))
    lost = beyond(found, limits)
    print("\n".join(["", *lost, *map(str, run.failures)]) if lost or run.failures else "no loss")
    return 1 if lost or run.failures else 0


class _Run:
    """Times points, and collects rows and failures."""

    def __init__(
        self,
        device: engine.Device,
        providers: tuple[Provider, Provider],
        environment: machine.Environment,
        options: argparse.Namespace,
    ) -> None:
        self.rows: list[rows.Row] = []  # retries included
        self.failures: list[engine.Failure] = []
        self._timing = (providers, environment, options.seconds)
        self._device, self._most = device, options.most_point

    def ratios(self, points: Sequence[grid.Point]) -> list[Ratio]:
        """Time points, and return their ratios.

        Points beyond the limit are timed again at the end, when others' work may have ended.
        """
        timed = [(point, self._time(point)) for point in points]
        lost = [(point, found) for point, found in timed if found and found[0].value > self._most]
        for point, found in lost * RETRIES:
            found += self._time(point)
        return [median(found) for _, found in timed if found]

    def _time(self, point: grid.Point) -> list[Ratio]:
        """Time a point, print its line, and return a list of its ratio, empty if a call failed."""
        new, failed = engine.time_point(self._device, point, *self._timing)
        self.rows += new
        self.failures += failed
        found = ratios(new, THIS, OTHER, TIME)
        times = ", ".join(f"{row.provider} {getattr(row, TIME):.4g} µs" for row in new)
        for ratio in found:
            print(f"{ratio.value:.3f}  {ratio.point}: {times}", flush=True)
        return found


def median(found: Sequence[Ratio]) -> Ratio:
    """Return the median of the ratios of one point."""
    return sorted(found, key=lambda ratio: ratio.value)[len(found) // 2]


def groups(found: Iterable[Ratio]) -> dict[str, list[Ratio]]:
    """Group ratios by operator, direction and dtype; add the groups "small calls" and "all"."""
    found = list(found)
    by_name: dict[str, list[Ratio]] = {}
    for ratio in found:
        by_name.setdefault(f"{ratio.label} {ratio.direction} {ratio.dtype}", []).append(ratio)
    small = [ratio for ratio in found if ratio.elements <= engine.HOST_ELEMENTS]
    if small:
        by_name["small calls"] = small
    return by_name | {"all": found}


def table(found: Sequence[Ratio], limits: Limits) -> str:
    """Return the geometric mean of each group, and its worst point."""
    lines = [f"{'this one / the other':44} mean  worst"]
    for name, group in groups(found).items() if found else ():
        mean, worst = geometric_mean(group), max(group, key=lambda ratio: ratio.value)
        at = worst.point if name in ("small calls", "all") else worst.shape
        lines.append(f"{name:44} {mean:.3f} {worst.value:.3f} at {at}")
    lines.append(f"wanted: mean of all at most {limits.mean:g}, each point {limits.point:g}")
    return "\n".join(lines)


def beyond(found: Sequence[Ratio], limits: Limits) -> list[str]:
    """Return a line for each ratio beyond its limit."""
    if not found:
        return ["LOSS nothing was compared"]
    mean = geometric_mean(found)
    lines = [f"LOSS geometric mean {mean:.3f}"] if mean > limits.mean else []
    return lines + [
        f"LOSS {one.value:.3f} {one.point}" for one in found if one.value > limits.point
    ]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench against", description=__doc__)
    add = parser.add_argument
    add("checkout", type=Path, help="the folder of the other checkout, which contains cunorm/")
    add("--march", help="the -march for which both are compiled; default: native")
    add("--op", type=arguments.list_of(_NAMES), help=f"some of {', '.join(_NAMES)}")
    add("--dtype", type=arguments.list_of(DTYPES), default=list(grid.DEFAULT_DTYPES))
    directions = list(grid.DIRECTIONS)
    add("--direction", type=arguments.list_of(directions), default=directions)
    add("--shapes", type=arguments.shapes, help="ROWSxWIDTH or NxCxHxW,...")
    add("--quick", action="store_true", help="fewer operators and shapes, in a minute")
    add("--seconds", type=arguments.seconds, default=0.7, help="seconds for each point")
    add("--calls", type=arguments.count, help="calls in a turn; default: as for `time`")
    add("--threads", type=arguments.count, default=thread_count())
    add("--most-mean", type=float, default=1.05, help="limit of the geometric mean")
    add("--most-point", type=float, default=1.25, help="limit of each point")
    add("--out", type=Path, metavar="FILE.csv", help="write the rows here")
    options = parser.parse_args(argv)
    options.op = options.op or (QUICK_NAMES if options.quick else grid.DEFAULT_OPERATORS)
    options.shapes = options.shapes or (QUICK_SHAPES if options.quick else SHAPES)
    if options.out and not options.out.parent.is_dir():
        parser.error(f"--out: there is no folder {options.out.parent}")
    return options
