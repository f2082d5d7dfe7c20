# SPDX-License-Identifier: MIT
"""`python -m bench`: cunorm against PyTorch on this machine's CPU, in one process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from bench import cpu, cpu_report, host
from bench.cases import DTYPES, OPERATORS, Shape
from cunorm._cpu import thread_count

_SHAPES = "4096x4096,65536x256,512x16384,3000x1003,2x320x64x64,2x128x128x128,4x128x97x31"
_PLAIN = ["rms_norm", "layer_norm"]
_OF_CHANNELS = ["group_norm+silu"]


def main() -> int:
    """Read the command line, time every point, and print the table."""
    options = _arguments()
    cpu.keep_freed_memory()
    if options.host:
        print(host.table([operator for operator in OPERATORS if operator.name in options.op]))
        if "rms_norm" in options.op:
            print(f"\n{host.autograd_table()}")
        return 0
    points = [
        cpu.Point(operator, direction, dtype, shape)
        for operator in OPERATORS
        if operator.name in options.op
        for direction in options.direction
        for dtype in options.dtype
        for shape in options.shapes
        if len(shape) == operator.axes
    ]
    print("compiling", end="", file=sys.stderr, flush=True)
    cpu.compile_ahead(points)
    results = []
    for number, point in enumerate(points, start=1):
        print(f"\r{number}/{len(points)} {point:60}", end="", file=sys.stderr, flush=True)
        results.append(cpu.measure(point, options.seconds, options.calls))
    print(file=sys.stderr)
    print(cpu_report.table(results, options.threads, options.calls))
    if options.out:
        cpu_report.write_csv(options.out, results)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    axes = {operator.name: operator.axes for operator in OPERATORS}
    parser.add_argument(
        "--op",
        type=_list_of(axes),
        help=f"some of {', '.join(axes)}; by default {', '.join(_PLAIN)}, those with a gate and "
        f"{', '.join(_OF_CHANNELS)}, as far as --shapes has some for them",
    )
    parser.add_argument("--dtype", type=_list_of(DTYPES), default=["float32", "bfloat16"])
    directions = ["forward", "backward"]
    parser.add_argument("--direction", type=_list_of(directions), default=directions)
    parser.add_argument(
        "--shapes",
        type=_shapes,
        default=_shapes(_SHAPES),
        help="ROWSxWIDTH,...; of group norms NxCxHxW",
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="spent on each point")
    parser.add_argument("--calls", type=int, default=1, help="in each contestant's turn")
    parser.add_argument("--threads", type=int, default=thread_count())
    parser.add_argument("--out", type=Path, help="write a CSV here as well")
    parser.add_argument(
        "--host",
        action="store_true",
        help="instead, what small calls cost the host (with --op and --threads alone)",
    )
    options = parser.parse_args()
    if options.host and options.out:
        parser.error("--host writes no CSV for --out")
    if options.calls < 1:
        parser.error(f"--calls is {options.calls}, expected at least 1")
    given = {len(shape) for shape in options.shapes}
    if options.op is None:
        gated = [operator.name for operator in OPERATORS if operator.gate_position]
        options.op = _PLAIN + ([] if options.host else gated + _OF_CHANNELS)
        options.op = [name for name in options.op if axes[name] in given]
    for name in options.op:
        if axes[name] not in given:
            parser.error(f"--shapes has none of {axes[name]} sizes, which --op {name} takes")
    cpu.use_threads(options.threads)
    return options


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


if __name__ == "__main__":
    sys.exit(main())
