# SPDX-License-Identifier: MIT
"""`python -m bench [time]`: cunorm and other providers, checked and timed in turns.

Each provider is first checked against the oracle, on a few rows. The table goes to standard output,
the rows of the CSV to --out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.timing import arguments, grid, providers
from bench.timing.cases import DTYPES, OPERATORS
from cunorm._backends.cpu.threads import thread_count

if TYPE_CHECKING:
    from bench.timing.engine import Device, Failure
    from bench.timing.machine import Environment
    from bench.timing.rows import Row

_EXTRAS = {"cpu": "`bench`", "cuda": "`cuda13` or `cuda12`"}
_AXES = {operator.name: operator.axes for operator in OPERATORS}
_COMMANDS = (
    "Other commands, each with its own --help: against times another checkout beside this one, "
    "busy times calls on a busy machine, accuracy measures errors, "
    "static and bytes judge the GPU plans without a GPU, table and plot draw from the CSV"
)
_NOT_OF_HOST = (
    *("device", "dtype", "direction", "shapes", "providers"),
    *("quick", "seconds", "seconds_total", "calls", "march"),
)


def main(argv: Sequence[str]) -> int:
    """Read the command line, time every point, print the table; return the exit status."""
    options = parse(argv)
    if options.host:
        return _host(options)
    device = _device(options)
    found, missing = providers.load(device.kind, options.providers)
    for name, error in missing.items():
        print(f"{name} is left out: {type(error).__name__}: {error}", file=sys.stderr)
    if not found:
        print("no provider is left", file=sys.stderr)
        return 1
    return _run(device, found, options)


def _run(device: Device, found: list[providers.Provider], options: argparse.Namespace) -> int:
    from bench.report import screen as report
    from bench.timing import machine, rows

    points = _points(options)
    environment = machine.environment(device, found)
    print(f"{environment}\n{device.note}", flush=True)
    _progress("compiling")
    device.prepare(points)
    timed: list[Row] = []
    failures: list[Failure] = []
    left = len(points)
    if options.out:
        rows.write_csv(options.out, [])
    try:
        for new, failed in _time_points(device, points, found, environment, options):
            left -= 1
            timed += new
            failures += failed
            if options.out:  # write at once, because a signal may end the run
                rows.append_csv(options.out, new)
    finally:
        _progress("")
        print(report.table(timed))
    if options.out:
        rows.write_csv(options.out, report.in_order(timed))
    if left:
        print(f"{left} points were left out: {options.seconds_total:.0f} s were over.")
    if failures:
        print("", *failures, sep="\n")
    return 1 if any(failure.is_ours for failure in failures) else 0


def _time_points(
    device: Device,
    points: Sequence[grid.Point],
    found: Sequence[providers.Provider],
    environment: Environment,
    options: argparse.Namespace,
) -> Iterator[tuple[list[Row], list[Failure]]]:
    """Yield the rows and failures of each point, until the time is over.

    If memory is too small, points shrink and may become equal; equal points are timed once.
    """
    from bench.timing import engine

    deadline = time.monotonic() + (options.seconds_total or float("inf"))
    seen: set[str] = set()
    for number, point in enumerate(points, start=1):
        if time.monotonic() > deadline:
            return
        _progress(f"{number}/{len(points)} {point}")
        new: list[Row] = []
        failed: list[Failure] = []
        try:
            usable = [p for p in found if p.supports(point.operator, point.direction, point.dtype)]
            point = device.fitting(point, 1 + len(usable))
            if str(point) not in seen:
                new, failed = engine.time_point(device, point, found, environment, options.seconds)
        except Exception as error:  # the other points are still timed
            failed = [engine.Failure(point, engine.COPY, error)]
        # `time_point` may have made the point smaller, if less memory is free now.
        new = [row for row in new if _name(row) not in seen]
        seen |= {str(point), *map(_name, new)}
        for failure in failed:
            _progress(f"{failure}\n")
        yield new, failed


def _name(row: Row) -> str:
    """Return the point of a row as text."""
    return " ".join(filter(None, row.point))


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
    return cpu.Cpu(options.threads, options.calls)


def _host(options: argparse.Namespace) -> int:
    from bench.compare import host, host_against
    from bench.timing import cpu

    device = cpu.Cpu(options.threads)
    operators = [one for one in OPERATORS if one.name in options.op]
    if options.against:
        return host_against.run(operators, device, options.against, options.out)
    return host.run(operators, device, options.out)


def _points(options: argparse.Namespace) -> list[grid.Point]:
    chosen = (options.op, options.direction, options.dtype)
    if options.shapes:
        return list(grid.points(options.shapes, *chosen))
    return list(grid.default_points(options.device, *chosen, quick=options.quick))


def _progress(text: str) -> None:
    """Overwrite the last line of standard error; if it is not a terminal, write a new line."""
    if sys.stderr.isatty():
        print(f"\r{text:79}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text.rstrip(), file=sys.stderr, flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line, with the defaults of its device."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, epilog=_COMMANDS)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--op", type=arguments.list_of(_AXES), help=f"some of {', '.join(_AXES)}")
    add("--dtype", type=arguments.list_of(DTYPES), default=list(grid.DEFAULT_DTYPES))
    directions = list(grid.DIRECTIONS)
    add("--direction", type=arguments.list_of(directions), default=directions)
    shapes_help = "ROWSxWIDTH,...; for group norms NxCxHxW; default: the grid"
    add("--shapes", type=arguments.shapes, help=shapes_help)
    names = dict.fromkeys(name for found in providers.LOADERS.values() for name in found)
    providers_help = f"some of {', '.join(names)}; a copy is always timed"
    add("--providers", type=arguments.list_of(names), help=providers_help)
    add("--quick", action="store_true", help="a part of the grid, in about two minutes")
    add("--seconds", type=arguments.seconds, help="seconds for each point")
    add("--seconds-total", type=arguments.seconds, help="begin no point after so many seconds")
    add(
        "--calls",
        type=arguments.count,
        help="calls in a turn on a CPU; default: the number of copies that fit in 1 ms, at most 10",
    )
    march_help = "compile cunorm for this -march; if it lacks AVX-512, the others do not use it"
    add("--march", help=f"{march_help}; default: native")
    add("--threads", type=arguments.count, default=thread_count(), help="threads on a CPU")
    add("--out", type=Path, metavar="FILE.csv", help="write the rows here")
    add("--host", action="store_true", help="time the host cost of small calls on a CPU instead")
    against_help = "with --host: another checkout, which is timed in its own processes, too"
    add("--against", type=Path, metavar="CHECKOUT", help=against_help)
    options = parser.parse_args(argv)
    ignored = [name for name in _NOT_OF_HOST if getattr(options, name) != parser.get_default(name)]
    if options.host and ignored:
        parser.error(f"--host takes no --{ignored[0].replace('_', '-')}")
    _fill_defaults(options)
    if fault := _fault(options):
        parser.error(fault)
    return options


def _fault(options: argparse.Namespace) -> str | None:
    """Return the error of options that do not go together, or None."""
    for name in options.op if options.shapes else ():
        if _AXES[name] not in {len(shape) for shape in options.shapes}:
            return f"--shapes has none of {_AXES[name]} sizes, which --op {name} takes"
    for name in options.providers:
        if name not in providers.LOADERS[options.device]:
            return f"--providers: {name} is not for --device {options.device}"
    if options.march and options.device != "cpu":
        return "--march is for a CPU"
    if options.against and not options.host:
        return "--against needs --host; python -m bench against times calls of any size"
    if options.against and not (options.against / "cunorm" / "__init__.py").is_file():
        return f"--against: {options.against} is no checkout of cunorm"
    if options.out and not options.out.parent.is_dir():
        return f"--out: there is no folder {options.out.parent}"
    return None


def _fill_defaults(options: argparse.Namespace) -> None:
    """Fill in the defaults of options."""
    if options.op is None:
        names: Sequence[str] = grid.DEFAULT_OPERATORS
        if options.quick:
            names = grid.quick_operators(options.device)
        if options.host:
            names = ("rms_norm", "layer_norm")
        given = {len(shape) for shape in options.shapes or ()} or {2, 4}
        options.op = [name for name in names if _AXES[name] in given]
    if options.providers is None:
        options.providers = list(providers.DEFAULT[options.device])
    elif "cunorm" in options.providers:  # cunorm-ungated shows the cost of a gate
        options.providers = list(dict.fromkeys([*options.providers, "cunorm-ungated"]))
    if options.seconds is None:
        on_cpu = 1.0 if options.quick else 1.5
        options.seconds = on_cpu if options.device == "cpu" else 0.5
