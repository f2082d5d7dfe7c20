# SPDX-License-Identifier: MIT
"""Argument types of the command lines for argparse, and the arguments that commands share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bench.timing.cases import DTYPES, TIMED, Shape


def list_of(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names among `allowed`; duplicates are dropped."""
    choices = list(allowed)

    def parse(text: str) -> list[str]:
        given = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in given if name not in choices]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}, expected some of {choices}")
        return given

    return parse


def shapes(text: str) -> list[Shape]:
    """Read comma-separated shapes of rows or of images; duplicates are dropped."""
    try:
        found = [tuple(map(int, shape.split("x"))) for shape in text.split(",")]
    except ValueError:
        found = [()]
    if not {len(shape) for shape in found} <= {2, 3, 4}:
        raise argparse.ArgumentTypeError(f"{text!r}, expected ROWSxWIDTH,... or NxCxHxW,...")
    if min(map(min, found)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected sizes of at least 1")
    return list(dict.fromkeys(found))


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """Read a number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}, expected seconds above 0")
    return number


def add_grid(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of commands that time points."""
    from cunorm._backends.cpu.threads import thread_count

    add, names = parser.add_argument, list(dict.fromkeys(one.name for one in TIMED))
    both = ["forward", "backward"]
    add("--op", type=list_of(names), help=f"some of {', '.join(names)}")
    add("--dtype", type=list_of(DTYPES), default=["float32", "bfloat16"], help=", ".join(DTYPES))
    add("--direction", type=list_of(both), default=both, help=", ".join(both))
    add(
        "--shapes",
        type=shapes,
        help="ROWSxWIDTH,...; for group norms NxCxHxW; modulated NxROWSxWIDTH",
    )
    add("--seconds", type=seconds, help="seconds for each point")
    march = "compile cunorm for this -march; PyTorch and JAX use no AVX-512 if it lacks it"
    add("--march", help=f"{march}; default: native")
    add("--threads", type=count, default=thread_count(), help="threads on a CPU")
    add("--out", type=Path, metavar="FILE.csv", help="write the rows here")


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; `--out` must be in a folder that is there."""
    options = parser.parse_args(argv)
    if options.out and not options.out.parent.is_dir():
        parser.error(f"--out: there is no folder {options.out.parent}")
    return options
