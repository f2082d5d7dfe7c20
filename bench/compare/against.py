# SPDX-License-Identifier: MIT
"""`python -m bench against CHECKOUT`: cunorm here and in another checkout, in turns on a CPU.

Both are imported into one process and get the same tensors and threads; each is first checked
against the oracle. A ratio is this checkout's time divided by the other's. A time is the 20th
percentile of the turns, because other work on the machine only adds to times and can double the
median. A point is an operator, direction, dtype and shape. If its ratio is beyond 1.25, it is
timed twice more at the end, and the median of its three ratios counts. The exit status is 1 if a
point is beyond 1.25, if the mean of all points is beyond 1.05, or if a call failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.compare import copies
from bench.report import records
from bench.report.ratios import Ratio, geometric_mean, grouped, ratios
from bench.timing import arguments, cpu, engine, grid, machine
from bench.timing.cases import Shape
from bench.timing.providers import Cunorm
from bench.timing.rows import Row

THIS, OTHER = "cunorm", "other"
MOST_MEAN, MOST_POINT = 1.05, 1.25
# Shapes of rows, from many short rows to one long row; the next two show the host cost of a call.
# Shapes of samples follow.
SHAPES: tuple[Shape, ...] = (
    *((65536, 64), (16384, 256), (4096, 1024), (4096, 4096), (1024, 16384)),
    *((64, 65536), (4, 262144), (1, 1 << 20), (8, 1024), (4, 64)),
    *((2, 320, 64, 64), (2, 128, 128, 128), (4, 128, 97, 31), (1, 512, 64, 64)),
    *((8, 256, 32, 32), (32, 64, 16, 16), (1, 320, 8, 8)),
)
RETRIES = 2  # of a point beyond the limit


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
    device = cpu.Cpu(options.threads, (ours.copy, other))
    environment = machine.environment(device, [])
    print(f"{environment}, against {machine.commit_of(options.checkout)}\n{device.note}")
    print(f"compiled with -march={options.march or 'native'}, {'' if avx512 else 'no '}AVX-512")
    points = list(grid.points(options.shapes, options.op, options.direction, options.dtype))
    print(f"load average {os.getloadavg()[0]:.1f} before: others' work makes ratios noisy")
    print(f"compiling what {len(points)} points need", flush=True)
    device.prepare(points)
    rows: list[Row] = []  # retries included
    failures: list[engine.Failure] = []

    def timed(point: grid.Point) -> list[Ratio]:
        both = (ours, Cunorm(OTHER, "torch", other))
        new, failed = engine.time_point(device, point, both, environment, options.seconds)
        rows.extend(new)
        failures.extend(failed)
        found = ratios(new, THIS, OTHER, "p20_us")
        times = ", ".join(f"{row.provider} {row.p20_us:.4g} µs" for row in new)
        for ratio in found:
            print(f"{ratio.value:.3f}  {ratio.point}: {times}", flush=True)
        return found

    found = median_ratios(points, timed)
    if options.out:
        records.write_csv(options.out, Row, rows)
    lost = [*beyond(found), *map(str, failures)]
    print("\n" + table(found), "\n".join(["", *lost]) if lost else "no loss", sep="\n")
    return 1 if lost else 0


def median_ratios(
    points: Sequence[grid.Point], timed: Callable[[grid.Point], list[Ratio]]
) -> list[Ratio]:
    """Time points, and return their ratios; a ratio is missing if a call failed.

    Points beyond the limit are timed again at the end, when others' work may have ended.
    """
    found = [(point, timed(point)) for point in points]
    lost = [(point, some) for point, some in found if some and some[0].value > MOST_POINT]
    for point, some in lost * RETRIES:
        some += timed(point)
    ordered = [sorted(some, key=lambda ratio: ratio.value) for _, some in found if some]
    return [some[len(some) // 2] for some in ordered]


def table(found: Sequence[Ratio]) -> str:
    """Return the geometric mean of each group of points, and its worst point."""
    small = [ratio for ratio in found if ratio.elements <= engine.HOST_ELEMENTS]
    groups = {" ".join(names): some for names, some in grouped(found).items()}
    lines = [f"{'this one / the other':44} mean  worst"]
    for name, group in (groups | {"small calls": small, "all": list(found)}).items():
        if group:
            worst = max(group, key=lambda ratio: ratio.value)
            at = worst.shape if name in groups else worst.point
            lines.append(f"{name:44} {geometric_mean(group):.3f} {worst.value:.3f} at {at}")
    lines.append(f"wanted: mean of all at most {MOST_MEAN}, each point {MOST_POINT}")
    return "\n".join(lines)


def beyond(found: Sequence[Ratio]) -> list[str]:
    """Return a line for each ratio beyond its limit."""
    if not found:
        return ["LOSS nothing was compared"]
    mean = geometric_mean(found)
    lines = [f"LOSS geometric mean {mean:.3f}"] if mean > MOST_MEAN else []
    return lines + [f"LOSS {one.value:.3f} {one.point}" for one in found if one.value > MOST_POINT]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench against", description=__doc__)
    what = "the folder of the other checkout, which contains cunorm/"
    parser.add_argument("checkout", type=Path, help=what)
    arguments.add_grid(parser)
    parser.set_defaults(op=list(grid.DEFAULT_OPERATORS), shapes=SHAPES, seconds=0.7)
    return arguments.parsed(parser, argv)
