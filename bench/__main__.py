# SPDX-License-Identifier: MIT
"""`python -m bench`: cunorm against PyTorch on this machine's CPU, in one process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from bench import cpu, cpu_report, host
from bench.cases import DTYPES, OPERATORS
from cunorm._cpu import thread_count

_SHAPES = "4096x4096,65536x256,512x16384,3000x1003"
_PLAIN = ["rms_norm", "layer_norm"]


def main() -> int:
    """Read the command line, time every point, and print the table."""
    options = _arguments()
    cpu.keep_freed_memory()
    if options.host:
        print(host.table([operator for operator in OPERATORS if operator.name in options.op]))
        return 0
    points = [
        cpu.Point(operator, direction, dtype, *shape)
        for operator in OPERATORS
        if operator.name in options.op
        for direction in options.direction
        for dtype in options.dtype
        for shape in options.shapes
    ]
    print("compiling", end="", file=sys.stderr, flush=True)
    cpu.compile_ahead(points)
    results = []
    for number, point in enumerate(points, start=1):
        print(f"\r{number}/{len(points)} {point:60}", end="", file=sys.stderr, flush=True)
        results.append(cpu.measure(point, options.seconds))
    print(file=sys.stderr)
    print(cpu_report.table(results, options.threads))
    if options.out:
        cpu_report.write_csv(options.out, results)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = [operator.name for operator in OPERATORS]
    parser.add_argument(
        "--op",
        type=_list_of(names),
        help=f"some of {', '.join(names)}; by default {', '.join(_PLAIN)} and those with a gate",
    )
    parser.add_argument("--dtype", type=_list_of(DTYPES), default=["float32", "bfloat16"])
    directions = ["forward", "backward"]
    parser.add_argument("--direction", type=_list_of(directions), default=directions)
    parser.add_argument("--shapes", type=_shapes, default=_shapes(_SHAPES), help="ROWSxWIDTH,...")
    parser.add_argument("--seconds", type=float, default=1.5, help="spent on each point")
    parser.add_argument("--threads", type=int, default=thread_count())
    parser.add_argument("--out", type=Path, help="write a CSV here as well")
    parser.add_argument(
        "--host",
        action="store_true",
        help="instead, what calls on 1x64 and 4x64 cost the host (with --op and --threads alone)",
    )
    options = parser.parse_args()
    if options.host and options.out:
        parser.error("--host writes no CSV for --out")
    if options.op is None:
        gated = [operator.name for operator in OPERATORS if operator.gate_position]
        options.op = _PLAIN + ([] if options.host else gated)
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


def _shapes(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [tuple(map(int, shape.split("x"))) for shape in text.split(",")]
        return [(rows, width) for rows, width in pairs]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected ROWSxWIDTH,...") from None


if __name__ == "__main__":
    sys.exit(main())
