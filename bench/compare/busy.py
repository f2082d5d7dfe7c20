# SPDX-License-Identifier: MIT
"""`python -m bench busy`: cunorm and torch in turns on a CPU that other processes keep busy.

A busy machine slows a call most if its threads wait for each other. Most points are calls of about
0.25 ms. The exit status is 1 if, under load, cunorm's median at some point exceeds
`--most` times torch's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.timing import arguments, cpu, engine, grid, machine, providers
from bench.timing.turns import Turn
from cunorm._backends.cpu.threads import available_cores, thread_count

OPERATORS = ("rms_norm", "layer_norm", "group_norm+silu")
SHAPES = ((1024, 1024), (1, 128, 64, 64))
NAMES = ("cunorm", "torch")
# The program of a process that works until its parent ends.
_WORK = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**5))"


def main(argv: Sequence[str]) -> int:
    """Time each point without and under load, and print medians and ratios."""
    options = parse(argv)
    device = cpu.Cpu(options.threads, calls_per_turn=1)
    found, _ = providers.load("cpu", NAMES)
    points = list(grid.points(SHAPES, OPERATORS, dtypes=options.dtype))
    device.prepare(points)
    print(machine.environment(device, found))
    print(
        f"medians of {options.calls} calls in µs: alone, and beside {options.processes} processes"
    )
    heads = [f"{name}{suffix}" for suffix in ("", ", busy") for name in NAMES]
    print(f"{'':46}" + "".join(f"{head:>14}" for head in [*heads, "busy ratio"]))
    ratios = []
    for point in points:
        turns = _turns(device, point, found)
        quiet = medians(turns, options.calls)
        with busy(options.processes):
            under_load = medians(turns, options.calls)
        ratios.append(under_load["cunorm"] / under_load["torch"])
        times = [1e6 * spent[name] for spent in (quiet, under_load) for name in NAMES]
        print(f"{point!s:46}{''.join(f'{us:14.0f}' for us in times)}{ratios[-1]:14.2f}", flush=True)
    print(f"largest ratio {max(ratios):.2f}, wanted at most {options.most:g}")
    return 1 if max(ratios) > options.most else 0


def _turns(
    device: cpu.Cpu, point: grid.Point, found: Sequence[providers.Provider]
) -> dict[str, Turn]:
    sets = device.operands(point)
    return {
        one.name: device.turn(
            one.calls(point.operator, point.direction, engine.view_all(one, sets)), one.wait
        )
        for one in found
    }


def medians(turns: dict[str, Turn], calls: int) -> dict[str, float]:
    """Return each provider's median seconds of a call; the calls take turns in random order."""
    order, spent = random.Random(0), {name: [0.0] * calls for name in turns}
    for call in range(calls):
        for name in order.sample(list(turns), len(turns)):
            spent[name][call] = turns[name].seconds()
    return {name: statistics.median(times) for name, times in spent.items()}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep a number of processes busy in the body of a with statement."""
    others = [subprocess.Popen([sys.executable, "-c", _WORK]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench busy", description=__doc__)
    add = parser.add_argument
    default = {"type": arguments.count, "help": "default: %(default)s"}
    add("--processes", default=available_cores(), **default)
    add("--threads", default=thread_count(), **default)
    add("--calls", default=200, **default)
    dtypes = list(grid.DEFAULT_DTYPES)
    add("--dtype", type=arguments.list_of(dtypes), default=dtypes)
    add("--most", type=float, default=1.5, help="limit of the ratio; default: %(default)s")
    return parser.parse_args(argv)
