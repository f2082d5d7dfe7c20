# SPDX-License-Identifier: MIT
"""The command line of an example: parsers of numbers, and the options that all examples have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def size(text: str) -> int:
    """Parse an int of at least 1."""
    return at_least(1, text)


def seed(text: str) -> int:
    """Parse an int of at least 0."""
    return at_least(0, text)


def at_least(smallest: int, text: str) -> int:
    """Parse an int that is not smaller than `smallest`."""
    number = int(text)
    if number < smallest:
        raise argparse.ArgumentTypeError(f"is {number}, expected at least {smallest}")
    return number


def rate(text: str) -> float:
    """Parse a finite number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text}, expected a finite number above 0")
    return number


def new_file(text: str) -> Path:
    """Parse the path of a file in an existing folder, so that the run can save its picture."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"is {text}, expected a file in a folder that exists")
    return path


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    *,
    picture: str,
    quick: dict[str, Any],
) -> argparse.Namespace:
    """Add --device, --output and --quick, and parse the command line.

    `picture` is the default of --output; `quick` has the defaults of a run with --quick.
    """
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda if there is a device, else cpu"
    )
    parser.add_argument(
        "--output",
        type=new_file,
        default=Path(picture),
        metavar="FILE.png",
        help=f"the picture; default: {picture}",
    )
    smaller = " ".join(f"--{name} {value}" for name, value in quick.items())
    parser.add_argument("--quick", action="store_true", help=f"end in seconds, with {smaller}")
    if parser.parse_args(argv).quick:
        parser.set_defaults(**quick)
    return parser.parse_args(argv)
