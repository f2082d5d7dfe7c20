# SPDX-License-Identifier: MIT
"""`python -m bench [time]`: cunorm and what else there is, checked and timed in turns.

Whatever is timed first gives the oracle's results on some rows of its operands. The table goes to
the standard output, the rows to a CSV.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench import grid, providers
from bench.cases import DTYPES, OPERATORS, Shape
from cunorm._cpu import thread_count

if TYPE_CHECKING:
    from bench.engine import Device, Failure
    from bench.rows import Row

_EXTRAS = {"cpu": "`bench`", "cuda": "`cuda13` or `cuda12`"}
_AXES = {operator.name: operator.axes for operator in OPERATORS}


def main(argv: Sequence[str]) -> int:
    """Read the command line, time every point, and print the table; 1 if cunorm failed."""
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
    from bench import engine, machine, report, rows

    points = _points(options)
    facts = machine.facts(device, found)
    print(f"{facts}\n{device.note}", flush=True)
    _progress("compiling")
    device.prepare(points)
    timed: list[Row] = []
    failures: list[Failure] = []
    deadline = time.monotonic() + (options.seconds_total or float("inf"))
    left = len(points)
    try:
        for point in points:
            if time.monotonic() > deadline:
                break
            _progress(f"{len(points) - left + 1}/{len(points)} {point}")
            left -= 1
            try:
                new, failed = engine.time_point(device, point, found, facts, options.seconds)
            except Exception as error:  # of one point; the others are still wanted
                new, failed = [], [engine.Failure(point, engine.COPY, error)]
            timed += new
            failures += failed
            for failure in failed:
                _progress(f"{failure}\n")
    finally:  # where it is interrupted, what there is
        _progress("")
        if options.out:
            rows.write_csv(options.out, report.in_order(timed))
    print(report.table(timed))
    if left:
        print(f"{left} points were left out: {options.seconds_total:.0f} s were over.")
    if failures:
        print("", *failures, sep="\n")
    return 1 if any(failure.is_ours for failure in failures) else 0


def _device(options: argparse.Namespace) -> Device:
    try:
        if options.device == "cuda":
            from bench import gpu_timer

            return gpu_timer.find()
        from bench import cpu
    except ImportError as error:
        needed = "cunorm's extra " + _EXTRAS[options.device]
        raise SystemExit(f"{error}: timings need {needed}") from error
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
    return cpu.Cpu(options.threads, options.calls)


def _host(options: argparse.Namespace) -> int:
    from bench import cpu, host

    device = cpu.Cpu(options.threads)
    names = options.op
    return host.run([one for one in OPERATORS if one.name in names], device, options.out)


def _points(options: argparse.Namespace) -> list[grid.Point]:
    chosen = (options.op, options.direction, options.dtype)
    if options.shapes:
        return list(grid.points(options.shapes, *chosen))
    return list(grid.default_points(options.device, *chosen, quick=options.quick))


def _progress(text: str) -> None:
    """Write over the last line of the standard error."""
    print(f"\r{text:79}", end="", file=sys.stderr, flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return what the command line asks for, with the defaults of its device."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--op", type=_list_of(_AXES), help=f"some of {', '.join(_AXES)}")
    add("--dtype", type=_list_of(DTYPES), default=list(grid.DEFAULT_DTYPES))
    directions = list(grid.DIRECTIONS)
    add("--direction", type=_list_of(directions), default=directions)
    add("--shapes", type=_shapes, help="ROWSxWIDTH,...; of group norms NxCxHxW; default: the grid")
    known = dict.fromkeys(name for found in providers.LOADERS.values() for name in found)
    add("--providers", type=_list_of(known), help=f"some of {', '.join(known)}; copy is always one")
    add("--quick", action="store_true", help="a part of the grid, in about two minutes")
    add("--seconds", type=float, help="spent on each point")
    add("--seconds-total", type=float, help="after which no point is begun")
    add("--calls", type=int, help="in each turn on a CPU; default: as many as take 1 ms, up to 10")
    add("--threads", type=int, default=thread_count(), help="of a CPU")
    add("--out", type=Path, metavar="FILE.csv", help="write the rows here")
    add("--host", action="store_true", help="instead, what small calls cost the host on a CPU")
    options = parser.parse_args(argv)
    if options.calls is not None and options.calls < 1:
        parser.error(f"--calls is {options.calls}, expected at least 1")
    _choose(options)
    for name in options.op if options.shapes else ():
        if _AXES[name] not in {len(shape) for shape in options.shapes}:
            parser.error(f"--shapes has none of {_AXES[name]} sizes, which --op {name} takes")
    of_device = providers.LOADERS[options.device]
    for name in options.providers:
        if name not in of_device:
            parser.error(f"--providers: {name} is not for --device {options.device}")
    return options


def _choose(options: argparse.Namespace) -> None:
    """Fill in what was not asked for."""
    if options.op is None:
        names: Sequence[str] = grid.QUICK_OPERATORS if options.quick else grid.DEFAULT_OPERATORS
        if options.host:
            names = ("rms_norm", "layer_norm")
        given = {len(shape) for shape in options.shapes or ()} or {2, 4}
        options.op = [name for name in names if _AXES[name] in given]
    if options.providers is None:
        options.providers = list(providers.DEFAULT[options.device])
    elif "cunorm" in options.providers:  # what a gate costs, where there is one
        options.providers = list(dict.fromkeys([*options.providers, "cunorm-ungated"]))
    if options.seconds is None:
        on_cpu = 1.0 if options.quick else 1.5
        options.seconds = on_cpu if options.device == "cpu" else 0.5


def _list_of(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    choices = list(allowed)

    def parse(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in choices]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}, expected some of {choices}")
        return given

    return parse


def _shapes(text: str) -> list[Shape]:
    try:
        shapes = [tuple(map(int, shape.split("x"))) for shape in text.split(",")]
    except ValueError:
        shapes = [()]
    if not {len(shape) for shape in shapes} <= {2, 4}:
        raise argparse.ArgumentTypeError(f"{text!r}, expected ROWSxWIDTH,... or NxCxHxW,...")
    return shapes
