# SPDX-License-Identifier: MIT
"""`python -m bench [time]`: cunorm and other providers, checked and timed in turns.

Each provider is first checked against the oracle, on a few rows. The times go to standard output,
the rows of the CSV to --out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.timing import arguments, grid, providers
from bench.timing.cases import TIMED

if TYPE_CHECKING:
    from bench.timing.engine import Device
    from bench.timing.rows import Row

_EXTRAS = {"cpu": "`bench`", "cuda": "`cuda13` or `cuda12`"}
_AXES = {operator.name: operator.axes for operator in TIMED}
_DIRECTIONS = {operator.name: operator.directions for operator in TIMED}
_COMMANDS = (
    "Other commands, each with its own --help: against times another checkout beside this one, "
    "accuracy measures errors, static and bytes judge the GPU plans without a GPU, builds compiles "
    "for a GPU check, table, plot and overview draw from CSV files"
)


def main(argv: Sequence[str]) -> int:
    """Read the command line, time every point, print the means; return the exit status."""
    options = parse(argv)
    device = _device(options)
    found = providers.load(device.kind, options.providers)
    if not found:
        print("no provider is left", file=sys.stderr)
        return 1
    return _run(device, found, options)


def _run(device: Device, found: list[providers.Provider], options: argparse.Namespace) -> int:
    """Time each point until the time is over; write rows at once: a signal may end the run.

    If memory is too small, points shrink and may become equal; equal points are timed once.
    """
    from bench.report import records, screen
    from bench.timing import engine, machine
    from bench.timing.rows import Row

    chosen = (options.op, options.direction, options.dtype)
    if options.shapes:
        points = list(grid.points(options.shapes, *chosen))
    else:
        points = list(grid.default_points(options.device, *chosen, quick=options.quick))
    environment = machine.environment(device, found)
    print(f"{environment}\n{device.note}\ncompiling what {len(points)} points need", flush=True)
    device.prepare(points)
    timed: list[Row] = []
    failures: list[engine.Failure] = []
    seen: set[tuple[str, ...]] = set()
    deadline = time.monotonic() + (options.seconds_total or float("inf"))
    if options.out:
        records.write_csv(options.out, Row, [])
    for number, point in enumerate(points):
        if time.monotonic() > deadline:
            seconds = f"{options.seconds_total:.0f} s were over"
            print(f"{len(points) - number} points were left out: {seconds}.")
            break
        new: list[Row] = []
        try:
            point = device.fitting(point, 1 + len(found))
            if point.columns in seen:
                continue
            seen.add(point.columns)
            new, failed = engine.time_point(device, point, found, environment, options.seconds)
        except Exception as error:  # the other points are still timed
            failed = [engine.Failure(point, engine.COPY, error)]
        timed += new
        failures += failed
        if new:
            print(f"{number + 1}/{len(points)} {screen.line(new)}", flush=True)
        if options.out:
            records.append_csv(options.out, new)
    print("", screen.means(timed), *failures, sep="\n")
    return 1 if any(failure.is_ours for failure in failures) else 0


def _device(options: argparse.Namespace) -> Device:
    try:
        if options.device == "cuda":
            from bench.timing import gpu_timer

            return gpu_timer.find()
        from bench.timing import cpu, simd

        if options.march:
            simd.limit(options.march)
    except ImportError as error:
        needed = "cunorm's extra " + _EXTRAS[options.device]
        raise SystemExit(f"{error}: timings need {needed}") from error
    except (RuntimeError, ValueError) as error:
        raise SystemExit(str(error)) from error
    return cpu.Cpu(options.threads)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line, with the defaults of its device."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, epilog=_COMMANDS)
    arguments.add_grid(parser)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu")
    names = dict.fromkeys(name for found in providers.LOADERS.values() for name in found)
    providers_help = f"some of {', '.join(names)}; a copy is always timed"
    add("--providers", type=arguments.list_of(names), help=providers_help)
    add("--quick", action="store_true", help="a part of the grid, in about two minutes")
    add("--seconds-total", type=arguments.seconds, help="begin no point after so many seconds")
    options = arguments.parsed(parser, argv)
    _fill_defaults(options)
    if fault := _fault(options):
        parser.error(fault)
    return options


def _fault(options: argparse.Namespace) -> str | None:
    """Return the error of options that do not go together, or None."""
    for name in options.op if options.shapes else ():
        if _AXES[name] not in {len(shape) for shape in options.shapes}:
            return f"--shapes has none of {_AXES[name]} sizes, which --op {name} takes"
    for name in options.op:
        if set(_DIRECTIONS[name]).isdisjoint(options.direction):
            return f"--direction is {options.direction[0]}, which --op {name} has not"
    for name in options.providers:
        if name not in providers.LOADERS[options.device]:
            return f"--providers: {name} is not for --device {options.device}"
    if options.march and options.device != "cpu":
        return "--march is for a CPU"
    return None


def _fill_defaults(options: argparse.Namespace) -> None:
    """Fill in the defaults of options."""
    if options.op is None:
        names: Sequence[str] = grid.DEFAULT_OPERATORS
        if options.quick:
            names = grid.quick_operators(options.device)
        given = {len(shape) for shape in options.shapes or ()} or {2, 4}
        options.op = [name for name in names if _AXES[name] in given]
    if options.providers is None:
        options.providers = list(providers.DEFAULT[options.device])
    elif "cunorm" in options.providers:  # cunorm-ungated shows the cost of a gate
        options.providers = list(dict.fromkeys([*options.providers, "cunorm-ungated"]))
    if options.seconds is None:
        on_cpu = 1.0 if options.quick else 1.5
        options.seconds = on_cpu if options.device == "cpu" else 0.5
